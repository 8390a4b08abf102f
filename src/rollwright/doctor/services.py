"""What only some runs need: a Ray cluster."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import anyio

from rollwright.doctor import Check, Finding, found
from rollwright.doctor.subject import Subject


def checks(subject: Subject) -> list[Check]:
    return [Check(name="ray", look=_ray, fix="start one with `ray start --head`", seconds=30)]


async def _ray(subject: Subject) -> list[Finding]:
    """Asked of Ray's own command, in a process of its own: a client in this one could not be got rid of."""
    if importlib.util.find_spec("ray") is None:
        return found("ray", "skipped", "not installed", "pip install ray, to spread a run over machines")
    version = importlib.metadata.version("ray")
    argv = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    argv += ["--address", subject.ray_address] if subject.ray_address else []
    done = await anyio.run_process(argv, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        active = done.stdout.decode(errors="replace").count("node_")
        return found("ray", "ok", f"ray {version}, a cluster of {active} nodes")
    if subject.ray_address:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        seen = f"ray {version}: no cluster at {subject.ray_address} ({last})"
        return found("ray", "fail", seen, "start the cluster, or unset RAY_ADDRESS")
    return found("ray", "skipped", f"ray {version}, no cluster runs here", "start one with `ray start --head`")
