from datetime import date

from streaks import current_streak, longest_streak, practised_days


def march(*days):
    return [date(2024, 3, day) for day in days]


def test_a_day_counts_once():
    events = ["2024-03-02T08:00:00", "2024-03-01T23:59:59", "2024-03-02T21:00:00"]
    assert practised_days(events) == march(1, 2)


def test_days_in_a_row_are_a_streak():
    assert longest_streak(march(4, 5, 6, 7)) == 4


def test_the_first_streak_can_be_the_longest():
    assert longest_streak(march(1, 2, 3, 10, 11)) == 3


def test_no_days_are_no_streak():
    assert longest_streak([]) == 0


def test_the_current_streak_may_end_yesterday():
    days = march(1, 5, 6, 7)
    assert current_streak(days, date(2024, 3, 8)) == 3
    assert current_streak(days, date(2024, 3, 9)) == 0
