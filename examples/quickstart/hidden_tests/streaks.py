from datetime import date, timedelta

import pytest
from streaks import current_streak, longest_streak


def run(start, length):
    return [start + timedelta(days=number) for number in range(length)]


def test_a_longer_streak_after_a_pause_counts_fully():
    days = run(date(2024, 1, 1), 2) + run(date(2024, 2, 1), 5)
    assert longest_streak(days) == 5


def test_the_last_of_three_streaks_is_the_longest():
    days = run(date(2023, 12, 30), 3) + run(date(2024, 1, 10), 3) + run(date(2024, 2, 27), 4)
    assert longest_streak(days) == 4


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_one_streak_is_as_long_as_it_is(length):
    assert longest_streak(run(date(2024, 2, 20), length)) == length


def test_the_first_streak_stays_the_longest():
    days = run(date(2024, 1, 1), 6) + run(date(2024, 2, 1), 5)
    assert longest_streak(days) == 6


def test_days_apart_are_streaks_of_one():
    assert longest_streak([date(2024, 1, 1), date(2024, 1, 3), date(2024, 1, 5)]) == 1


def test_the_current_streak_is_the_last_one():
    days = run(date(2024, 1, 1), 6) + run(date(2024, 2, 1), 5)
    assert current_streak(days, date(2024, 2, 5)) == 5
