"""What `run` and `resume` share: the rollouts behind a live table, then the summary."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskStatus

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import INTERRUPTED, OK, UNGRADED, print_json, say, shown
from rollwright.cli.places import places
from rollwright.display import Display, Screen
from rollwright.errors import ImageQuarantined
from rollwright.integrations.executors import executor_of
from rollwright.quorum import group_table
from rollwright.responsive import responsive
from rollwright.run import Prepared, current_rollout, execute
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.telemetry import listeners_of, listening


def execute_run(prepared: Prepared, path: Path, open_writer: Callable[[], RunWriter], *, as_json: bool) -> int:
    """Open everything, then the run folder, so that a run that cannot start leaves none."""
    plans = prepared.plans(path.name)
    listeners = listeners_of(prepared.config, RunDir(path))
    with Display(Screen(), total=len(plans)) as display:

        async def go() -> None:
            async with (
                _following_size(display),
                executor_of(prepared, places(), display, open_writer, run=RunDir(path)) as (executor, writer),
                listening(display, listeners) as observer,
            ):
                log_into(writer.run.logs / "run.log")
                stored = {record.rollout for record in writer.run.records()}
                display.already(len(stored))
                with responsive():
                    await execute(executor, [plan for plan in plans if plan.name not in stored], observer)

        _, interrupted = until_interrupted(go)
    if interrupted and not path.exists():
        say("nothing was started")
        return INTERRUPTED
    return report(RunDir(path), len(plans), interrupted=interrupted, as_json=as_json)


@asynccontextmanager
async def _following_size(display: Display) -> AsyncGenerator[None]:
    async def follow(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGWINCH) as signals:
            display.catch_up()
            task_status.started()
            async for _ in signals:
                display.resized()

    async with anyio.create_task_group() as group:
        await group.start(follow)
        yield
        group.cancel_scope.cancel()


def report(run_dir: RunDir, planned: int, *, interrupted: bool, as_json: bool) -> int:
    """The summary on stdout, and the exit code."""
    records = run_dir.records()
    graded = [record for record in records if record.reward is not None]
    sampled = sum(record.sampled_tokens for record in graded)
    trained = sum(record.trained_tokens for record in graded)
    mean = sum(record.reward or 0.0 for record in graded) / len(graded) if graded else None
    groups = group_table(run_dir)
    out = {row.group: row.reason for row in groups if not row.trainable}
    quarantined = quarantined_images(records)
    infra = run_dir.infra()
    statuses = {status: sum(r.status == status for r in records) for status in sorted({str(r.status) for r in records})}
    if as_json:
        print_json(
            {
                "run": str(run_dir.path),
                "planned": planned,
                "stored": len(records),
                "statuses": statuses,
                "mean_reward": mean,
                "sampled_tokens": sampled,
                "trained_tokens": trained,
                "groups": {"trainable": len(groups) - len(out), "not_trainable": out},
                "quarantined": quarantined,
                "infra": {name: value for name, value in infra.items() if name != "schema"},
                "interrupted": interrupted,
            }
        )
    else:
        print(f"{len(records)} of {planned} rollouts: " + ", ".join(f"{n} {s}" for s, n in statuses.items()))
        if mean is not None:
            share = trained / sampled if sampled else 1.0
            print(f"mean reward {mean:.3f}; {sampled} tokens sampled, {share:.1%} of them trained")
        foreign = [record for record in records if record.traffic.get("foreign")]
        if foreign:
            turns = sum(record.traffic["foreign"] for record in foreign)
            print(
                f"{turns} turns of {len(foreign)} rollouts, {foreign[0].rollout} first, were not asked for by the CLI"
            )
        if out:
            print(f"{len(groups) - len(out)} of {len(groups)} groups can be trained on; not:")
            for name, reason in list(out.items())[:5]:
                print(f"  {name}: {reason}")
        for image, problem in quarantined.items():
            print(f"quarantined: {image}: {problem}")
        for line in borne_with(infra):
            print(line)
        failures = [record for record in records if record.failure is not None and not record.superseded]
        for record in failures[:5]:
            assert record.failure is not None
            print(f"  {record.rollout}: {record.failure.stage}: {record.failure.error}: {record.failure.message}")
        here = shown(run_dir.path)
        print(f"samples: {here}/rollouts/*/samples.jsonl")
        if records:
            print(f"look: rollwright view {here}")
        print(f"next: rollwright {'resume' if len(records) < planned else 'verify'} {here}")
    if interrupted:
        return INTERRUPTED
    return OK if len(graded) == planned else UNGRADED


def quarantined_images(records: Sequence[RolloutRecord]) -> dict[str, str]:
    """Image → what its control found, and how many rollouts that cost."""
    lost = [r.failure for r in records if r.failure is not None and r.failure.error == ImageQuarantined.__name__]
    images = Counter(str(failure.details["image"]) for failure in lost)
    found = {str(failure.details["image"]): "; ".join(failure.details["problems"]) for failure in lost}
    return {image: f"{problems} ({images[image]} rollouts)" for image, problems in found.items()}


def borne_with(infra: Mapping[str, Any]) -> list[str]:
    """What failed beneath the rollouts, most frequent first; an error that no backend knows is a gap to report."""
    failures: list[dict[str, Any]] = infra.get("failures", [])
    if not failures:
        return []
    named = ", ".join(f"{each['operation']} {each['error']} {each['count']}" for each in failures[:5])
    more = f", {len(failures) - 5} more kinds" if len(failures) > 5 else ""
    lines = [f"borne with: {sum(each['count'] for each in failures)} failed requests ({named}{more})"]
    if infra["outages"]:
        lines.append(f"the sandbox backend was down {infra['outages']} times{', and is now' if infra['down'] else ''}")
    if infra["unclassified"]:
        unknown = ", ".join(f"{name} {count}" for name, count in infra["unclassified"].items())
        lines.append(f"errors that the backend does not know, please report them: {unknown}")
    return lines


def log_into(path: Path) -> None:
    def name_rollout(record: logging.LogRecord) -> bool:
        record.rollout = current_rollout.get()
        return True

    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(rollout)s %(name)s: %(message)s"))
    handler.addFilter(name_rollout)
    root = logging.getLogger("rollwright")
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    root.propagate = False
