"""Canaries are never mistaken for the task's own tests."""

from __future__ import annotations

from rollwright.graders.pytest_run import Canaries


def test_no_canary_has_a_name_that_the_task_uses() -> None:
    taken = {"test_add", "test_sum", "test_zero"}
    for number in range(400):
        canaries = Canaries.of(f"{number:032x}", taken=taken)
        names = {canaries.passing.partition("::")[2], canaries.failing.partition("::")[2]}
        assert len(names) == 2
        assert not names & taken
