"""Proves tasks before a run trusts them: the gold patch resolves, no patch does not."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import anyio

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import RollwrightError
from rollwright.graders import Grader
from rollwright.graders.grading import GradingLimits, validate_task
from rollwright.run import Places, load_graders, make_provider
from rollwright.sandboxes import Provider, SandboxSpec
from rollwright.tasks import load_tasks
from rollwright.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """One task's proof."""

    task: str
    gold: str
    """Verdict of the gold patch, or `–` when the row has none."""
    noop: str
    """Verdict of the unchanged repository, its tests run."""
    seconds: float
    problem: str = ""

    @property
    def usable(self) -> bool:
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"usable": self.usable}


async def validate_run(config: RunConfig, places: Places, *, say: Callable[[str], None]) -> list[TaskCheck]:
    """Check every task of a run's data set, `run.concurrency` at a time; results in the data set's order."""
    graders = load_graders(config)
    tasks = load_tasks(config.tasks.path, graders, default_protocol=config.tasks.protocol)
    provider = make_provider(config, places)
    chosen = list(tasks.tasks.items())[: config.run.limit]
    found: dict[str, TaskCheck] = {}
    owed = iter(chosen)
    try:
        await provider.probe()
        for image in sorted({task.agent.image for _, task in chosen}):
            await provider.check_image(image)
        with plain_errors():
            async with anyio.create_task_group() as group:
                for _ in range(config.run.concurrency):
                    group.start_soon(_worker, owed, config, provider, graders, found, say)
    finally:
        with anyio.CancelScope(shield=True):
            await provider.close()
    return [found[name] for name, _ in chosen]


async def _worker(
    owed: Iterator[tuple[str, Task]],
    config: RunConfig,
    provider: Provider,
    graders: dict[str, Grader],
    found: dict[str, TaskCheck],
    say: Callable[[str], None],
) -> None:
    for name, task in owed:
        found[name] = await _check(name, task, config, provider, graders[task.grader.protocol])
        say(f"{name}: gold {found[name].gold}, no patch {found[name].noop}")


async def _check(name: str, task: Task, config: RunConfig, provider: Provider, grader: Grader) -> TaskCheck:
    began = time.monotonic()
    gold = noop = "–"
    try:
        found = await validate_task(
            provider=provider,
            spec=SandboxSpec(
                image=task.agent.image,
                memory_mb=config.sandbox.memory_mb,
                pids=config.sandbox.pids,
                disk_mb=config.sandbox.disk_mb,
                labels={"validate": name},
            ),
            key=f"validate/{name}/{secrets.token_hex(4)}",
            task=task,
            grader=grader,
            limits=GradingLimits(boot_seconds=config.grading.boot_seconds, step_seconds=config.grading.step_seconds),
        )
        if found.gold is not None:
            gold = str(found.gold.verdict.status)
        if found.noop is not None:
            noop = str(found.noop.verdict.status)
        problem = "; ".join(found.problems)
    except RollwrightError as error:  # one bad task must not hide the others
        problem = f"{type(error).__name__}: {error}"
    return TaskCheck(task=name, gold=gold, noop=noop, seconds=time.monotonic() - began, problem=problem)
