"""Many small jobs with known codes and bytes, and the proof that each ran once and left nothing alive.

boxes = [await provider.create(spec, key=f"box{n}") for n in range(3)]
jobs = [known_job(boxes[n % 3], dice) for n in range(60)]
assert await run_all(jobs, at_once=8) == []     # while whatever is to go wrong goes wrong
assert await traces(jobs) == []                 # when nothing goes wrong any more
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from rollwright.errors import RollwrightError
from rollwright.sandboxes import JobSpec, Sandbox

__all__ = ["KnownJob", "alive", "known_job", "run_all", "traces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """One job and what it must come to."""

    box: Sandbox
    spec: JobSpec
    code: int
    out: bytes
    err: bytes


def known_job(box: Sandbox, dice: random.Random) -> KnownJob:
    """A job that marks its run in `/tmp`, leaves a process behind, and writes bytes of any kind."""
    id = secrets.token_hex(16)
    code, lines, seconds = dice.randrange(0, 100), dice.choice([0, 1, 5, 3000]), dice.choice([0, 0.1, 0.5, 1.2])
    script = (
        f"echo ran >>/tmp/ran.{id}; (sleep 300; echo late >>/tmp/ran.{id}) & sleep {seconds}; "
        f"seq 1 {lines}; printf '\\377\\000{id}' >&2; exit {code}"
    )
    return KnownJob(
        box=box,
        spec=JobSpec(id=id, argv=("sh", "-c", script), user="agent", cwd="/tmp", seconds=60),
        code=code,
        out=b"".join(b"%d\n" % n for n in range(1, lines + 1)),
        err=b"\xff\0" + id.encode(),
    )


async def run_all(jobs: Sequence[KnownJob], *, at_once: int) -> list[str]:
    """Run them. Returns what was wrong, one line each."""
    wrong: list[str] = []
    slots = anyio.Semaphore(at_once)

    async def run(job: KnownJob) -> None:
        async with slots:
            try:
                result = await job.box.run(job.spec)
            except RollwrightError as error:  # what is lost is counted, and the others go on
                wrong.append(f"{job.spec.id}: {type(error).__name__}: {error}")
                return
        got = (result.state, result.exit_code, result.stdout.data(), result.stderr.data(), result.survivors)
        if got != ("exited", job.code, job.out, job.err, 0):
            wrong.append(f"{job.spec.id}: {result.state} {result.exit_code} instead of {job.code}")

    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(run, job)
    return wrong


async def traces(jobs: Sequence[KnownJob]) -> list[str]:
    """Ask the boxes themselves. Returns what did not run exactly once, and what is still alive, one line each."""
    wrong: list[str] = []
    for box in {job.box.id: job.box for job in jobs}.values():
        found = await box.exec(["sh", "-c", "cd /tmp && for f in ran.*; do echo $f $(cat $f); done"])
        marks = dict(line.split(" ", 1) for line in found.stdout.decode().splitlines())
        for job in (job for job in jobs if job.box is box):
            mark = marks.pop(f"ran.{job.spec.id}", "")
            if mark != "ran":
                wrong.append(f"{job.spec.id}: ran {mark.split().count('ran')} times, wrote {mark!r}")
        wrong += [f"{name}: nobody's" for name in marks]
        wrong += [f"box {box.id}: {path} is alive" for path in await alive(box)]
    return wrong


async def alive(box: Sandbox) -> list[str]:
    """Processes of jobs."""
    found = await box.exec(["sh", "-c", "grep -lsF ROLLWRIGHT_JOB= /proc/[0-9]*/environ; true"])
    return found.stdout.decode().split()
