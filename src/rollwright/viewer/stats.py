"""The statistics of the pages: every rate and mean comes with the interval that its tasks give it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean, stdev

__all__ = ["Estimate", "mean_over_tasks", "pass_at_k", "percentile", "t_quantile"]

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; None where too little is known for one."""

    value: float
    low: float | None = None
    high: float | None = None


def mean_over_tasks(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> Estimate | None:
    """The mean of one value a task with Student's interval: attempts at one task are not independent, tasks are.

    `low` and `high`: bounds no value can pass.
    """
    if not values:
        return None
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean)
    half = t_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    below, above = mean - half, mean + half
    return Estimate(mean, below if low is None else max(low, below), above if high is None else min(high, above))


def pass_at_k(groups: Mapping[str, tuple[int, int]]) -> list[tuple[int, Estimate]]:
    """For each k the unbiased share of tasks that k attempts solve. `groups`: task → (judged attempts, resolved ones).

    Only tasks with at least k judged attempts count at k; k goes as far as half of the tasks do.
    """
    most = sorted((total for total, _ in groups.values() if total), reverse=True)
    if not most:
        return []
    points: list[tuple[int, Estimate]] = []
    for k in range(1, most[len(most) // 2] + 1):
        solved = [1 - comb(n - c, k) / comb(n, k) for n, c in groups.values() if n >= k]
        estimate = mean_over_tasks(solved, low=0.0, high=1.0)
        if estimate is not None:
            points.append((k, estimate))
    return points


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, at least one; between two of them where it falls there."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def t_quantile(freedom: int) -> float:
    """Student's 97.5 % quantile, to three digits (exact for one and two degrees, Cornish-Fisher beyond)."""
    if freedom == 1:
        return 12.706
    if freedom == 2:
        return 4.303
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4)
    )
