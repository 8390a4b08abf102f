"""Practice streaks of a language course: how many days in a row somebody learned."""

from datetime import date
from itertools import pairwise


def practised_days(events):
    """The days of events such as "2024-03-01T18:20:00", each once, in order."""
    return sorted({date.fromisoformat(event[:10]) for event in events})


def longest_streak(days):
    """Length of the longest run of days in a row; 0 without any day."""
    if not days:
        return 0
    best = current = 1
    for previous, day in pairwise(days):
        if (day - previous).days == 1:
            current += 1
        else:
            current = 0
        best = max(best, current)
    return best


def current_streak(days, today):
    """Length of the run that reaches today or yesterday."""
    if not days or (today - days[-1]).days > 1:
        return 0
    length = 1
    for later, earlier in pairwise(reversed(days)):
        if (later - earlier).days != 1:
            break
        length += 1
    return length
