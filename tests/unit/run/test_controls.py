"""Controls during a run: when they are due, whom they convict, and that our own trouble convicts nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import anyio
import pytest

from rollwright.errors import GradingFailed, ImageQuarantined, LimitError, RollwrightError, SandboxGone
from rollwright.rollout import RolloutPlan
from rollwright.run.controls import Controls
from rollwright.store import RolloutRecord
from rollwright.testing.scripted_executor import plain_task
from rollwright.types import Failure, Stage

pytestmark = pytest.mark.anyio

BROKEN = ("the gold patch is unresolved, not resolved",)
TASK = plain_task("calc")


def plan(attempt: int, image: str = "calc") -> RolloutPlan:
    task = replace(TASK, agent=replace(TASK.agent, image=image))
    return RolloutPlan(run="run", task_name="calc", task=task, attempt=attempt)


def record(of: RolloutPlan, error: str | None = None) -> RolloutRecord:
    failure = None
    if error is not None:
        failure = Failure(stage=Stage.GRADED, error=error, message="m", fault="infra", retryable=True)
    return RolloutRecord(
        rollout=of.name,
        task=of.task_name,
        task_id="t",
        attempt=of.attempt,
        status="resolved" if error is None else "ungraded",
        reward=1.0 if error is None else None,
        trainable=error is None,
        counts_in_baseline=error is None,
        failure=failure,
    )


class Ends:
    """A check that ends as it is told, one after the other; then well."""

    def __init__(self, *ends: tuple[str, ...] | RollwrightError) -> None:
        self.asked: list[str] = []
        self._ends: Iterator[tuple[str, ...] | RollwrightError] = iter(ends)

    async def __call__(self, of: RolloutPlan) -> tuple[str, ...]:
        self.asked.append(of.name)
        end = next(self._ends, ())
        if isinstance(end, RollwrightError):
            raise end
        return end


async def end_all(controls: Controls, attempts: range, error: str | None = None) -> list[tuple[str, ...]]:
    return [await controls.ended(plan(n), record(plan(n), error)) for n in attempts]


async def test_a_control_is_due_after_so_many_graded_rollouts_of_an_image() -> None:
    check = Ends()
    controls = Controls(3, check)
    assert await end_all(controls, range(1, 8)) == [()] * 7
    assert check.asked == ["calc.3", "calc.6"]
    for n in range(8, 11):
        await controls.ended(plan(n, "other"), record(plan(n)))
    assert check.asked[2:] == ["calc.10"]


async def test_without_the_setting_there_are_none() -> None:
    check = Ends()
    assert await end_all(Controls(0, check), range(1, 9)) == [()] * 8
    assert check.asked == []


async def test_what_was_graded_since_the_last_good_control_is_withdrawn_and_nothing_more_is_begun() -> None:
    controls = Controls(2, Ends((), BROKEN, BROKEN))
    assert await end_all(controls, range(1, 5)) == [(), (), (), ("calc.3", "calc.4")]
    found = controls.quarantined(plan(5))
    assert isinstance(found, ImageQuarantined)
    assert found.details == {"image": "calc", "task": "calc", "problems": list(BROKEN)}
    assert controls.quarantined(plan(5, "other")) is None
    assert await end_all(controls, range(5, 7)) == [("calc.5",), ("calc.6",)]  # they were in flight


async def test_one_failure_is_taken_for_a_flake_of_the_task() -> None:
    check = Ends(BROKEN, ())
    controls = Controls(1, check)
    assert await end_all(controls, range(1, 3)) == [(), ()]
    assert check.asked == ["calc.1", "calc.1", "calc.2"]
    assert controls.quarantined(plan(1)) is None


@pytest.mark.parametrize("error", [SandboxGone("gone"), LimitError("full")])
async def test_a_control_that_could_not_be_run_convicts_nobody_and_is_owed(error: RollwrightError) -> None:
    check = Ends(error, BROKEN, BROKEN)
    controls = Controls(2, check)
    assert await end_all(controls, range(1, 4)) == [(), (), ("calc.1", "calc.2", "calc.3")]
    assert check.asked == ["calc.2", "calc.3", "calc.3"]


async def test_an_image_in_which_nothing_can_be_graded_any_more_is_quarantined_by_the_first_such_failure() -> None:
    failed = GradingFailed("the image's python3 could not start pytest")
    controls = Controls(100, Ends(failed, failed))
    assert await end_all(controls, range(1, 3)) == [(), ()]
    assert await end_all(controls, range(3, 4), "GradingFailed") == [("calc.1", "calc.2")]
    assert controls.quarantined(plan(4)) is not None


@pytest.mark.parametrize("error", ["SandboxGone", "EngineUnreachable", "AgentSilent"])
async def test_failures_that_are_not_the_images_ask_for_no_control(error: str) -> None:
    check = Ends()
    await end_all(Controls(1, check), range(1, 4), error)
    assert check.asked == []


async def test_a_control_that_is_asked_for_judges_what_no_other_has() -> None:
    check = Ends((), BROKEN, BROKEN)
    controls = Controls(100, check)
    assert await controls.prove(plan(1), []) == (), "nothing was graded"
    assert check.asked == []
    await end_all(controls, range(1, 3))
    assert await controls.prove(plan(1), []) == ()
    assert await controls.prove(plan(1), []) == ()
    assert check.asked == ["calc.1"], "it is asked for twice, and nothing was graded in between"
    assert await controls.prove(plan(1), ["calc.1", "calc.2"]) == ()
    assert check.asked == ["calc.1"], "those are proved"
    await end_all(controls, range(3, 5))
    assert await controls.prove(plan(1), ["calc.9", "calc.1", "calc.3"]) == ("calc.3", "calc.4", "calc.9")
    assert controls.quarantined(plan(5)) is not None
    assert await controls.prove(plan(1), []) == ()
    assert await Controls(0, check).prove(plan(1), ["calc.9"]) == ()


async def test_a_control_that_is_asked_for_waits_for_one_that_runs() -> None:
    gate = anyio.Event()
    asked: list[str] = []

    async def slow(of: RolloutPlan) -> tuple[str, ...]:
        asked.append(of.name)
        await gate.wait()
        return ()

    controls = Controls(1, slow)
    async with anyio.create_task_group() as group:
        group.start_soon(controls.ended, plan(1), record(plan(1)))
        await anyio.wait_all_tasks_blocked()
        group.start_soon(controls.prove, plan(2), [])
        await anyio.wait_all_tasks_blocked()
        assert asked == ["calc.1"]
        gate.set()
    assert asked == ["calc.1"], "the one that ran has judged all there was"


async def test_rollouts_that_end_while_a_control_runs_wait_for_the_next_one() -> None:
    gate = anyio.Event()
    asked: list[str] = []

    async def slow(of: RolloutPlan) -> tuple[str, ...]:
        asked.append(of.name)
        await gate.wait()
        return () if len(asked) == 1 else BROKEN

    controls = Controls(1, slow)
    withdrawn: list[tuple[str, ...]] = []

    async def end(n: int) -> None:
        withdrawn.append(await controls.ended(plan(n), record(plan(n))))

    async with anyio.create_task_group() as group:
        group.start_soon(end, 1)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(end, 2)
        await anyio.wait_all_tasks_blocked()
        assert asked == ["calc.1"]
        gate.set()
    assert withdrawn == [(), ()]
    await end(3)
    assert withdrawn[2] == ("calc.2", "calc.3")
