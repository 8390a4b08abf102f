import pytest
from bookings import busy_minutes, free, merge


def test_bookings_apart_stay_apart():
    assert merge([(60, 90), (120, 150)]) == [(60, 90), (120, 150)]


def test_overlapping_bookings_become_one_block():
    assert merge([(100, 160), (60, 120)]) == [(60, 160)]


def test_a_booking_inside_another_adds_nothing():
    assert merge([(60, 180), (90, 100)]) == [(60, 180)]


def test_a_backward_booking_is_refused():
    with pytest.raises(ValueError, match="before it starts"):
        merge([(90, 60)])


def test_free_time_lies_between_the_blocks():
    assert free([(60, 120), (180, 240)], opens=0, closes=300) == [(0, 60), (120, 180), (240, 300)]


def test_overlaps_are_counted_once():
    assert busy_minutes([(0, 60), (30, 90)]) == 90
