"""Who in the CLI is asking: the agent a request belongs to and the role its branch will have, by headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollwright.types import BranchRole

__all__ = ["Traffic", "classify"]

# Sent by Claude Code when CLAUDE_CODE_GATEWAY_HINT_HEADERS=1.
_CLASSES: dict[str, BranchRole] = {
    "main": "main",
    "subagent": "subagent",
    "workflow": "subagent",
    "compaction": "compaction",
    "auxiliary": "side",
    "side_reply": "side",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Where a request comes from."""

    agent: str = ""
    """The CLI's own id of the agent; empty for its only or main one."""
    role: BranchRole = "main"


def classify(headers: Mapping[str, str]) -> Traffic:
    """Read the headers (lower-case names) that some CLIs send about themselves."""
    agent = headers.get("x-claude-code-agent-id", "")
    role = _CLASSES.get(headers.get("x-claude-code-request-class", ""))
    parent = headers.get("x-parent-session-id", "")  # opencode
    if role is None:
        role = "subagent" if agent or parent else "main"
    return Traffic(agent=(agent or (headers.get("x-session-id", "") if parent else ""))[:200], role=role)
