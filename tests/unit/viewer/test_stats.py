"""Rates, means and pass@k, against tables and against counting it out."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.viewer.stats import mean_over_tasks, pass_at_k, percentile, t_quantile


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228), (30, 2.042), (100, 1.984)],
)
def test_students_quantiles_are_those_of_the_table(freedom: int, table: float) -> None:
    assert t_quantile(freedom) == pytest.approx(table, abs=0.004)


def test_nothing_has_no_estimate_and_one_task_no_interval() -> None:
    assert mean_over_tasks([]) is None
    found = mean_over_tasks([0.5])
    assert found is not None
    assert (found.value, found.low, found.high) == (0.5, None, None)


def test_the_interval_of_a_mean_is_students_and_stays_in_its_bounds() -> None:
    found = mean_over_tasks([0.0, 1.0, 1.0])
    assert found is not None
    assert found.high == pytest.approx(2 / 3 + 4.303 * (1 / 3) ** 0.5 / 3**0.5)
    bounded = mean_over_tasks([0.0, 1.0, 1.0], low=0, high=1)
    assert bounded is not None
    assert (bounded.low, bounded.high) == (0, 1)


GROUP = st.integers(1, 7).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))


@given(st.lists(GROUP, min_size=1, max_size=5))
def test_pass_at_k_is_the_share_of_choices_of_k_attempts_that_solve(groups: list[tuple[int, int]]) -> None:
    points = pass_at_k({str(place): group for place, group in enumerate(groups)})
    assert [k for k, _ in points] == list(range(1, len(points) + 1))
    for k, estimate in points:
        shares: list[float] = []
        for total, solved in groups:
            if total >= k:
                chosen = list(combinations([True] * solved + [False] * (total - solved), k))
                shares.append(sum(map(any, chosen)) / len(chosen))
        assert estimate.value == pytest.approx(sum(shares) / len(shares))


def test_no_judged_group_has_no_curve() -> None:
    assert pass_at_k({"a": (0, 0)}) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_run_from_the_least_to_the_greatest(values: list[float]) -> None:
    values.sort()
    assert (percentile(values, 0), percentile(values, 1)) == (values[0], values[-1])
    assert values[0] <= percentile(values, 0.5) <= values[-1]
