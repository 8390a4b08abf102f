"""Many small jobs with known codes and bytes, and the proof that each ran once and left nothing alive."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from rollwright.sandboxes import JobSpec, Sandbox, SandboxSpec
from rollwright.sandboxes.e2b import E2BProvider, E2BSandbox

SPEC = SandboxSpec(image="host", network="none")


@dataclass(frozen=True)
class Planned:
    """One job and what it must come to."""

    box: E2BSandbox
    spec: JobSpec
    code: int
    out: bytes
    err: bytes


def plan(box: E2BSandbox, dice: random.Random) -> Planned:
    id = secrets.token_hex(16)
    code, lines, seconds = dice.randrange(0, 100), dice.choice([0, 1, 5, 3000]), dice.choice([0, 0.1, 0.5, 1.2])
    script = (
        f"echo ran >>/tmp/ran.{id}; (sleep 300; echo late >>/tmp/ran.{id}) & sleep {seconds}; "
        f"seq 1 {lines}; printf '\\377\\000{id}' >&2; exit {code}"
    )
    return Planned(
        box=box,
        spec=JobSpec(id=id, argv=("sh", "-c", script), user="agent", cwd="/tmp", seconds=60),
        code=code,
        out=b"".join(b"%d\n" % n for n in range(1, lines + 1)),
        err=b"\xff\0" + id.encode(),
    )


async def boxes_of(provider: E2BProvider, count: int) -> list[E2BSandbox]:
    made: list[E2BSandbox] = []

    async def make() -> None:
        made.append(await provider.create(SPEC, key=secrets.token_hex(8)))

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(make)
    return made


async def run_all(jobs: Sequence[Planned], *, at_once: int) -> list[str]:
    """Run them. Returns what was wrong, one line each."""
    wrong: list[str] = []
    slots = anyio.Semaphore(at_once)

    async def run(job: Planned) -> None:
        async with slots:
            result = await job.box.run(job.spec)
        got = (result.state, result.exit_code, result.stdout.data(), result.stderr.data(), result.survivors)
        if got != ("exited", job.code, job.out, job.err, 0):
            wrong.append(f"{job.spec.id}: {result.state} {result.exit_code} instead of {job.code}")

    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(run, job)
    return wrong


async def ran_once_and_left_nothing(jobs: Sequence[Planned]) -> None:
    """Ask the boxes themselves; by now nothing goes wrong any more."""
    for box in {job.box.id: job.box for job in jobs}.values():
        ids = sorted(job.spec.id for job in jobs if job.box is box)
        traces = await box.exec(["sh", "-c", "cd /tmp && for f in ran.*; do echo $f $(cat $f); done"])
        assert traces.stdout.decode().splitlines() == [f"ran.{id} ran" for id in ids]
        assert await alive(box) == []


async def alive(box: Sandbox) -> list[str]:
    """Processes of jobs."""
    found = await box.exec(["sh", "-c", "grep -lsF ROLLWRIGHT_JOB= /proc/[0-9]*/environ; true"])
    return found.stdout.decode().split()
