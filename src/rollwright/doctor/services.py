"""What only some runs need: a Ray cluster, and other systems that hear of the run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys

import anyio
import anyio.to_thread

from rollwright.doctor import Check, Finding, found
from rollwright.doctor.subject import Subject
from rollwright.store import RunDir
from rollwright.telemetry import listeners_of

_CONNECT_SECONDS = 5.0
_CURRENT_CLUSTER = "/tmp/ray/ray_current_cluster"
"""Where Ray notes the cluster of this machine."""


def checks(subject: Subject) -> list[Check]:
    looks = [Check(name="ray", look=_ray, fix="start one with `ray start --head`", seconds=30)]
    if subject.config is not None and subject.config.telemetry.kinds:
        looks.append(Check(name="telemetry", look=_telemetry, fix="correct telemetry.kinds", seconds=30))
    return looks


async def _telemetry(subject: Subject) -> list[Finding]:
    config = subject.config
    assert config is not None
    wanted, run = config.telemetry, RunDir(config.run.output / "doctor")
    await anyio.to_thread.run_sync(lambda: listeners_of(config, run))
    return found("telemetry", "ok", f"{', '.join(wanted.kinds)} can be made; whether they answer a run will say")


async def _ray(subject: Subject) -> list[Finding]:
    """Asked of Ray's own command, in a process of its own: a client in this one could not be got rid of."""
    config = subject.config
    wanted = config is not None and config.run.executor == "ray"
    address = config.ray.address if config is not None and wanted else subject.ray_address
    if importlib.util.find_spec("ray") is None:
        fix = "pip install 'rollwright[ray]', or set run.executor to \"local\"" if wanted else ""
        return found("ray", "fail" if wanted else "skipped", "not installed", fix)
    version = importlib.metadata.version("ray")
    if config is not None and not wanted:
        return found("ray", "skipped", f"ray {version}, which this run does not use")
    if address is None and not await anyio.Path(_CURRENT_CLUSTER).exists():
        return found("ray", "skipped", f"ray {version}, no cluster runs here")
    fix = "start one with `ray start --head`, or correct ray.address or RAY_ADDRESS"
    argv = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    if address not in (None, "auto"):
        if not await _listens(address):  # Ray itself would go on trying
            return found("ray", "fail", f"ray {version}: nobody answers at {address}", fix)
        argv += ["--address", address]
    done = await anyio.run_process(argv, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        nodes = len(set(re.findall(rb"node_[0-9a-f]+", done.stdout)))
        return found("ray", "ok", f"ray {version}, a cluster of {nodes} nodes")
    seen = f"ray {version}: no cluster at {address}" if address else f"ray {version}, no cluster runs here"
    if wanted or address:
        return found("ray", "fail", seen, fix)
    return found("ray", "skipped", seen)


async def _listens(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return True  # of a kind that Ray alone can ask
    try:
        with anyio.fail_after(_CONNECT_SECONDS):
            await (await anyio.connect_tcp(host, int(port))).aclose()
    except (OSError, TimeoutError):
        return False
    return True
