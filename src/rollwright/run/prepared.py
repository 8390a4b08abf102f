"""A run over a data set, checked as far as can be without starting anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.config import RunConfig
from rollwright.engines import HoldsWeights
from rollwright.errors import ConfigError, TaskError
from rollwright.graders import Grader
from rollwright.graders.grading import GradingLimits
from rollwright.groups import quorum_of
from rollwright.lockfile import check_lock
from rollwright.rollout import RolloutPlan
from rollwright.run.parts import Parts, Places, load_graders, make_parts
from rollwright.tasks import TaskSet, load_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that was checked and can start: nothing in it is open yet."""

    parts: Parts
    tasks: TaskSet

    @property
    def config(self) -> RunConfig:
        return self.parts.config

    def plans(self, run: str) -> list[RolloutPlan]:
        """Every attempt of the run, groups together."""
        attempts = self.config.run.attempts
        quorum = quorum_of(self.config.grading.group_quorum, attempts)
        return [
            RolloutPlan(run=run, task_name=name, task=task, attempt=attempt, quorum=quorum)
            for name, task in list(self.tasks.tasks.items())[: self.config.run.limit]
            for attempt in range(1, attempts + 1)
        ]

    @property
    def images(self) -> list[str]:
        """The images its rollouts boot."""
        return sorted({plan.task.agent.image for plan in self.plans("")})

    def resolved(self) -> dict[str, Any]:
        """What goes into resolved.json."""
        return {
            **self.parts.resolved(),
            "tasks": {"count": len(self.tasks.tasks), "digest": tasks_digest(self.tasks)},
        }


def same_run(prepared: Prepared, resolved: Mapping[str, Any], folder: Path, *, trained: bool = False) -> None:
    """Raises `ConfigError` when a run that was started as `resolved` cannot go on as `prepared`.

    `trained`: its trainer changes the weights as it goes, and names their versions.
    """
    for what, then, now in (
        ("the data set", resolved["tasks"]["digest"], tasks_digest(prepared.tasks)),
        ("the tokenizer or chat template", resolved["renderer"]["fingerprint"], prepared.parts.renderer.fingerprint),
    ):
        if then != now:
            raise ConfigError(f"{what} has changed since {folder} was started; start a new run")
    engine = prepared.parts.engine
    then = resolved.get("engine", {}).get("weights")
    if not trained and then is not None and isinstance(engine, HoldsWeights) and engine.weights != then:
        raise ConfigError(
            f"the engine's weights have changed since {folder} was started: with another policy it is another run; "
            "start a new one, or put the old weights back",
            field="engine.local.model",
        )


def tasks_digest(tasks: TaskSet) -> str:
    """Changes when a row that a run was made of changes."""
    parts = "\n".join(f"{name} {task.id}" for name, task in tasks.tasks.items())
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def prepare(config: RunConfig, places: Places) -> Prepared:
    """Make every object of the run and check all that can be checked without starting anything.

    Raises `UsageError` (settings, rows, unknown names) with the field or the fix.
    """
    tasks = checked_tasks(config, load_graders(config))
    return Prepared(parts=make_parts(config, places), tasks=tasks)


def checked_tasks(config: RunConfig, graders: Mapping[str, Grader]) -> TaskSet:
    """The data set, every row of it evaluable here. Raises `UsageError` naming the row or the missing package."""
    tasks = sound_tasks(config, graders)
    for protocol in tasks.protocols:
        for problem in graders[protocol].preflight():
            raise ConfigError(f"grader {protocol}: {problem}")
    return tasks


def sound_tasks(config: RunConfig, graders: Mapping[str, Grader]) -> TaskSet:
    """The data set, every row of it in order. Raises `UsageError` naming the row."""
    tasks = load_tasks(config.tasks.path, graders, default_protocol=config.tasks.protocol)
    if config.tasks.require_lock:
        check_lock(
            config.tasks.path,
            dict(list(tasks.tasks.items())[: config.run.limit]),
            {name: grader.version for name, grader in graders.items()},
        )
    for name, task in tasks.tasks.items():
        for problem in graders[task.grader.protocol].check(task):
            raise TaskError(f"{config.tasks.path.name}: task {name}: {problem}", task=name)
    _time_for_all(config, tasks, graders)
    return tasks


def _time_for_all(config: RunConfig, tasks: TaskSet, graders: Mapping[str, Grader]) -> None:
    """A rollout's deadline is a failure of ours: an agent or tests that use up their own time must not reach it."""
    runs = GradingLimits().runs
    for name, task in list(tasks.tasks.items())[: config.run.limit]:
        tests = graders[task.grader.protocol].plan(task, nonce="0" * 32).seconds
        if config.harness.seconds + runs * tests >= config.run.rollout_seconds:
            raise ConfigError(
                f"run.rollout_seconds: {config.run.rollout_seconds:g} s are too few for the agent's "
                f"{config.harness.seconds:g} s and {runs} runs of the tests of {name}, {tests:g} s each",
                field="run.rollout_seconds",
            )
