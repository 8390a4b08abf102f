"""Proves tasks before a run trusts them: the gold patch resolves each time, no patch does not and breaks nothing.

What is proved goes into the lockfile beside the data set.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import RollwrightError
from rollwright.graders import Grader
from rollwright.graders.grading import GradingLimits
from rollwright.graders.validation import Validation, validate_task
from rollwright.lockfile import KnowsImages, LockedTask, read_lock, write_lock
from rollwright.rollout import box_spec
from rollwright.run import Places, load_graders, make_provider
from rollwright.sandboxes import Capabilities, Provider
from rollwright.tasks import load_tasks
from rollwright.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """One task's proof."""

    task: str
    gold: str
    """Verdict of the gold patch (the worst of its runs), or `–` when there is none."""
    noop: str
    """Verdict of the unchanged repository, its tests run."""
    seconds: float
    """Wall time of the whole check."""
    problem: str = ""
    gold_seconds: tuple[float, ...] = ()
    """The tests' time of each gold run."""
    flaky: dict[str, float] = field(default_factory=dict[str, float])
    """Test → share of the gold runs that it did not pass."""
    locked: LockedTask | None = None

    @property
    def usable(self) -> bool:
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"usable": self.usable}


async def validate_run(
    config: RunConfig, places: Places, *, say: Callable[[str], None], gold_runs: int = 1, lock: bool = False
) -> list[TaskCheck]:
    """Check every task of a run's data set, `run.concurrency` at a time; results in the data set's order.

    `gold_runs`: how often each gold patch is graded; 3 shows most flakes. `lock`: write what was found into the
    lockfile; tasks that were not looked at keep their entries.
    """
    graders = load_graders(config)
    tasks = load_tasks(config.tasks.path, graders, default_protocol=config.tasks.protocol)
    provider = make_provider(config, places)
    chosen = list(tasks.tasks.items())[: config.run.limit]
    found: dict[str, TaskCheck] = {}
    owed = iter(chosen)
    try:
        capabilities = await provider.probe()
        for image in sorted({task.agent.image for _, task in chosen}):
            await provider.check_image(image)
        with plain_errors():
            async with anyio.create_task_group() as group:
                for _ in range(config.run.concurrency):
                    group.start_soon(_worker, owed, config, provider, capabilities, graders, gold_runs, found, say)
    finally:
        with anyio.CancelScope(shield=True):
            await provider.close()
    if lock:
        kept = {name: entry for name, entry in read_lock(config.tasks.path).items() if name not in found}
        proved = {name: check.locked for name, check in found.items() if check.locked is not None}
        say(f"wrote {write_lock(config.tasks.path, kept | proved)}")
    return [found[name] for name, _ in chosen]


async def _worker(
    owed: Iterator[tuple[str, Task]],
    config: RunConfig,
    provider: Provider,
    capabilities: Capabilities,
    graders: dict[str, Grader],
    gold_runs: int,
    found: dict[str, TaskCheck],
    say: Callable[[str], None],
) -> None:
    for name, task in owed:
        grader = graders[task.grader.protocol]
        found[name] = await _check(name, task, config, provider, capabilities, grader, gold_runs)
        say(f"{name}: gold {found[name].gold}, no patch {found[name].noop}")


async def _check(
    name: str,
    task: Task,
    config: RunConfig,
    provider: Provider,
    capabilities: Capabilities,
    grader: Grader,
    gold_runs: int,
) -> TaskCheck:
    began = time.monotonic()
    try:
        found = await validate_task(
            provider=provider,
            spec=box_spec(config, capabilities, image=task.agent.image, labels={"validate": name}),
            key=f"validate/{name}/{secrets.token_hex(4)}",
            task=task,
            grader=grader,
            limits=GradingLimits(boot_seconds=config.grading.boot_seconds, step_seconds=config.grading.step_seconds),
            gold_runs=gold_runs,
        )
        digest = await provider.image_digest(task.agent.image) if isinstance(provider, KnowsImages) else ""
    except RollwrightError as error:  # one bad task must not hide the others
        problem = f"{type(error).__name__}: {error}"
        return TaskCheck(task=name, gold="–", noop="–", seconds=time.monotonic() - began, problem=problem)
    worst = min((gold.verdict for gold in found.golds), key=lambda verdict: verdict.reward, default=None)
    return TaskCheck(
        task=name,
        gold="–" if worst is None else str(worst.status),
        noop=str(found.noop.verdict.status),
        seconds=time.monotonic() - began,
        problem="; ".join(found.problems),
        gold_seconds=tuple(gold.raw.seconds for gold in found.golds if gold.raw is not None),
        flaky=found.flaky,
        locked=_locked(found, grader, digest) if found.ok else None,
    )


def _locked(found: Validation, grader: Grader, image_digest: str) -> LockedTask:
    seconds = sorted(gold.raw.seconds for gold in found.golds if gold.raw is not None)
    return LockedTask(
        task=found.task.id,
        image=found.task.agent.image,
        image_digest=image_digest,
        base_tree=found.noop.base_tree,
        grader=grader.name,
        grader_version=grader.version,
        gold_runs=len(found.golds),
        gold_seconds_p95=round(seconds[math.ceil(0.95 * len(seconds)) - 1], 3) if seconds else 0.0,
        fail_to_pass=found.fail_to_pass,
        pass_to_pass=found.pass_to_pass,
        flaky=found.flaky,
    )
