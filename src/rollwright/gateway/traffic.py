"""Who is asking: which program, and for what: a class of traffic by headers, else by narrow signs in the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, cast, get_args

from rollwright.dialects import Request
from rollwright.dialects.jsonio import loads
from rollwright.types import BranchRole, TrafficClass

__all__ = ["FOREIGN", "TRAINED", "Traffic", "classify", "program_of", "trained_classes"]

TRAINED: frozenset[TrafficClass] = frozenset({"main", "subagent", "compaction"})
"""What is trained unless a session says otherwise: the classes whose words are part of the work."""

_ROLES: dict[TrafficClass, BranchRole] = {"main": "main", "subagent": "subagent", "compaction": "compaction"}

# Sent by Claude Code when CLAUDE_CODE_GATEWAY_HINT_HEADERS=1.
_CLAUDE_CODE: dict[str, TrafficClass] = {
    "main": "main",
    "subagent": "subagent",
    "workflow": "subagent",
    "compaction": "compaction",
    "auxiliary": "side",
    "side_reply": "side",
}

_SIGNS: tuple[tuple[TrafficClass, re.Pattern[str]], ...] = (
    ("side", re.compile(r"\bmemory extraction (sub)?agent\b", re.IGNORECASE)),  # qwen-code
    ("subagent", re.compile(r"\bYou are (a|an|the) [\w -]{0,40}sub-?agent\b", re.IGNORECASE)),
)
"""In the beginning of the system message."""
_TITLE = re.compile(r"\btitle generator\b|\b(generate|write|create)\b[^.\n]{0,60}\btitle\b", re.IGNORECASE)
"""In the system message of a request without tools."""
_COMPACTION = re.compile(
    r"CONTEXT CHECKPOINT COMPACTION"  # Codex
    r"|CRITICAL: Respond with TEXT ONLY"  # Claude Code
    r"|\AYou are the component that summarizes a conversation\b"  # qwen-code, before its context is full
)
"""In the beginning of the last message."""
_SUMMARY = re.compile(
    r"\bYou are a context summarization (assistant|agent)\b"  # pi, opencode
    r"|\bYou are the component that summarizes a conversation\b"  # qwen-code
)
"""In the beginning of the system message of a request without tools."""
_BEGINNING = 2000

_PROGRAM = (
    "user-agent",
    "originator",
    "x-claude-code-session-id",
    "x-stainless-lang",
    "x-stainless-package-version",
    "x-stainless-runtime",
)
"""Headers that say which program asks, and that each CLI sends alike with all its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Where a request comes from."""

    agent: str = ""
    """The CLI's own id of the agent; empty for its only or main one."""
    kind: TrafficClass = "main"
    told_by: Literal["headers", "text", "nothing"] = "nothing"

    @property
    def role(self) -> BranchRole:
        """Of the branch it makes."""
        return _ROLES.get(self.kind, "side")


FOREIGN = Traffic(kind="foreign", told_by="headers")
"""Of a request that another program sends than the one that began the session."""


def program_of(headers: Mapping[str, str], dialect: str) -> str:
    """Digest of the program that asks and the wire it speaks. `headers` have lower-case names."""
    said = [dialect, *(headers.get(name, "") for name in _PROGRAM)]
    return blake2b("\0".join(said).encode(), digest_size=8).hexdigest()


def classify(headers: Mapping[str, str], request: Request) -> Traffic:
    """`headers` have lower-case names. What no header tells is guessed from signs no ordinary request has."""
    told = _by_headers(headers)
    if told is not None:
        return told
    kind = _by_text(request)
    return Traffic() if kind is None else Traffic(kind=kind, told_by="text")


def trained_classes(names: object) -> frozenset[TrafficClass]:
    """Names of classes as a set of them. Raises `ValueError` for an unknown one."""
    known = get_args(TrafficClass)
    listed = list(cast("list[object]", names))
    for name in listed:
        if name not in known:
            raise ValueError(f"unknown traffic class {name!r}: one of {', '.join(known)}")
    return frozenset(cast("list[TrafficClass]", listed))


def _by_headers(headers: Mapping[str, str]) -> Traffic | None:
    """Claude Code, Codex, opencode."""
    agent = headers.get("x-claude-code-agent-id", "")
    kind = _CLAUDE_CODE.get(headers.get("x-claude-code-request-class", ""))
    if agent or kind is not None:
        return Traffic(agent=agent[:200], kind=kind or "subagent", told_by="headers")
    parent = headers.get("x-codex-parent-thread-id", "")
    codex = _codex_kind(headers)
    if parent or codex is not None:
        thread = headers.get("thread-id", "") if parent or codex == "subagent" else ""
        return Traffic(agent=thread[:200], kind=codex or "subagent", told_by="headers")
    if "x-parent-session-id" in headers:
        return Traffic(agent=headers.get("x-session-id", "")[:200], kind="subagent", told_by="headers")
    return None


def _codex_kind(headers: Mapping[str, str]) -> TrafficClass | None:
    try:
        metadata: Any = loads(headers.get("x-codex-turn-metadata", "null"))
    except ValueError:
        metadata = None
    said = cast("dict[str, Any]", metadata).get("request_kind") if isinstance(metadata, dict) else None
    if said == "compaction":
        return "compaction"
    if headers.get("x-openai-subagent"):
        return "subagent"
    # An ordinary turn is left to the text only by CLIs that say nothing at all.
    return "main" if said == "turn" else None


def _by_text(request: Request) -> TrafficClass | None:
    if not request.messages:
        return None
    first, last = request.messages[0], request.messages[-1]
    system = first.content[:_BEGINNING] if first.role == "system" else ""
    for kind, sign in _SIGNS:
        if sign.search(system):
            return kind
    if last.role == "user" and _COMPACTION.search(last.content[:_BEGINNING]):
        return "compaction"
    if not request.tools and _SUMMARY.search(system):
        return "compaction"
    if not request.tools and _TITLE.search(system):
        return "title"
    asked = request.recorded
    limits = (asked.get("max_tokens"), asked.get("max_output_tokens"), asked.get("max_completion_tokens"))
    # with tools it is an ordinary turn of pi, which takes the context for full
    if not request.tools and 1 in limits:
        return "probe"
    return None
