"""A conversation as every dialect and every renderer sees it. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call the policy made (or the client says it made)."""

    name: str
    arguments: Mapping[str, Any] | str
    """Parsed JSON object; a string when the text is not a JSON object (kept as it came)."""
    id: str = ""
    """The id on the wire; minted by the gateway for calls the policy samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the canonical conversation. Text only: images become a note in `content`."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    """Assistant only: the thinking that came before `content`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Assistant only, in order; parallel calls are all here."""
    tool_call_id: str = ""
    """Tool only: which call this answers."""
    tool_name: str = ""
    """Tool only: the called tool's name, where the wire or the history tells it."""
    carriers: tuple[str, ...] = ()
    """Assistant only: ids we minted that the client echoed (call ids, signatures, item ids). They beat text when
    the gateway looks for the turn this message is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool the client offers the policy."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What the sampled tokens of one turn mean. Made by `Renderer.parse`, never fed back into tokens."""

    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    ill_formed: str | None = None
    """Why the text is not a well-formed turn (broken JSON in a call, an unclosed block), else None."""
