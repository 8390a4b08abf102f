import random

from bookings import busy_minutes, free, merge


def test_bookings_that_follow_each_other_are_one_block():
    assert merge([(540, 600), (600, 660)]) == [(540, 660)]


def test_a_whole_day_without_a_break_is_one_block():
    hours = [(hour * 60, hour * 60 + 60) for hour in range(9, 17)]
    random.Random(7).shuffle(hours)
    assert merge(hours) == [(540, 1020)]


def test_a_minute_of_pause_separates_blocks():
    assert merge([(540, 600), (601, 660)]) == [(540, 600), (601, 660)]


def test_no_bookings_make_no_blocks():
    assert merge([]) == []


def test_the_gaps_of_a_day_stay_the_same():
    assert free([(540, 600), (600, 660), (700, 720)], opens=480, closes=720) == [(480, 540), (660, 700)]


def test_minutes_are_counted_once():
    assert busy_minutes([(540, 600), (570, 630), (630, 640)]) == 100
