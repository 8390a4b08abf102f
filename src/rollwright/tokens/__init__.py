"""Tokens: rendering, the trajectory tree, training samples and their proof. Pure: no I/O, no clock, no logging.

`Renderer` is the contract between text and ids. `render` chooses between its two implementations, `render_template`
and `render_renderers`; `tree` keeps the turns, `samples` makes training rows of them, `verify` proves those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollwright.messages import Message, ParsedTurn, ToolSpec

__all__ = ["Renderer"]


class Renderer(Protocol):
    """Chat template and tokenizer of one policy. Sampled ids only ever go *out* of it (`parse`), never back in.

    Thread-safe; calls may take milliseconds, so the gateway runs them off the event loop.
    """

    name: str
    fingerprint: str
    """Digest of tokenizer and template; stored with each run and compared with the engine's where it tells one."""
    stop_ids: frozenset[int]
    """Ids that end an assistant turn. The engine stops at them and returns the one it stopped at as sampled."""
    vocab_size: int

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole prompt, ending where the assistant's turn begins. Raises `UsageError` when the template refuses."""
        ...

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        history: Sequence[Message],
        tail: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """The ids that follow `prompt + sampled` so that `tail` is said and the assistant's next turn begins.

        `prompt`: what the engine was given for the last turn, or any end of it that reaches back to the turn before
        (so that the cost is that of the new messages). `sampled`: that turn's ids, with or without a stop id.
        `history`: the messages said so far; the last is that turn. `tail`: what came after it; it may hold answers that
        nobody sampled, which become prompt text. Returns only the *new* ids (a missing stop id is among them), or None
        when this template cannot say the tail after these ids: then the caller renders in full and records a fork.
        """
        ...

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        """What sampled ids mean. Never raises on any ids: broken output is `ill_formed`, not an exception."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of text with special tokens recognised. For scripted engines and tools, never for sampled text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens shown, for people."""
        ...
