"""`on_demand`: groups of rollouts of a run file's tasks when the trainer asks for them, in its order."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import ConfigError, UsageError
from rollwright.gateway.gate import PauseMode
from rollwright.groups import DEFAULT_QUORUM, quorum_of
from rollwright.integrations.executors import executor_of
from rollwright.integrations.places import user_places
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Executor, Observer, Places, Silent, prepare
from rollwright.store import RolloutRecord, RunDir, RunWriter, group_id
from rollwright.telemetry import listeners_of, listening
from rollwright.types import Task

__all__ = ["OnDemand", "on_demand"]


class OnDemand:
    """What `on_demand` gives."""

    def __init__(
        self,
        executor: Executor,
        tasks: Mapping[str, Task],
        *,
        run: str,
        attempts: int,
        observer: Observer,
        quorum: float = DEFAULT_QUORUM,
        proved: bool = False,
    ) -> None:
        """`quorum`: `grading.group_quorum`. `proved`: see `on_demand`."""
        self._executor = executor
        self._tasks = tasks
        self._by_source = {task.grader.source_id: name for name, task in tasks.items()}
        self._run = run
        self._group_size = attempts
        self._observer = observer
        self._quorum = quorum
        self._proved = proved
        self._delivered: dict[str, int] = {}
        """By group: how many verdicts controls had taken back when the trainer got it."""
        self._asked: dict[str, itertools.count[int]] = {}
        self._attempts: dict[str, itertools.count[int]] = {}

    async def group(self, task: str, attempts: int | None = None) -> list[Attempt]:
        """Roll out one task, by its name or its row's own id, `attempts` times (`run.attempts`); a group of its own.

        As many at a time as `run.concurrency` says, over all calls. Each attempt has ended, graded or ungraded with its
        failure; verdicts that a control took back until now are not in it. Raises `UsageError` for a task that there is
        not.
        """
        name = self._by_source.get(task, task)
        if name not in self._tasks:
            raise UsageError(f"the data set has no task {task!r}")
        size = self._group_size if attempts is None else attempts
        epoch = next(self._asked.setdefault(name, itertools.count(1)))
        numbers = self._attempts.setdefault(name, itertools.count(1))
        plans = [
            RolloutPlan(
                run=self._run,
                task_name=name,
                task=self._tasks[name],
                attempt=next(numbers),
                epoch=epoch,
                quorum=quorum_of(self._quorum, size),
            )
            for _ in range(size)
        ]
        done: dict[int, Attempt] = {}
        with plain_errors():
            async with anyio.create_task_group() as rolling:
                for plan in plans:
                    rolling.start_soon(self._roll_out, plan, done)
            if self._proved:
                graded = [plan.name for plan in plans if done[plan.attempt].record.graded]
                async with self._executor.room.place(anyio.Event()):
                    await self._executor.prove(plans[0], graded)
        taken_back = {record.rollout: record for record in self._executor.taken_back}
        self._delivered[group_id(name, epoch)] = len(self._executor.taken_back)
        return [_as_it_is(done[plan.attempt], taken_back.get(plan.name)) for plan in plans]

    @property
    def withdrawn(self) -> Sequence[RolloutRecord]:
        """Rollouts whose verdicts a control (`grading.controls`) took back after the trainer had had their groups: they
        should not have been trained. As they are now, in order."""
        return [
            record
            for number, record in enumerate(self._executor.taken_back)
            if number >= self._delivered.get(record.group, number + 1)
        ]

    async def pause(self, mode: PauseMode = "abort") -> None:
        """No engine call begins until `resume`. For weights that the caller changes; rollouts go on afterwards from the
        tokens that they have. Raises what `Executor.pause` raises; the pause stays in force."""
        await self._executor.pause(mode)

    async def resume(self, version: str | None) -> None:
        """Go on under the new `version`; None: the weights are the old ones."""
        await self._executor.resume(version)

    async def load_weights(self, folder: Path, version: str) -> None:
        """Give the engine the weights in `folder` and call them `version`.

        Raises `ConfigError` for another model, `Unsupported` for an engine that only its trainer can reach.
        """
        told: str | None = None
        try:
            await self.pause()
            await self._executor.load_weights(folder, version)
            told = version
        finally:
            with anyio.CancelScope(shield=True):
                await self.resume(told)

    async def _roll_out(self, plan: RolloutPlan, done: dict[int, Attempt]) -> None:
        await self._executor.room.acquire()
        try:
            done[plan.attempt] = await self._executor.run(plan, self._observer)
        finally:
            self._executor.room.release()


@asynccontextmanager
async def on_demand(
    job: Path | str,
    *overrides: str,
    folder: Path | str,
    observer: Observer | None = None,
    places: Places | None = None,
    proved: bool = False,
) -> AsyncGenerator[OnDemand]:
    """Open what a run file asks for, and roll out its tasks as they are asked for; all is stored in a new `folder`.

        async with on_demand("run.toml", folder="runs/grpo") as demand:
            attempts = await demand.group("cart", 8)

    `proved`: each group waits for a control of its own (see `Pace.proved`; needs `grading.controls`).

    Raises `UsageError` (settings, rows, an engine or a machine that cannot do it, a folder that exists).
    """
    observer = observer or Silent()
    job = Path(job)
    path = _absolute(folder)
    prepared = prepare(RunConfig.load(job, overrides), places or user_places())
    config = prepared.config
    if proved and not config.grading.controls:
        raise ConfigError("proved waits for controls: set grading.controls", field="grading.controls")

    def create() -> RunWriter:
        return RunWriter.create(path, run_file=job.read_bytes(), resolved=prepared.resolved())

    listeners = listeners_of(config, RunDir(path))
    async with (
        executor_of(prepared, places or user_places(), observer, create) as (executor, _),
        listening(observer, listeners) as heard_by,
    ):
        yield OnDemand(
            executor,
            prepared.tasks.tasks,
            run=path.name,
            attempts=config.run.attempts,
            observer=heard_by,
            quorum=config.grading.group_quorum,
            proved=proved,
        )


def _as_it_is(attempt: Attempt, taken_back: RolloutRecord | None) -> Attempt:
    return attempt if taken_back is None else replace(attempt, record=taken_back, samples=())


def _absolute(path: Path | str) -> Path:
    return Path(path).resolve()
