"""A trainer on a source of groups that dies with SIGKILL at its Nth touch of the disk, and a later one that goes on.

    python killed_trainer.py FOLDER FIRST STEP

For N = FIRST, FIRST + STEP, ... until one outlives its N. Prints one JSON line for each: where it was killed, and what
the run folder said then and at the end. Each trainer is a fork, so that none has to import anything.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from rollwright.export import samples_of
from rollwright.integrations.source import stored_attempts
from rollwright.rollout import RolloutPlan
from rollwright.run import Pace, Rollouts, Silent
from rollwright.store import RunDir, RunWriter
from rollwright.testing.scripted_executor import ScriptedExecutor, plain_task

TASKS = {name: plain_task(name) for name in ("a", "b", "c")}
ATTEMPTS = 2
PACE = Pace(ahead=3, max_lag=0, max_rolls=3)


async def train(folder: Path) -> None:
    """After every group the weights change, so that those which wait are too old. What it had, it remembers."""
    run, memory = RunDir(folder / "run"), folder / "delivered"
    delivered = memory.read_text().split() if memory.exists() else []
    if run.resolved_file.exists():
        writer = RunWriter.reopen(run.path)
    else:
        writer = RunWriter.create(run.path, run_file=b"", resolved={"config": {"run": {"attempts": ATTEMPTS}}})
    executor = ScriptedExecutor(reward, store=writer)
    executor.told = writer.versions() or executor.told
    source = Rollouts(
        executor,
        TASKS,
        run="run",
        attempts=ATTEMPTS,
        pace=PACE,
        observer=Silent(),
        stored=stored_attempts(run, TASKS, delivered),
        delivered=delivered,
    )
    async with source.running():
        async with source.new_weights(f"step-{len(delivered)}"):
            pass
        async for group in source:
            assert len(group.attempts) == ATTEMPTS, group
            delivered.append(group.id)
            memory.with_suffix(".new").write_text(" ".join(delivered))
            memory.with_suffix(".new").rename(memory)
            async with source.new_weights(f"step-{len(delivered)}"):
                await anyio.lowlevel.checkpoint()
    writer.close()


async def reward(plan: RolloutPlan) -> float | None:
    await anyio.lowlevel.checkpoint()
    return None if plan.attempt == 3 else float(plan.attempt % 2)


def process(folder: Path, kill_at: int) -> str | None:
    """Run a trainer in a process of its own. Returns what it was about to do when it was killed, if it was."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        if kill_at:
            touches = count(1)

            def look(event: str, args: tuple[Any, ...]) -> None:
                here = event.startswith(("open", "os.", "shutil.")) and args and str(args[0]).startswith(str(folder))
                if here and next(touches) == kill_at:
                    os.write(tell, f"{event} {args[0]}".encode())
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(look)
        code = 1
        try:
            anyio.run(train, folder)
            code = 0
        finally:
            os._exit(code)
    os.close(tell)
    with os.fdopen(told) as pipe:
        where = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
        raise SystemExit("a trainer failed")
    return where or None


def state(folder: Path) -> dict[str, Any]:
    """What a reader finds, whenever it looks."""
    run = RunDir(folder / "run")
    if not run.resolved_file.exists():
        return {"members": {}, "without_samples": [], "graded_by_file": []}
    records = run.records()
    verdicts = {r.rollout: json.loads(run.rollout(r.rollout).verdict.read_bytes()) for r in records}
    return {
        "members": Counter(record.group for record in records if not record.superseded),
        "superseded": sum(record.superseded for record in records),
        "without_samples": [r.rollout for r in records if r.graded and not run.samples(r.rollout)],
        "with_samples": [r.rollout for r in records if not r.graded and run.samples(r.rollout)],
        "graded_by_file": [r.rollout for r in records if not r.graded and "graded" in verdicts[r.rollout]],
        "exported": Counter(sample.group_id for sample in samples_of(run)),
        "left": sorted(path.name for path in run.work.iterdir()) if run.work.exists() else [],
    }


def main(folder: Path, first: int, step: int) -> Iterator[dict[str, Any]]:
    for kill_at in count(first, step):
        place = folder / str(kill_at)
        place.mkdir()
        where = process(place, kill_at)
        found = state(place)
        process(place, 0)
        yield {
            "kill_at": kill_at,
            "where": where and where.replace(str(place), ""),
            "found": found,
            "end": state(place),
            "delivered": (place / "delivered").read_text().split(),
        }
        if where is None:
            return


if __name__ == "__main__":
    for line in main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])):
        sys.stdout.write(json.dumps(line) + "\n")
