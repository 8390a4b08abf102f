"""Replies from a file instead of a model, for tests and dry demos. Its logprobs are made up and say so here."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollwright.engines import EngineCapabilities, Generation
from rollwright.engines.spans import version_spans
from rollwright.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnreachable, UsageError
from rollwright.messages import Message
from rollwright.tokens import Renderer
from rollwright.types import Sampling

__all__ = ["Fault", "Rule", "Script", "ScriptedEngine"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(_Table):
    """What to say where `match` (each of them, if several) occurs in the decoded prompt. The first rule that matches
    answers."""

    match: str | tuple[str, ...] = ""
    replies: Annotated[tuple[str, ...], Field(min_length=1)]
    """Turns in the policy's own markup. The n-th call of one session that this rule answers gets the n-th; the last
    one is repeated, so let it be a turn that calls no tool."""
    logprob: Annotated[float, Field(le=0)] = -0.1
    """Of every token."""

    def matches(self, prompt: str) -> bool:
        wanted = (self.match,) if isinstance(self.match, str) else self.match
        return all(text in prompt for text in wanted)


class Fault(_Table):
    """Something that goes wrong at the `call`-th generate of the engine, counted from 1 over all sessions."""

    call: Annotated[int, Field(ge=1)]
    kind: Literal["unreachable", "rejected", "abort", "delay", "missing_logprobs", "version"]
    """abort: after `after_tokens`. delay: `seconds` more. version: from that token of that call on, the weights are
    called `version`. missing_logprobs: what a real engine without logprobs makes of it, `EngineProtocolError`."""
    after_tokens: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0
    version: str = ""


class Script(_Table):
    """The whole file: `[[script]]` rules, `[[fault]]` tables."""

    script: Annotated[tuple[Rule, ...], Field(min_length=1)]
    fault: tuple[Fault, ...] = ()
    max_context: Annotated[int, Field(ge=1)] = 200_000

    @classmethod
    def read(cls, path: Path) -> Script:
        """Raises `ConfigError` that names the file and the field."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text("utf-8")))
        except OSError as error:
            raise ConfigError(
                f"engine.scripted.script: {path}: {error.strerror}", field="engine.scripted.script"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"engine.scripted.script: {path}: {where}: {first['msg']}", field="engine.scripted.script"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"engine.scripted.script: {path} is not TOML: {error}", field="engine.scripted.script"
            ) from error


@dataclass(slots=True)
class _Cursor:
    """Where one session is in one rule."""

    done: int = 0
    partial: tuple[list[int], list[int]] | None = None
    """Of an aborted reply: the prompt that would go on with it, and what is left to say."""


