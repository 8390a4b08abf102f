"""Runs one of our shell scripts in a box as root and reads its `key value` results."""

from __future__ import annotations

import uuid
from importlib.resources import files

from rollwright.errors import GraderError
from rollwright.sandboxes import JobSpec, Sandbox

__all__ = ["FOLDER", "run_step"]

FOLDER = "/var/rollwright-steps"
"""Root-owned folder in the box for what we run there."""


async def run_step(
    box: Sandbox, script: str, *args: str, seconds: float, error: type[GraderError], what: str, durable: bool = False
) -> dict[str, str]:
    """Run `assets/SCRIPT` as root with `args`, return what it printed.

    Our own steps are short and a lost one spoils nothing, so they run without a record; `durable` is for steps that run
    what a row wants. Any end but exit 0 raises `error` with the step's last words as evidence.
    """
    # As an argument, not as a file: one request less for each step, and nothing of it stays in the box.
    argv = ("sh", "-c", files("rollwright.graders").joinpath("assets", script).read_text(), script, *args)
    if durable:
        job = await box.run(JobSpec(id=uuid.uuid4().hex, argv=argv, seconds=seconds))
        ended: int | str | None = job.exit_code if job.state == "exited" else job.state
        stdout, stderr = job.stdout.data(), job.stderr.data()
    else:
        done = await box.exec(argv, seconds=seconds)
        ended, stdout, stderr = done.exit_code, done.stdout, done.stderr
    if ended != 0:
        said = (stderr.strip() or stdout.strip())[-2000:].decode("utf-8", "replace")
        words = " / ".join(said.splitlines()[-2:]) or f"ended with {ended}"
        raise error(f"{what}: {words}", step=what, ended=ended, evidence=said)
    lines = stdout.decode("utf-8", "replace").splitlines()
    return {key: value for key, _, value in (line.partition(" ") for line in lines)}
