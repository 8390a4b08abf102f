"""The source of groups: each group once, never too old, always in a typed end, and no further ahead than asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from rollwright.errors import EngineUnreachable, UsageError
from rollwright.gateway.gate import PauseMode
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Group, Pace, Rollouts, Room, Silent
from rollwright.testing.scripted_executor import ScriptedExecutor, plain_task, scripted_attempt

pytestmark = pytest.mark.anyio

TASKS = {name: plain_task(name) for name in ("a", "b", "c", "d", "e")}


async def at_once(plan: RolloutPlan) -> float | None:
    await anyio.lowlevel.checkpoint()
    return float(plan.attempt % 2)


def source_of(
    executor: ScriptedExecutor,
    pace: Pace,
    *,
    attempts: int = 3,
    stored: Iterable[Attempt] = (),
    delivered: Iterable[str] = (),
) -> Rollouts:
    return Rollouts(
        executor,
        TASKS,
        run="run",
        attempts=attempts,
        pace=pace,
        observer=Silent(),
        stored=list(stored),
        delivered=frozenset(delivered),
    )


async def all_of(source: Rollouts) -> list[Group]:
    async with source.running():
        return [group async for group in source]


async def test_every_group_comes_once_and_whole() -> None:
    executor = ScriptedExecutor(at_once)
    groups = await all_of(source_of(executor, Pace(epochs=2, ahead=2)))
    assert Counter(group.id for group in groups) == Counter([*TASKS, *(f"{name}@2" for name in TASKS)])
    assert {group.state for group in groups} == {"complete"}
    assert all(len(group.attempts) == 3 for group in groups)
    assert all(sample.group_id == group.id for group in groups for sample in group.samples)
    assert len(executor.seen) == len(set(executor.seen)) == 30, "each rollout has a name of its own"
    assert executor.most <= 4


async def test_each_epoch_is_shuffled_by_its_own_seed() -> None:
    order = [
        [group.task for group in await all_of(source_of(ScriptedExecutor(at_once), Pace(epochs=3, ahead=1, shuffle=s)))]
        for s in (1, 1, 2)
    ]
    assert order[0] == order[1] != order[2]
    epochs = [order[0][i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == sorted(TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("ahead", [1, 2, 4])
async def test_no_more_groups_are_open_than_asked(ahead: int) -> None:
    executor = ScriptedExecutor(at_once, room=Room(100))
    source = source_of(executor, Pace(epochs=None, ahead=ahead))
    async with source.running():
        for taken in range(6):
            await anyio.wait_all_tasks_blocked()
            begun = {name.rpartition(".")[0] for name in executor.seen}
            assert len(executor.seen) == 3 * (taken + ahead), f"{taken} groups taken, begun {begun}"
            await anext(source)


async def test_a_group_that_is_too_old_is_rolled_out_again() -> None:
    executor = ScriptedExecutor(at_once)
    source = source_of(executor, Pace(epochs=1, ahead=3, max_lag=1))
    async with source.running():
        await anext(source)
        await anyio.wait_all_tasks_blocked()  # three groups of v0 wait
        for version in ("v1", "v2"):
            async with source.new_weights(version):
                assert executor.paused
        groups = [group async for group in source]
    assert source.stale == 3
    assert all(group.versions <= {"v1", "v2"} for group in groups)
    assert sorted(group.task for group in groups) == sorted(set(TASKS) - {"a"})


async def test_a_group_is_not_handed_out_as_whole_weights_change_under_it() -> None:
    """A token of v0 among those of v2 makes the group too old, too."""
    gate = anyio.Event()

    async def held(plan: RolloutPlan) -> float | None:
        if plan.name == "a.1":
            await gate.wait()
        return 1.0

    source = source_of(ScriptedExecutor(held), Pace(ahead=1, max_lag=1))
    async with source.running():
        await anyio.wait_all_tasks_blocked()
        for version in ("v1", "v2"):
            async with source.new_weights(version):
                pass
        gate.set()
        assert (await anext(source)).versions == {"v2"}
    assert source.stale == 1


async def test_stragglers_are_cut_when_enough_of_the_group_is_done() -> None:
    async def one_never_ends(plan: RolloutPlan) -> float | None:
        if plan.attempt == 2:
            await anyio.sleep_forever()
        return 1.0

    source = source_of(ScriptedExecutor(one_never_ends), Pace(straggler_share=0.6, straggler_seconds=0))
    groups = await all_of(source)
    assert [group.state for group in groups] == ["partial"] * 5
    assert source.cut == 5
    failures = [attempt.record.failure for group in groups for attempt in group.attempts if attempt.record.failure]
    assert {failure.error for failure in failures} == {"RolloutCut"}
    assert all(len(group.attempts) == 3 and len(group.samples) == 2 for group in groups)


async def test_a_group_has_a_longest_life_even_if_nothing_of_it_ends_or_begins() -> None:
    async def never(plan: RolloutPlan) -> float | None:
        await anyio.sleep_forever()
        return 1.0

    executor = ScriptedExecutor(never, room=Room(1))
    source = source_of(executor, Pace(group_seconds=0.01))
    groups = await all_of(source)
    assert {group.state for group in groups} == {"lost"}
    assert source.cut == len(executor.seen) == 15
    assert not executor.running


async def test_a_failure_of_ours_leaves_the_group_partial_with_no_reward_in_it() -> None:
    async def second_fails(plan: RolloutPlan) -> float | None:
        await anyio.lowlevel.checkpoint()
        return None if plan.attempt == 2 else 1.0

    groups = await all_of(source_of(ScriptedExecutor(second_fails), Pace()))
    assert {group.state for group in groups} == {"partial"}
    assert {attempt.record.reward for group in groups for attempt in group.attempts} == {1.0, None}
    assert all(len(group.samples) == 2 for group in groups)


async def test_weights_are_loaded_while_no_engine_call_runs() -> None:
    executor = ScriptedExecutor(at_once)
    async with source_of(executor, Pace()).running() as source:
        await source.load_weights(Path("policy-1"), "v1")
    assert (executor.told, executor.paused) == (["v0", "v1"], False)


async def test_a_body_that_fails_to_change_the_weights_leaves_the_old_name() -> None:
    executor = ScriptedExecutor(at_once)
    source = source_of(executor, Pace())
    with pytest.raises(OSError, match="no such file"):
        async with source.running(), source.new_weights("v1"):
            raise OSError("no such file")
    assert (executor.told, executor.paused) == (["v0"], False)


class Deaf(ScriptedExecutor):
    """Its engine does not hear of aborts: the pause has begun and does not succeed."""

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        raise EngineUnreachable("no answer")


async def test_a_pause_that_fails_does_not_last() -> None:
    executor = Deaf(at_once)
    source = source_of(executor, Pace())
    async with source.running():
        with pytest.raises(EngineUnreachable):
            async with source.new_weights("v1"):
                pytest.fail("calls may still run")
    assert (executor.told, executor.paused) == (["v0"], False)


async def test_a_bug_in_a_rollout_reaches_the_trainer() -> None:
    async def broken(plan: RolloutPlan) -> float | None:
        raise ZeroDivisionError(plan.name)

    with pytest.raises(ZeroDivisionError):
        await all_of(source_of(ScriptedExecutor(broken, room=Room(1)), Pace()))


async def test_leaving_early_ends_what_runs() -> None:
    async def never(plan: RolloutPlan) -> float | None:
        await anyio.sleep_forever()
        return 1.0

    executor = ScriptedExecutor(never)
    async with source_of(executor, Pace()).running():
        await anyio.wait_all_tasks_blocked()
        assert executor.running
    assert not executor.running


async def test_a_later_process_makes_only_what_is_missing() -> None:
    def attempt(task: str, number: int, epoch: int = 1) -> Attempt:
        plan = RolloutPlan(run="run", task_name=task, task=TASKS[task], attempt=number, epoch=epoch)
        return scripted_attempt(plan, reward=1.0)

    stored = [attempt("a", 1), attempt("a", 2), attempt("a", 3), attempt("b", 1), attempt("c", 7, epoch=2)]
    executor = ScriptedExecutor(at_once)
    groups = await all_of(source_of(executor, Pace(epochs=2), stored=stored, delivered=["a", "d"]))
    assert sorted(group.id for group in groups) == sorted({*TASKS, *(f"{name}@2" for name in TASKS)} - {"a", "d"})
    assert all(len(group.attempts) == 3 for group in groups)
    assert not {"a.1", "a.2", "a.3", "b.1", "c.7"} & set(executor.seen)
    assert min(int(name.split(".")[1]) for name in executor.seen if name.startswith("c.")) == 8


async def test_a_group_that_was_rolled_out_again_comes_from_a_later_process_in_its_size() -> None:
    plans = [RolloutPlan(run="run", task_name="a", task=TASKS["a"], attempt=n) for n in range(1, 7)]
    stored = [scripted_attempt(plan, reward=1.0) for plan in plans]
    executor = ScriptedExecutor(at_once)
    groups = await all_of(source_of(executor, Pace(), stored=reversed(stored)))
    (again,) = (group for group in groups if group.id == "a")
    assert [attempt.plan.attempt for attempt in again.attempts] == [4, 5, 6]


@pytest.mark.parametrize(
    "wrong", [{"ahead": 0}, {"epochs": 0}, {"max_lag": -1}, {"straggler_share": 0.0}, {"group_seconds": 0.0}]
)
async def test_a_pace_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Pace(**wrong)  # type: ignore[arg-type]
