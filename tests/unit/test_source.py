"""The source of groups: each group once, never too old, always in a typed end, and no further ahead than asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import EngineUnreachable, ImageQuarantined, RolloutSuperseded, UsageError
from rollwright.gateway.gate import PauseMode
from rollwright.rollout import RolloutPlan, failure_of
from rollwright.run import Attempt, Group, Pace, Rollouts, Room, Silent
from rollwright.store import withdrawn
from rollwright.testing.scripted_executor import ScriptedExecutor, plain_task, scripted_attempt
from rollwright.tokens.samples import within_lag
from rollwright.types import Stage

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
    held: Collection[str] = (),
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
        held=held,
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
    assert {group.state for group in groups} == {"complete"}
    assert {failure.error for failure in executor.withdrawn.values()} == {"RolloutSuperseded"}
    assert {failure.fault for failure in executor.withdrawn.values()} == {"trainer"}
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
        await anyio.lowlevel.checkpoint()
        return 1 / (plan.name != "b.2")

    executor = ScriptedExecutor(broken)
    with pytest.raises(ZeroDivisionError):
        await all_of(source_of(executor, Pace()))
    assert (executor.room.taken, executor.running) == (0, set())


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
    assert sorted(name for name in executor.seen if name.startswith("c.")) == ["c.1", "c.2", "c.3", "c.4", "c.5"]


async def test_a_later_process_goes_on_with_what_runs_before_it_begins_others() -> None:
    stored = [old_attempt("a", 3), old_attempt("b", 2), old_attempt("b", 4)]
    held = ["a.2", "b.5", "b.4", "c.1", "gone.1"]
    executor = ScriptedExecutor(at_once, room=Room(1))
    groups = await all_of(source_of(executor, Pace(ahead=1), stored=stored, held=held))
    assert [group.state for group in groups] == ["complete"] * 5
    a, b, c = (executor.seen[start:end] for start, end in ((0, 2), (2, 3), (3, 6)))
    assert (a, b, c) == (["a.2", "a.1"], ["b.5"], ["c.1", "c.2", "c.3"]), "a running one first, then what is free"


async def test_a_group_that_was_rolled_out_again_comes_from_a_later_process_in_its_size() -> None:
    stored = [old_attempt("a", number, superseded=number < 4) for number in range(1, 6)]
    executor = ScriptedExecutor(at_once)
    groups = await all_of(source_of(executor, Pace(), stored=reversed(stored)))
    (again,) = (group for group in groups if group.id == "a")
    assert [attempt.plan.attempt for attempt in again.attempts] == [4, 5, 6]
    assert executor.seen.count("a.6") == 1


def old_attempt(task: str, number: int, *, versions: Sequence[str] = ("v0",), superseded: bool = False) -> Attempt:
    """Of an earlier process."""
    plan = RolloutPlan(run="run", task_name=task, task=TASKS[task], attempt=number)
    attempt = scripted_attempt(plan, reward=1.0, versions=versions)
    if not superseded:
        return attempt
    why = failure_of(RolloutSuperseded("too old", max_lag=0, roll=1), Stage.STORED)
    return replace(attempt, record=withdrawn(attempt.record, why), samples=())


async def test_what_is_too_old_makes_room_before_others_are_made() -> None:
    executor = ScriptedExecutor(at_once)

    async def ending(plan: RolloutPlan) -> float | None:
        if plan.attempt > 3:
            assert {f"{plan.task_name}.{n}" for n in (1, 2, 3)} <= set(executor.withdrawn)
        await anyio.lowlevel.checkpoint()
        return 1.0

    executor.ending = ending
    source = source_of(executor, Pace(ahead=5, max_lag=0))
    async with source.running():
        await anyio.wait_all_tasks_blocked()
        async with source.new_weights("v1"):
            pass
        assert len([group async for group in source]) == 5
    assert source.stale == 5


@pytest.mark.parametrize("rolls", [1, 2, 4])
async def test_a_group_that_is_always_too_old_comes_without_what_is_so(
    rolls: int, caplog: pytest.LogCaptureFixture
) -> None:
    executor = ScriptedExecutor(at_once)

    async def slow(plan: RolloutPlan) -> float | None:
        """The first of each three ends under other weights than it began with."""
        if plan.attempt % 3 == 1:
            version = f"v{len(executor.told)}"
            await executor.pause("abort")
            await executor.resume(version)
        return 1.0

    executor.ending = slow
    source = source_of(executor, Pace(ahead=1, max_lag=0, max_rolls=rolls))
    groups = await all_of(source)
    assert [group.task for group in groups] == list(TASKS)
    assert {group.state for group in groups} == {"stale"}
    assert len(executor.seen) == 5 * 3 * rolls
    assert (source.stale, source.given_up) == (5 * (rolls - 1), 5)
    for group in groups:
        out = [attempt for attempt in group.attempts if not attempt.record.graded]
        assert len(group.attempts) == 3
        assert {attempt.record.failure.error for attempt in out if attempt.record.failure} == {"RolloutTooOld"}
        assert not any(attempt.samples or attempt.record.counts_in_baseline for attempt in out)
        assert len(group.samples) == 3 - len(out)
        assert all(executor.withdrawn[a.record.rollout] == a.record.failure for a in out), "the run folder says so too"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == min(rolls, 2), "once for each kind"
    assert "max_lag" in warnings[-1]


async def test_an_attempt_that_is_out_anyway_makes_no_group_too_old() -> None:
    executor = ScriptedExecutor(at_once, room=Room(1))

    async def first_fails(plan: RolloutPlan) -> float | None:
        if plan.name == "a.1":  # it has tokens of v0 and v2
            for version in ("v1", "v2"):
                await executor.resume(version)
            return None
        return 1.0

    executor.ending = first_fails
    async with source_of(executor, Pace(ahead=1, max_lag=1)).running() as source:
        group = await anext(source)
    assert (group.id, group.state, source.stale) == ("a", "partial", 0)
    assert group.versions == {"v2"}


async def test_a_later_process_knows_which_stored_groups_are_really_old() -> None:
    stored = [
        *(old_attempt("a", n, versions=["v1"]) for n in (1, 2, 3)),  # too old
        *(old_attempt("b", n, versions=["v2", "v3"]) for n in (1, 2, 3)),
        *(old_attempt("c", n, versions=["v3" if n == 1 else "v0"]) for n in (1, 2)),  # too old, and not whole
        *(old_attempt("d", n, versions=["v3"]) for n in (1, 2)),
    ]
    executor = ScriptedExecutor(at_once, told=["v0", "v1", "v2", "v3"])
    source = source_of(executor, Pace(max_lag=1), stored=stored)
    groups = {group.id: group for group in await all_of(source)}
    made = {name: [a.plan.attempt for a in group.attempts] for name, group in groups.items()}
    assert made == {"a": [4, 5, 6], "b": [1, 2, 3], "c": [3, 4, 5], "d": [1, 2, 3], "e": [1, 2, 3]}
    assert set(executor.withdrawn) == {"a.1", "a.2", "a.3", "c.1", "c.2"}
    assert source.stale == 2


async def test_the_rolls_of_a_group_are_counted_over_processes() -> None:
    stored = [
        *(old_attempt("a", n, superseded=True) for n in (1, 2, 3)),
        *(old_attempt("a", n, versions=["v0"]) for n in (4, 5, 6)),
    ]
    executor = ScriptedExecutor(at_once, told=["v0", "v1"])
    source = source_of(executor, Pace(max_lag=0, max_rolls=2), stored=stored, delivered=set(TASKS) - {"a"})
    (group,) = await all_of(source)
    assert (group.state, [a.plan.attempt for a in group.attempts]) == ("stale", [4, 5, 6])
    assert (source.stale, source.given_up) == (0, 1)
    assert executor.seen == []


async def test_who_stops_waiting_for_a_group_does_not_lose_it() -> None:
    executor = ScriptedExecutor(at_once)
    source = source_of(executor, Pace(ahead=2, max_lag=0))
    async with source.running():
        await anyio.wait_all_tasks_blocked()
        async with source.new_weights("v1"):
            pass
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(source)
        assert len([group async for group in source]) == 5


async def test_what_a_control_takes_back_is_out_before_the_trainer_has_it_and_told_after() -> None:
    executor = ScriptedExecutor(at_once)
    failure = failure_of(ImageQuarantined("broken", image="host", task="a", problems=[]), Stage.GRADED)
    source = source_of(executor, Pace(ahead=2))
    async with source.running():
        first = await anext(source)
        await anyio.wait_all_tasks_blocked()  # two more wait
        waiting = ({name.split(".")[0] for name in executor.seen} - {first.id}).pop()
        for name in (f"{first.id}.1", f"{waiting}.2"):
            task, number = name.split(".")
            plan = RolloutPlan(run="run", task_name=task, task=TASKS[task], attempt=int(number))
            executor.taken_back.append(withdrawn(scripted_attempt(plan, reward=1.0).record, failure))
        groups = {group.id: group async for group in source}
    assert [record.rollout for record in source.withdrawn] == [f"{first.id}.1"]
    assert source.withdrawn[0].failure == failure
    assert groups[waiting].state == "partial"
    assert [a.record.failure for a in groups[waiting].attempts] == [None, failure, None]
    assert len(groups[waiting].samples) == 2


async def test_a_group_waits_for_a_control_of_its_own_where_that_is_asked_for() -> None:
    failure = failure_of(ImageQuarantined("broken", image="host", task="b", problems=[]), Stage.GRADED)

    class Controlled(ScriptedExecutor):
        async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> None:
            made = [name for name in self.seen if name.startswith(f"{plan.task_name}.")]
            assert set(made) <= set(earlier), "all of the group have ended"
            assert not self.running & set(made)
            await super().prove(plan, earlier)
            if plan.task_name == "b":
                self.taken_back.append(withdrawn(scripted_attempt(plan, reward=1.0).record, failure))

    executor = Controlled(at_once)
    stored = [old_attempt("a", 1), old_attempt("a", 2)]
    source = source_of(executor, Pace(proved=True), stored=stored)
    groups = {group.id: group for group in await all_of(source)}
    assert sorted(executor.proved) == [(name, (f"{name}.1", f"{name}.2", f"{name}.3")) for name in TASKS]
    assert {group.state for group in groups.values()} == {"complete", "partial"}
    assert [attempt.record.failure for attempt in groups["b"].attempts] == [failure, None, None]
    assert source.withdrawn == []
    assert executor.room.taken == 0


async def test_a_group_that_is_rolled_out_again_is_proved_again() -> None:
    executor = ScriptedExecutor(at_once)
    source = source_of(executor, Pace(proved=True, ahead=2, max_lag=0))
    async with source.running():
        await anyio.wait_all_tasks_blocked()
        async with source.new_weights("v1"):
            pass
        assert len([group async for group in source]) == 5
    assert Counter(task for task, _ in executor.proved) == {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1}


@given(st.data())
@settings(max_examples=60)
def test_whatever_the_pace_each_group_comes_once_in_its_size_and_young(data: st.DataObject) -> None:
    attempts, ahead = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    lag, rolls = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    updates = iter(data.draw(st.lists(st.integers(0, 3), max_size=8)))
    turns = iter(data.draw(st.lists(st.integers(0, 4), max_size=30)))
    fails = data.draw(st.frozensets(st.integers(1, 9)))
    executor = ScriptedExecutor(at_once)

    async def ending(plan: RolloutPlan) -> float | None:
        earlier = {name for name in executor.seen if name.startswith(f"{plan.task_name}.")}
        made = len(earlier) - len(earlier & set(executor.withdrawn))
        assert made <= attempts, "no group is larger in the run folder than it should be"
        for _ in range(next(turns, 0)):
            await anyio.lowlevel.checkpoint()
        return None if plan.attempt in fails else 1.0

    executor.ending = ending
    groups: list[Group] = []

    async def train() -> None:
        source = source_of(executor, Pace(ahead=ahead, max_lag=lag, max_rolls=rolls), attempts=attempts)
        async with source.running():
            async for group in source:
                assert group.versions <= within_lag(executor.told, lag)
                groups.append(group)
                for _ in range(next(updates, 0)):
                    async with source.new_weights(f"v{len(executor.told)}"):
                        pass
        counts = Counter(name.split(".")[0] for name in executor.seen)
        assert sum(counts.values()) == attempts * (5 + source.stale)
        assert all(count <= attempts * rolls for count in counts.values())
        assert source.given_up == sum(group.state == "stale" for group in groups)

    anyio.run(train)
    assert sorted(group.id for group in groups) == sorted(TASKS)
    assert all(len(group.attempts) == attempts for group in groups)
    members = {attempt.record.rollout for group in groups for attempt in group.attempts}
    superseded = {name for name, why in executor.withdrawn.items() if why.error == "RolloutSuperseded"}
    assert members | superseded == set(executor.seen)
    assert not members & superseded


@pytest.mark.parametrize(
    "wrong", [{"ahead": 0}, {"epochs": 0}, {"max_lag": -1}, {"straggler_share": 0.0}, {"group_seconds": 0.0}]
)
async def test_a_pace_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Pace(**wrong)  # type: ignore[arg-type]
