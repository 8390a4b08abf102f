"""Groups that a trainer asks for: what a control took back by then is not in them, and what comes later is told."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from rollwright.errors import ImageQuarantined
from rollwright.integrations import verl
from rollwright.integrations.on_demand import OnDemand
from rollwright.integrations.record import group_advantages
from rollwright.rollout import RolloutPlan, failure_of
from rollwright.run import Silent
from rollwright.store import withdrawn
from rollwright.testing.scripted_executor import ScriptedExecutor, plain_task, scripted_attempt
from rollwright.types import Stage

pytestmark = pytest.mark.anyio

TASKS = {name: plain_task(name) for name in ("a", "b")}
BROKEN = failure_of(ImageQuarantined("broken", image="host", task="a", problems=[]), Stage.GRADED)


def demand_of(executor: ScriptedExecutor, *, quorum: float = 2, proved: bool = False) -> OnDemand:
    return OnDemand(executor, TASKS, run="r", attempts=3, observer=Silent(), quorum=quorum, proved=proved)


def take_back(executor: ScriptedExecutor, task: str, attempt: int, *, epoch: int = 1) -> None:
    plan = RolloutPlan(run="r", task_name=task, task=TASKS[task], attempt=attempt, epoch=epoch)
    executor.taken_back.append(withdrawn(scripted_attempt(plan, reward=1.0).record, BROKEN))


async def test_what_a_control_takes_back_while_the_group_is_made_is_ungraded_in_it() -> None:
    first_done = anyio.Event()

    async def ending(plan: RolloutPlan) -> float | None:
        if plan.attempt == 1:
            first_done.set()
            return 1.0
        await first_done.wait()
        if plan.attempt == 3:  # the control of this one finds the image broken
            take_back(executor, "a", 1)
            return None
        return 0.0

    executor = ScriptedExecutor(ending)
    group = await demand_of(executor).group("a")
    assert [attempt.record.reward for attempt in group] == [None, 0.0, None]
    assert [attempt.record.counts_in_baseline for attempt in group] == [False, True, False]
    assert group[0].record.failure == BROKEN
    assert group[0].samples == ()
    assert group_advantages(group).status == "below_quorum"
    assert verl.group_fields(group) == [[], [], []]


async def test_what_a_control_takes_back_afterwards_is_told() -> None:
    async def ending(plan: RolloutPlan) -> float | None:
        await anyio.lowlevel.checkpoint()
        return 1.0

    executor = ScriptedExecutor(ending)
    demand = demand_of(executor)
    take_back(executor, "a", 1)  # before its group is handed over
    assert [attempt.record.graded for attempt in await demand.group("a")] == [False, True, True]
    await demand.group("b")
    assert demand.withdrawn == []
    take_back(executor, "a", 2)
    take_back(executor, "b", 3)
    take_back(executor, "a", 4, epoch=2)  # of a group that is not handed over yet
    assert [record.rollout for record in demand.withdrawn] == ["a.2", "b.3"]
    assert [attempt.record.graded for attempt in await demand.group("a")] == [False, True, True]
    assert [record.rollout for record in demand.withdrawn] == ["a.2", "b.3"]


async def test_a_group_waits_for_a_control_of_its_own_where_that_is_asked_for() -> None:
    class Controlled(ScriptedExecutor):
        async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> None:
            assert len(self.seen) == 3
            assert not self.running
            await super().prove(plan, earlier)
            take_back(self, "a", 2)

    async def ending(plan: RolloutPlan) -> float | None:
        await anyio.lowlevel.checkpoint()
        return None if plan.attempt == 3 else 1.0

    executor = Controlled(ending)
    demand = demand_of(executor, proved=True)
    assert [attempt.record.graded for attempt in await demand.group("a")] == [True, False, False]
    assert (demand.withdrawn, executor.room.taken) == ([], 0)
    assert executor.proved == [("a", ("a.1", "a.2"))], "whatever was graded of it, wherever that was"


async def test_weights_change_while_no_engine_call_runs_and_keep_their_name_when_that_fails() -> None:
    async def ending(plan: RolloutPlan) -> float | None:
        await anyio.lowlevel.checkpoint()
        return 1.0

    class Full(ScriptedExecutor):
        async def load_weights(self, folder: Path, version: str) -> None:
            await super().load_weights(folder, version)
            if version == "v3":
                raise OSError("no room")

    executor = Full(ending)
    demand = demand_of(executor)
    await demand.pause()
    assert executor.paused
    await demand.resume("v1")
    await demand.load_weights(Path("weights"), "v2")
    with pytest.raises(OSError, match="no room"):
        await demand.load_weights(Path("weights"), "v3")
    assert (executor.paused, executor.versions) == (False, ["v0", "v1", "v2"])
    (attempt, *_) = await demand.group("a")
    assert {span.version for sample in attempt.samples for span in sample.versions} == {"v2"}


@pytest.mark.parametrize("setting", [2, 0.5, 5])
async def test_each_group_has_the_quorum_of_its_size(setting: float) -> None:
    plans: list[RolloutPlan] = []

    async def ending(plan: RolloutPlan) -> float | None:
        await anyio.lowlevel.checkpoint()
        plans.append(plan)
        return 1.0

    demand = demand_of(ScriptedExecutor(ending), quorum=setting)
    for size in (1, 3, 8):
        await demand.group("a", size)
    by_size = {1: plans[0].quorum, 3: plans[1].quorum, 8: plans[4].quorum}
    assert by_size == {2: {1: 1, 3: 2, 8: 2}, 0.5: {1: 1, 3: 2, 8: 4}, 5: {1: 1, 3: 3, 8: 5}}[setting]
