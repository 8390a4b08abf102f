"""An asynchronous source, taken group by group from a thread that has no event loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from rollwright.errors import ImageQuarantined
from rollwright.integrations.blocking import blocking_groups
from rollwright.integrations.record import Rollout, group_advantages
from rollwright.integrations.trl import GroupWorker, sample_fields
from rollwright.rollout import RolloutPlan, failure_of
from rollwright.run import Pace, Rollouts, Silent
from rollwright.store import withdrawn
from rollwright.testing.scripted_executor import ScriptedExecutor, plain_task, scripted_attempt
from rollwright.types import Stage


async def at_once(plan: RolloutPlan) -> float | None:
    await anyio.lowlevel.checkpoint()
    return float(plan.attempt % 2)


def rollouts(executor: ScriptedExecutor) -> Rollouts:
    tasks = {name: plain_task(name) for name in "abcd"}
    return Rollouts(executor, tasks, run="run", attempts=2, pace=Pace(ahead=1), observer=Silent())


def test_groups_come_in_order_and_end_with_the_source() -> None:
    with blocking_groups(rollouts(ScriptedExecutor(at_once)).running()) as groups:
        assert [[rollout.record.rollout for rollout in group] for group in groups] == [
            [f"{name}.1", f"{name}.2"] for name in "abcd"
        ]


def test_leaving_ends_a_thread_that_waits_for_a_group() -> None:
    async def ending(plan: RolloutPlan) -> float | None:
        if plan.task_name != "a":
            await anyio.sleep_forever()
        return 1.0

    executor = ScriptedExecutor(ending)
    got: list[int] = []
    first = threading.Event()

    with blocking_groups(rollouts(executor).running()) as groups:

        def pull() -> None:
            for group in groups:
                got.append(len(group))
                first.set()

        thread = threading.Thread(target=pull)
        thread.start()
        assert first.wait(60)
    thread.join(60)
    assert not thread.is_alive()
    assert (got, executor.running) == ([2], set())


def test_what_the_source_raises_is_raised() -> None:
    async def ending(plan: RolloutPlan) -> float | None:
        if plan.name == "b.1":
            raise OSError("disk full")
        return 1.0

    with (
        pytest.raises(OSError, match="disk full"),
        blocking_groups(rollouts(ScriptedExecutor(ending)).running()) as groups,
    ):
        for _ in groups:
            pass


def versions_of(group: Sequence[Rollout]) -> set[str]:
    return {span.version for rollout in group for sample in rollout.samples for span in sample.versions}


def test_a_trainer_without_an_event_loop_changes_the_weights_between_groups() -> None:
    executor = ScriptedExecutor(at_once)
    with blocking_groups(rollouts(executor).running()) as groups:
        seen: list[set[str]] = []
        for number, group in enumerate(groups, start=1):
            seen.append(versions_of(group))
            with groups.new_weights(f"v{number}"):
                assert executor.paused, "no engine call runs while the weights change"
            assert not executor.paused
        assert executor.versions == ["v0", "v1", "v2", "v3", "v4"]
    assert (len(seen), seen[0]) == (4, {"v0"})
    assert not any("v0" in versions for versions in seen[2:]), "one group may have been on its way"


def test_a_weight_update_that_fails_leaves_the_engine_going_on_under_its_old_name() -> None:
    executor = ScriptedExecutor(at_once)
    with blocking_groups(rollouts(executor).running()) as groups:
        with pytest.raises(OSError, match="no room"), groups.new_weights("v1"):
            raise OSError("no room")
        assert (executor.paused, executor.versions) == (False, ["v0"])
        groups.load_weights(Path("weights"), "v2")
        assert (executor.paused, executor.versions) == (False, ["v0", "v2"])


def test_what_a_control_took_back_is_told() -> None:
    executor = ScriptedExecutor(at_once)
    failure = failure_of(ImageQuarantined("broken", image="host", task="a", problems=[]), Stage.GRADED)
    with blocking_groups(rollouts(executor).running()) as groups:
        first = next(iter(groups))
        assert groups.withdrawn == []
        name = first[0].record.task
        plan = RolloutPlan(run="run", task_name=name, task=plain_task(name), attempt=1)
        executor.taken_back.append(withdrawn(scripted_attempt(plan, reward=1.0).record, failure))
        assert [record.rollout for record in groups.withdrawn] == [f"{name}.1"]


def test_trls_worker_names_the_new_weights() -> None:
    """`GroupWorker` is told of them in the trainer's thread, while another one of its own waits for groups."""
    executor = ScriptedExecutor(at_once)

    with blocking_groups(rollouts(executor).running()) as groups:

        def new_version(version: int) -> None:
            with groups.new_weights(str(version)):
                pass

        worker = GroupWorker(
            groups,
            ahead=1,
            convert=lambda group, number: sample_fields(
                group, group_advantages(group), number=number, step_of=lambda version: int(version.lstrip("v"))
            ),
            new_version=new_version,
        )
        worker.start()
        for step in range(1, 9):
            assert worker.rollout_buffer.get(timeout=60)["model_version"] <= step
            worker.update_model_version(step)
        worker.stop()
        assert executor.versions == ["v0", *(str(step) for step in range(1, 9))]
