"""A rollout for slime has its place first, then its guard."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from rollwright.integrations.slime.attempt import rolled_out
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Observer, Room, Silent
from rollwright.testing.scripted_executor import ScriptedExecutor, plain_task

pytestmark = pytest.mark.anyio

GUARD = 0.05


class Flag:
    """slime's state of a rollout step."""

    aborted = False


class Crowded(ScriptedExecutor):
    """One place. Notes whether a rollout was cut before it began."""

    def __init__(self) -> None:
        super().__init__(ending=self._ends, room=Room(1))
        self.end = anyio.Event()
        self.cut_before: list[bool] = []

    async def _ends(self, plan: RolloutPlan) -> float:
        await self.end.wait()
        return 1.0

    async def run(self, plan: RolloutPlan, observer: Observer, *, cut: anyio.Event | None = None) -> Attempt:
        self.cut_before.append(cut is not None and cut.is_set())
        return await super().run(plan, observer, cut=cut)


def plan(attempt: int) -> RolloutPlan:
    return RolloutPlan(run="run", task_name="t", task=plain_task("t"), attempt=attempt)


async def roll(executor: Crowded, attempt: int, flag: Flag | None = None, guard: float = 600) -> Attempt:
    return await rolled_out(plan(attempt), executor, Silent(), guard_seconds=guard, abort=flag)


async def test_waiting_for_a_place_is_no_part_of_the_guards_time() -> None:
    executor = Crowded()
    await executor.room.acquire()
    ended: list[Attempt] = []

    async def one() -> None:
        ended.append(await roll(executor, 1, guard=GUARD))

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await anyio.sleep(3 * GUARD)
        assert executor.seen == ended == []
        executor.room.release()
    assert executor.cut_before == [False]
    assert ended[0].record.failure is not None
    assert ended[0].record.failure.error == "RolloutCut", "from its beginning on the guard does count"


async def test_a_place_that_is_never_given_back_is_for_the_guard() -> None:
    """Of rollouts that hang, each has its place for the guard's time, so the last of them has its turn, too."""
    executor = Crowded()
    async with anyio.create_task_group() as group:
        for attempt in range(1, 5):
            group.start_soon(roll, executor, attempt, None, GUARD)
    assert len(executor.seen) == 4
    assert executor.most == 1
    assert executor.room.taken == 0


async def test_when_slime_has_enough_nobody_waits_for_a_place_any_more() -> None:
    executor, flag = Crowded(), Flag()
    await executor.room.acquire()
    async with anyio.create_task_group() as group:
        group.start_soon(roll, executor, 1, flag)
        flag.aborted = True
    assert executor.cut_before == [True]
    assert executor.room.taken == 1, "a place that it never had is not given back"


async def test_a_cancelled_rollout_gives_its_place_back() -> None:
    executor = Crowded()
    async with anyio.create_task_group() as group:
        group.start_soon(roll, executor, 1)
        while not executor.running:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert executor.room.taken == 0


async def test_a_rollout_that_ends_in_time_is_not_cut() -> None:
    executor = Crowded()
    executor.end.set()
    attempt = await roll(executor, 1, Flag())
    assert attempt.record.reward == 1.0
