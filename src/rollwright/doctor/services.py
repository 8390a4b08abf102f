"""What only some runs need: a Ray cluster, and other systems that hear of the run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import anyio
import anyio.to_thread

from rollwright.doctor import Check, Finding, found
from rollwright.doctor.subject import Subject
from rollwright.store import RunDir
from rollwright.telemetry import make_listeners


def checks(subject: Subject) -> list[Check]:
    looks = [Check(name="ray", look=_ray, fix="start one with `ray start --head`", seconds=30)]
    if subject.config is not None and subject.config.telemetry.kinds:
        looks.append(Check(name="telemetry", look=_telemetry, fix="correct telemetry.kinds", seconds=30))
    return looks


async def _telemetry(subject: Subject) -> list[Finding]:
    config = subject.config
    assert config is not None
    wanted, run = config.telemetry, RunDir(config.run.output / "doctor")
    await anyio.to_thread.run_sync(lambda: make_listeners(wanted.kinds, wanted.options, run=run, base=config.base))
    return found("telemetry", "ok", f"{', '.join(wanted.kinds)} can be made; whether they answer a run will say")


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
