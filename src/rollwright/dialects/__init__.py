"""Dialects: wire APIs of the gateway as pure translations between JSON and `messages`. One file a dialect.

Two rules keep a conversation bridgeable, whatever the client does around it:

* A wire message is translated by itself: what it becomes does not depend on what comes after it. So the translation
  of a longer history begins with the translation of the shorter one.
* System text in the middle of a list becomes a user message of its own, inside `<system-reminder>` tags. Many chat
  templates refuse a system message that is not first, and folding it into a neighbour would change a message the
  policy has already seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, Protocol

from rollwright.messages import Message, ToolSpec
from rollwright.types import FinishReason

__all__ = [
    "Dialect",
    "Opening",
    "Problem",
    "ProblemKind",
    "Reply",
    "Request",
    "Usage",
    "WireTool",
    "settle_system",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTool:
    """How a wire calls a tool that the policy knows under one flat name."""

    name: str
    namespace: str = ""
    freeform: bool = False
    """It takes text, not JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks for, in the words of every dialect."""

    model: str
    """As the client named it; answered by the one policy there is."""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    stream: bool
    wire_tools: Mapping[str, WireTool] = field(default_factory=dict[str, WireTool])
    """By flat name, on wires whose tools are more than a name and a schema."""
    include_usage: bool = True
    """Whether a stream ends with token counts. Always so on wires without the choice."""
    recorded: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings the client sent (temperature, max_tokens, ...). Kept for the record, never obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """True token counts of one turn."""

    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0
    """Of the prompt, as the engine reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What is known of a reply before it is sampled."""

    id: str
    """The message id, minted."""
    model: str
    created: int
    """Seconds since the epoch."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One complete turn of the policy, ready for any wire."""

    opening: Opening
    message: Message
    """The assistant's, with minted call ids."""
    signature: str
    """Minted; goes with the reasoning where the wire has a place for it, and comes back with it."""
    finish: FinishReason
    usage: Usage


ProblemKind = Literal[
    "unauthorized", "malformed", "too_long", "too_large", "coding", "closed", "limit", "not_found", "unavailable"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a request gets no reply."""

    kind: ProblemKind
    message: str
    field: str = ""
    """malformed: the field, dotted."""
    tokens: int = 0
    """too_long: what the prompt has."""
    maximum: int = 0
    """too_long: what it may have."""


class Dialect(Protocol):
    """One wire API. Pure: no I/O, no clock, no randomness."""

    name: str
    reply_prefix: str
    """How reply ids begin on this wire."""
    call_prefix: str
    """How call ids begin on this wire."""
    opens_counted: bool
    """Whether the opening tells the prompt's tokens. Keepalives may then come before it, else only after it."""

    def parse(self, body: Mapping[str, Any]) -> Request:
        """Translate a request body. Unknown fields are tolerated. Raises `MalformedRequest`."""
        ...

    def settle(self, message: Message, opening: Opening, request: Request) -> Message:
        """The policy's message as faithful clients of this wire give it back: in the form the wire has for it, with
        every id they echo among its carriers."""
        ...

    def reply(self, reply: Reply, request: Request) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        ...

    def opening(self, opening: Opening) -> bytes:
        """The first events of a stream; nothing of the turn is in them."""
        ...

    def keepalive(self, opening: Opening) -> bytes:
        """An event that means nothing but that we live, of the kind this wire's clients count as life."""
        ...

    def content(self, reply: Reply, request: Request) -> bytes:
        """The events that carry the turn."""
        ...

    def terminal(self, reply: Reply, request: Request) -> bytes:
        """The events that end the stream. Sent only when the turn is durable."""
        ...

    def error(self, problem: Problem) -> tuple[int, dict[str, Any]]:
        """HTTP status and body in this wire's own form."""
        ...

    def failure(self, problem: Problem, opening: Opening) -> bytes:
        """The same once a stream has begun: the events that end it. They may come before the opening."""
        ...


def settle_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """System messages where every chat template takes them: one at the start, the later ones as reminders."""
    leading = list(takewhile(lambda message: message.role == "system", messages))
    text = "\n\n".join(message.content for message in leading if message.content)
    settled = [Message(role="system", content=text)] if text else []
    for message in messages[len(leading) :]:
        if message.role == "system":
            if not message.content:
                continue
            message = Message(role="user", content=f"<system-reminder>\n{message.content}\n</system-reminder>")
        settled.append(message)
    return tuple(settled)
