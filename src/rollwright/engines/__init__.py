"""Engines: the policy's inference server, token in / token out. One file a variant; this is the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

from rollwright.messages import Message
from rollwright.types import LogprobKind, Sampling, VersionSpan

__all__ = ["Engine", "EngineCapabilities", "Generation", "Scorer", "Scores", "TellsTemplate", "UpdatesWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine is and can do, known after `open`."""

    name: str
    max_context: int
    """Prompt and reply together, in tokens."""
    logprob_kind: LogprobKind
    vocab_size: int | None = None
    """Compared with the renderer's before step 0."""
    fingerprint: str | None = None
    """The tokenizer/template digest the engine reports, if it does."""
    updates_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One reply. `len(ids) == len(logprobs)`; `versions` cover `[0, len(ids))` without gaps."""

    ids: list[int]
    logprobs: list[float]
    """NaN where the engine has none."""
    finish: Literal["stop", "length", "abort"]
    """stop: `ids` ends with one of `stop_ids`. abort: partial; never a turn."""
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0


class Engine(Protocol):
    """Samples ids. An async context manager: whoever opens it closes it.

    Raises `EngineUnreachable` (retry may help), `EngineRejected`, `EngineProtocolError`. A logprob that the
    engine does not have is NaN, never 0.0; where it has none at all, that is an `EngineProtocolError`.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def check(self) -> None:
        """Before step 0: answers, and with what the contract promises. Raises like `generate`."""
        ...

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        session_key: str,
    ) -> Generation:
        """Sample after `ids`. `len(ids) + sampling.max_new_tokens` is within the context (the gateway clamps).

        `request_id` is the caller's and unique; `session_key` keeps one session on one replica. Cancelling the call
        aborts the generation.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Make a running `generate` return what it has with finish `abort`. Unknown ids are ignored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How likely given tokens are to the weights an engine has now."""

    logprobs: list[float]
    """One for each token asked for, in their order; -inf where it could not have been sampled."""
    kind: LogprobKind
    version: str
    """Of the weights; "" where the engine does not tell it."""


@runtime_checkable
class Scorer(Protocol):
    """An engine that can also say how likely tokens are which it is given."""

    async def score(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        sampling: Sampling,
        *,
        request_id: str,
        session_key: str,
    ) -> Scores:
        """Of the tokens `ids[start:end]` of each span, each given all ids before it. Spans are in order, do not overlap
        and begin after the first id. `sampling`: what the tokens were sampled with.

        Raises like `Engine.generate`; `EngineRejected` for ids beyond the context.
        """
        ...


@runtime_checkable
class UpdatesWeights(Protocol):
    """An engine that a trainer in reach of its disk can give new weights (where it has the capability)."""

    async def load_weights(self, path: Path, version: str) -> None:
        """Go on with the weights of folder `path`, called `version`; returns when they are in use.

        Raises `ConfigError` when the folder holds another model, and like `generate`.
        """
        ...


@runtime_checkable
class HoldsWeights(Protocol):
    """What an engine that reads its weights itself also is: a run can then tell whether they are still the same."""

    @property
    def weights(self) -> str:
        """A digest of what it would begin with now; known before it is opened. Raises `ConfigError`."""
        ...


@runtime_checkable
class TellsTemplate(Protocol):
    """An engine whose server has a chat template of its own. We send it ids, so nothing is made of it: a difference
    from the policy's says that the two are not of one policy."""

    async def rendered(self, messages: Sequence[Message]) -> list[int] | None:
        """What the server makes of a conversation, up to where the assistant's turn begins; None where it cannot tell.
        Raises `EngineUnreachable`."""
        ...
