"""What `rollwright doctor` sees on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from rollwright.config import RunConfig
from rollwright.doctor import Finding, found, of_error
from rollwright.doctor.examine import examine, examining, node_checks
from rollwright.errors import ConfigError
from rollwright.integrations.ray.cluster import connected
from rollwright.integrations.ray.node import node_settings
from rollwright.run import Places
from rollwright.tasks import TaskSet

__all__ = ["look_on_nodes"]

_SECONDS = 180.0


async def look_on_nodes(config: RunConfig, places: Places, tasks: TaskSet) -> list[Finding]:
    """What is wrong on each node, or that nothing is."""
    images = {task.agent.image: (name, task) for name, task in tasks.tasks.items()}
    one_each = TaskSet(tasks=dict(images.values()))
    add = "add one with `ray start`"
    try:
        async with connected(config.ray.address) as cluster:
            arguments = (config.dump(), str(config.base), places, one_each)
            seen = await cluster.on_each(_look_here, *arguments, seconds=_SECONDS)
    except ConfigError as error:
        return [of_error("nodes", error, add)]
    if not seen:
        return found("nodes", "fail", "the Ray cluster has no node with a CPU to run rollouts on", add)
    findings: list[Finding] = []
    for address, result in seen:
        name = f"node {address}"
        if isinstance(result, Exception):
            said = f"cannot be looked at: {type(result).__name__}: {str(result)[:300]}"
            fix = "install the same rollwright, with its extras, in the Python that `ray start` runs with there"
            findings += found(name, "fail", said, fix)
            continue
        troubles = [finding for finding in result if finding.state in ("warn", "fail")]
        findings += [replace(trouble, name=f"{name}: {trouble.name}") for trouble in troubles]
        if not troubles:
            findings += found(name, "ok", f"nothing is wrong, {len(result)} things were looked at")
    return findings


def _look_here(config: Mapping[str, Any], base: str, places: Places, tasks: TaskSet) -> list[Finding]:
    """On a node. `config`: `RunConfig.dump` of the driver."""

    async def look() -> list[Finding]:
        settings = node_settings(config, Path(base))
        # The run folder is the driver's; a node keeps what is in flight in a temporary one.
        run = settings.run.model_copy(update={"output": Path(tempfile.gettempdir())})
        settings = settings.model_copy(update={"run": run})
        e2b_key = bool(os.environ.get("E2B_API_KEY"))
        async with examining(places, settings, tasks=tasks, e2b_key=e2b_key) as subject:
            return await examine(subject, node_checks(subject))

    return anyio.run(look)
