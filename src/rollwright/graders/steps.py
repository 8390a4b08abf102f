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
    box: Sandbox, script: str, *args: str, seconds: float, error: type[GraderError], what: str
) -> dict[str, str]:
    """Upload `assets/SCRIPT`, run `sh SCRIPT ARGS` as a durable root job, return what it printed.

    Any end but exit 0 raises `error` with the job's last words as evidence.
    """
    path = f"{FOLDER}/{script}"
    await box.put(path, files("rollwright.graders").joinpath("assets", script).read_bytes(), mode=0o700)
    result = await box.run(JobSpec(id=uuid.uuid4().hex, argv=("sh", path, *args), seconds=seconds))
    if not result.ok:
        said = result.stderr.text().strip()[-2000:] or result.stdout.text().strip()[-2000:]
        raise error(
            f"{what}: {said.splitlines()[-1] if said else result.state}",
            step=what,
            state=result.state,
            exit_code=result.exit_code,
            evidence=said,
        )
    lines = result.stdout.text().splitlines()
    return {key: value for key, _, value in (line.partition(" ") for line in lines)}
