"""What slime can be told to do that a rollout of a coding agent cannot serve: refused before the first one."""

from __future__ import annotations

from typing import Any

from rollwright.errors import ConfigError

__all__ = ["check_options"]

_FLAGS = {
    "partial_rollout": "a cut rollout has no beginning that a later step could go on with; leave it away",
    "group_rm": "the reward is the grader's verdict; leave it away",
    "use_rollout_routing_replay": "the engine's routed experts are not recorded; leave it away",
}
"""Argument → why it cannot be, and what to do."""


def check_options(args: Any, sample: Any) -> None:
    """Raises `ConfigError` naming the flag."""
    for name, why in _FLAGS.items():
        if getattr(args, name, False):
            raise ConfigError(f"slime's --{name.replace('_', '-')} cannot be served: {why}", field=name)
    top_p = getattr(args, "rollout_top_p", None)
    if top_p not in (None, 1, 1.0) and hasattr(sample, "rollout_top_p_token_ids"):
        raise ConfigError(
            f"slime's --rollout-top-p {top_p} cannot be served: this slime asks which tokens it left over, which is "
            "not recorded; set it to 1.0",
            field="rollout_top_p",
        )
