"""The trajectory: every turn of a rollout as a tree that stores token *deltas* only."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollwright.messages import Message, ToolSpec
from rollwright.tokens import Renderer
from rollwright.types import BranchRole, FinishReason, LogprobKind, VersionSpan

__all__ = ["Drift", "Plan", "Trajectory", "Turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Why a request could not extend the turn it looks like a continuation of."""

    cause: str
    """E.g. `assistant_rewritten`, `history_edited`, `tools_changed`, `bridge_refused`."""
    turn: int
    """Index of the nearest turn it was compared with."""
    token_index: int
    """Where the full render leaves that turn's stored ids."""
    stored_text: str = ""
    new_text: str = ""
    """A few decoded tokens on each side of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one request hangs on the tree: made before generation, turned into a `Turn` by `commit`."""

    parent: int | None
    """Index of the turn it extends; None for a new root."""
    delta: list[int]
    """Prompt ids that come after the parent's ids (the whole prompt for a root)."""
    prompt: list[int]
    """Everything the engine is to be given."""
    keys: tuple[str, ...]
    """Digests of all messages of the request, for later matching."""
    tools_key: str
    messages: tuple[Message, ...]
    """Only those that the parent does not already hold."""
    tools: tuple[ToolSpec, ...] = ()
    drift: Drift | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One committed model call."""

    index: int
    parent: int | None
    delta: array[int]
    sampled: array[int]
    logprobs: array[float]
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    """Over `sampled`, without gaps."""
    keys: tuple[str, ...]
    """Digests of the messages this turn added to its parent: the request's new ones, then the reply."""
    carriers: frozenset[str]
    """Ids we minted for the reply."""
    messages: tuple[Message, ...]
    """The new messages, then the reply."""
    tools_key: str
    role: BranchRole = "main"
    logprob_kind: LogprobKind = "behaviour"
    temperature: float = 1.0
    ill_formed: str | None = None
    delivered: bool = True
    """Whether the client got the whole reply. An undelivered turn trains nothing."""
    drift: Drift | None = None
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Trajectory:
    """Append-only tree of turns. Not thread-safe; `plan` may be called off-thread while nothing commits."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.turns: list[Turn] = []

    def plan(self, messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer) -> Plan:
        """Find the deepest turn the request continues and extend it by a bridge; else render in full."""
        raise NotImplementedError

    def commit(
        self,
        plan: Plan,
        *,
        sampled: Sequence[int],
        logprobs: Sequence[float],
        finish: FinishReason,
        versions: Sequence[VersionSpan],
        reply: Message,
        role: BranchRole = "main",
        logprob_kind: LogprobKind = "behaviour",
        temperature: float = 1.0,
        ill_formed: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Add the turn. Raises `EngineProtocolError` when lengths differ or versions leave a gap."""
        raise NotImplementedError

    def mark_undelivered(self, index: int) -> None:
        """The client never got the reply of this turn."""
        raise NotImplementedError

    def ids(self, index: int) -> list[int]:
        """All ids from the root through this turn's sampled ones."""
        raise NotImplementedError

    def leaves(self) -> list[int]:
        """Turns nothing continues, in order of creation."""
        raise NotImplementedError

    def path(self, index: int) -> list[int]:
        """Turn indices from the root to this turn."""
        raise NotImplementedError


Origin = Literal["root", "bridge", "fork"]
