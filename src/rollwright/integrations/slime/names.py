"""The environment names that users of slime's coding-agent example export, and the settings they stand for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from rollwright.errors import ConfigError

__all__ = ["NAMES", "Name", "from_environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One environment name."""

    name: str
    setting: str
    """Dotted setting of the run file."""
    meaning: str
    default: str | None = None
    """What slime's example takes when it is not exported; None: nothing is set."""
    read: Callable[[str], Any] = str
    """Text → value. Raises `ValueError`."""
    also: tuple[str, ...] = ()
    """Older names of it."""


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("it is not a positive number of seconds")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError("it is not a positive number")
    return count


def _retries(text: str) -> int:
    """The example counts tries, we count what follows the first one."""
    return _count(text) - 1


def _harness(text: str) -> str:
    return text.replace("_", "-")


def _environment(text: str) -> dict[str, str]:
    data: Any = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    return {str(key): str(value) for key, value in cast("dict[Any, Any]", data).items()}


NAMES = (
    Name(
        name="SWE_AGENT", setting="harness.kind", default="claude_code", read=_harness, meaning="The coding-agent CLI."
    ),
    Name(
        name="SWE_TRAIN_PROTOCOL",
        setting="tasks.protocol",
        default="scaleswe",
        meaning="Grading protocol of training rows that name none in `metadata.protocol`.",
    ),
    Name(
        name="SWE_EVAL_PROTOCOL",
        setting="tasks.protocol (evaluation)",
        default="scaleswe",
        meaning="The same for evaluation (`generate(..., evaluation=True)`).",
    ),
    Name(
        name="SWE_AGENT_TIME_BUDGET_SEC",
        setting="harness.seconds",
        default="1800",
        read=_seconds,
        also=("SWE_TIME_BUDGET_SEC",),
        meaning="The CLI's time. Using it up is the policy's doing: what it left is graded.",
    ),
    Name(
        name="SWE_EVAL_TIMEOUT_SEC",
        setting="grading.PROTOCOL.seconds",
        default="600",
        read=_seconds,
        meaning="The tests' time, for every protocol.",
    ),
    Name(
        name="SWE_ROLLOUT_GUARD_SEC",
        setting="run.rollout_seconds",
        read=_seconds,
        also=("SWE_GENERATE_GUARD_SEC",),
        meaning="Longest life of one rollout with its retries, from when it has its place (`run.concurrency`); waiting "
        "for a boot counts. What is not done then comes back ABORTED. Not exported: the agent's time, three runs of "
        "the tests and 900 s.",
    ),
    Name(
        name="SWE_BOOT_CONCURRENCY",
        setting="sandbox.boot_concurrency",
        default="16",
        read=_count,
        meaning="Sandboxes that boot at a time.",
    ),
    Name(
        name="SWE_BOOT_RETRIES",
        setting="sandbox.boot_retries",
        default="2",
        read=_retries,
        meaning="Tries per boot (the setting counts those after the first).",
    ),
    Name(
        name="ADAPTER_PUBLIC_HOST",
        setting="gateway.public_host",
        also=("SLIME_HEAD_HOST",),
        meaning="Name or address of this machine for sandboxes on others; not needed for `namespaces` and `docker`. "
        '`node`: of the node that slime\'s rollout manager is on. With `run.executor = "ray"` each node has its own.',
    ),
    Name(
        name="ADAPTER_BIND_HOST",
        setting="gateway.bind",
        default="0.0.0.0",
        also=("SHIM_BIND_HOST",),
        meaning="Address of this machine to listen at for them.",
    ),
    Name(
        name="ADAPTER_PORT",
        setting="gateway.public_port",
        default="18001",
        read=int,
        also=("SHIM_PORT",),
        meaning="Port they reach it at.",
    ),
    Name(
        name="SLIME_AGENT_SANDBOX_BACKEND",
        setting="sandbox.kind",
        default="e2b",
        meaning="The sandbox backend: `e2b`, `namespaces`, `docker`, or `module:Class`.",
    ),
    Name(
        name="SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY",
        setting="sandbox.e2b.image_metadata_key",
        also=("SWE_SANDBOX_IMAGE_METADATA_KEY",),
        meaning="Metadata key by which the E2B cluster routes a boot to an image.",
    ),
    Name(name="E2B_API_KEY", setting="sandbox.e2b.api_key", meaning="Key of E2B or a compatible cluster."),
    Name(
        name="SLIME_AGENT_NODE_TARBALL",
        setting="harness.KIND.node_tarball",
        also=("SWE_HOST_NODE_TARBALL",),
        meaning="Node.js distribution on this machine, for CLIs that need one (`pi`, `qwen-code`); else ignored.",
    ),
    Name(
        name="SLIME_AGENT_CC_TARBALL",
        setting="harness.claude-code.tarball",
        also=("SWE_HOST_CC_TARBALL",),
        meaning="npm tarball of Claude Code's native program on this machine.",
    ),
    Name(
        name="SLIME_AGENT_CC_EXTRA_ARGS",
        setting="harness.claude-code.extra_args",
        also=("SWE_CLAUDE_EXTRA_ARGS",),
        read=shlex.split,
        meaning="More flags of `claude`, split as a shell would.",
    ),
    Name(
        name="SLIME_AGENT_CC_EXTRA_ENVS",
        setting="harness.claude-code.extra_env",
        read=_environment,
        meaning="JSON object of environment variables of `claude`, set last.",
    ),
    Name(name="SWE_CC_PROMPT", setting="(the prompt)", meaning="Put before each problem statement."),
)
"""All that are read. `docs/slime.md` has them as a table."""


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Name → value, of those that are exported or have a default. An empty variable counts as not exported.

    Raises `ConfigError` naming the variable.
    """
    values: dict[str, Any] = {}
    for name in NAMES:
        exported = next((each for each in (name.name, *name.also) if environ.get(each)), None)
        text = environ[exported] if exported is not None else name.default
        if text is None:
            continue
        try:
            values[name.name] = name.read(text)
        except ValueError as error:
            raise ConfigError(
                f"the environment's {exported}={text!r} cannot be used: {error}", field=exported
            ) from error
    return values