class ScriptedEngine:
    """Says what the script says, token for token, ended by the template's own end of turn.

    A reply that was aborted goes on when its prompt comes back with the partial reply appended, and starts again when
    the prompt comes back alone. Logprob kind is given as `behaviour`, its numbers are the script's.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        script: Path | str | Script,
        version: str = "scripted",
        seconds_per_turn: float = 0.0,
    ) -> None:
        """`seconds_per_turn`: how long each reply takes. Raises `ConfigError`, also for a broken script file."""
        if seconds_per_turn < 0:
            raise ConfigError(
                f"engine.scripted.seconds_per_turn must not be negative: {seconds_per_turn}",
                field="engine.scripted.seconds_per_turn",
            )
        self._renderer = renderer
        self._script = script if isinstance(script, Script) else Script.read(Path(script))
        self._version = version
        self._seconds = seconds_per_turn
        self._calls = 0
        self._cursors: dict[tuple[str, int], _Cursor] = {}
        self._running: dict[str, anyio.Event] = {}
        self._end_id: int | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="scripted",
            max_context=self._script.max_context,
            logprob_kind="behaviour",
            vocab_size=self._renderer.vocab_size,
            fingerprint=self._renderer.fingerprint,
        )

    async def __aenter__(self) -> Self:
        self._end_id = _end_of_turn(self._renderer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stopped in self._running.values():
            stopped.set()

    async def check(self) -> None:
        """A script always answers."""

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        session_key: str,
    ) -> Generation:
        if len(ids) + sampling.max_new_tokens > self._script.max_context:
            raise EngineRejected(
                f"scripted engine: the prompt ({len(ids)} tokens) with {sampling.max_new_tokens} new tokens is longer "
                f"than the context ({self._script.max_context} tokens)"
            )
        if request_id in self._running:
            raise EngineRejected(f"scripted engine: request {request_id} is already running")
        self._calls += 1
        faults = {fault.kind: fault for fault in self._script.fault if fault.call == self._calls}
        _raise_fault(faults)
        rule, cursor = self._cursor(session_key, list(ids))
        reply = self._reply(rule, cursor, list(ids))
        said, finish = _cut(reply, sampling.max_new_tokens, stop_ids)
        delay = self._seconds + (faults["delay"].seconds if "delay" in faults else 0.0)
        share = await self._take_time(request_id, delay)
        if share < 1 or "abort" in faults:
            kept = min(int(len(said) * share), faults["abort"].after_tokens if "abort" in faults else len(said))
            said, finish = said[:kept], "abort"
            cursor.partial = ([*ids, *said], reply[kept:])
        else:
            cursor.partial = None
            cursor.done += 1
        return Generation(
            ids=said,
            logprobs=[rule.logprob] * len(said),
            finish=finish,
            versions=version_spans(self._versions(len(said), faults.get("version"))),
        )

    async def abort(self, request_id: str) -> None:
        stopped = self._running.get(request_id)
        if stopped is not None:
            stopped.set()

    def _cursor(self, session_key: str, ids: list[int]) -> tuple[Rule, _Cursor]:
        text = self._renderer.decode(ids)
        for index, rule in enumerate(self._script.script):
            if rule.matches(text):
                return rule, self._cursors.setdefault((session_key, index), _Cursor())
        raise EngineRejected("scripted engine: no [[script]] matches the prompt; give the last one no `match`")

    def _reply(self, rule: Rule, cursor: _Cursor, ids: list[int]) -> list[int]:
        if cursor.partial is not None and cursor.partial[0] == ids:
            return cursor.partial[1]
        text = rule.replies[min(cursor.done, len(rule.replies) - 1)]
        reply = self._renderer.encode(text)
        return reply if self._end_id is None else [*reply, self._end_id]

    async def _take_time(self, request_id: str, seconds: float) -> float:
        """Wait so long or until aborted; the share of the time that passed, 1.0 for all of it."""
        self._running[request_id] = stopped = anyio.Event()
        started = anyio.current_time()
        try:
            with anyio.move_on_after(seconds) as scope:
                await stopped.wait()
        finally:
            del self._running[request_id]
        return 1.0 if scope.cancelled_caught else min((anyio.current_time() - started) / seconds, 0.999)

    def _versions(self, count: int, fault: Fault | None) -> list[str]:
        if fault is None:
            return [self._version] * count
        before = min(fault.after_tokens, count)
        old, self._version = self._version, fault.version
        return [old] * before + [fault.version] * (count - before)


def _raise_fault(faults: dict[str, Fault]) -> None:
    if "unreachable" in faults:
        raise EngineUnreachable("scripted engine: the connection broke, as the script has it")
    if "rejected" in faults:
        raise EngineRejected("scripted engine: status 500, as the script has it")
    if "missing_logprobs" in faults:
        raise EngineProtocolError("scripted engine: a reply without logprobs, as the script has it")


def _cut(
    reply: list[int], limit: int, stop_ids: frozenset[int]
) -> tuple[list[int], Literal["stop", "length", "abort"]]:
    """The reply up to its first stop id, or up to the limit."""
    for index, token in enumerate(reply[:limit]):
        if token in stop_ids:
            return reply[: index + 1], "stop"
    return reply[:limit], "length"


def _end_of_turn(renderer: Renderer) -> int | None:
    """The stop id that the template itself puts after an assistant turn."""
    opening = [Message(role="user", content="a")]
    try:
        prompt = renderer.render(opening, ())
        longer = renderer.render(
            [*opening, Message(role="assistant", content="b"), Message(role="user", content="c")], ()
        )
    except UsageError:
        return min(renderer.stop_ids, default=None)
    after = (token for token in longer[len(prompt) :] if token in renderer.stop_ids)
    return next(after, min(renderer.stop_ids, default=None))
