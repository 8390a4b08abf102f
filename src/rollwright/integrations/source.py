"""`rollwright.rollouts`: a run file as an asynchronous source of groups, for a trainer in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.groups import quorum_of
from rollwright.integrations.executors import executor_of
from rollwright.integrations.places import user_places
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Observer, Pace, Places, Rollouts, Silent, prepare, same_run
from rollwright.store import RunDir, RunWriter
from rollwright.telemetry import listeners_of, listening
from rollwright.types import Task

__all__ = ["rollouts"]


@asynccontextmanager
async def rollouts(
    job: Path | str,
    *overrides: str,
    folder: Path | str,
    pace: Pace | None = None,
    delivered: Collection[str] = (),
    observer: Observer | None = None,
    places: Places | None = None,
) -> AsyncGenerator[Rollouts]:
    """Groups of rollouts as a run file says, stored in `folder` and handed to the caller as they are done.

        async with rollwright.rollouts("run.toml", "run.attempts=8", folder="runs/grpo") as source:
            async for group in source:
                ...

    `overrides`: settings as on the command line. `folder`: the run folder; one that exists is gone on with, and then
    `delivered` (group ids, from the trainer's checkpoint) says which groups the trainer has had. `pace`: see `Pace`.

    Raises `UsageError` (settings, rows, an engine or a machine that cannot do it) before anything is rolled out.
    """
    observer = observer or Silent()
    places = places or user_places()
    job, run = Path(job), RunDir(_absolute(folder))
    prepared = prepare(RunConfig.load(job, overrides), places)
    config = prepared.config
    pace = pace or Pace()
    if pace.proved and not config.grading.controls:
        raise ConfigError("pace.proved waits for controls: set grading.controls", field="grading.controls")
    tasks = dict(list(prepared.tasks.tasks.items())[: config.run.limit])

    def open_writer() -> RunWriter:
        if not run.resolved_file.exists():
            return RunWriter.create(run.path, run_file=job.read_bytes(), resolved=prepared.resolved())
        same_run(prepared, run.resolved(), run.path, trained=True)
        return RunWriter.reopen(run.path)

    listeners = listeners_of(config, run)
    async with (
        executor_of(prepared, places, observer, open_writer, run=run) as (executor, _),
        listening(observer, listeners) as heard_by,
    ):
        source = Rollouts(
            executor,
            tasks,
            run=run.path.name,
            attempts=config.run.attempts,
            pace=pace,
            observer=heard_by,
            quorum=quorum_of(config.grading.group_quorum, config.run.attempts),
            stored=stored_attempts(run, tasks, delivered),
            held=run.held(),
            delivered=delivered,
        )
        async with source.running():
            yield source


def _absolute(path: Path | str) -> Path:
    return Path(path).resolve()


def stored_attempts(run: RunDir, tasks: Mapping[str, Task], delivered: Collection[str]) -> list[Attempt]:
    """What a run folder holds; the samples only of groups that are still to be delivered. Raises `StoreError`."""
    attempts: list[Attempt] = []
    for record in run.records():
        task = tasks.get(record.task)
        if task is None:
            continue
        plan = RolloutPlan(
            run=run.path.name,
            task_name=record.task,
            task=task,
            attempt=record.attempt,
            epoch=record.epoch,
            quorum=record.quorum,
        )
        samples = [] if record.group in delivered or not record.graded else run.samples(record.rollout)
        attempts.append(Attempt(plan=plan, record=record, samples=samples))
    return attempts
