"""One turn from request to committed reply: plan, sample, parse, commit, log."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from rollwright.dialects import Dialect, Opening, Reply, Request, Usage
from rollwright.dialects.fields import as_mapping
from rollwright.dialects.jsonio import dumps, loads, scrub, scrub_text
from rollwright.engines import Engine, Generation
from rollwright.errors import (
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
    MalformedRequest,
    PromptTooLong,
    RollwrightError,
)
from rollwright.gateway.gate import EngineGate
from rollwright.gateway.log import Intent, TurnLog
from rollwright.gateway.receipt import Receipt
from rollwright.gateway.traffic import FOREIGN, Traffic, classify, program_of
from rollwright.messages import Message, ParsedTurn
from rollwright.tokens import Renderer
from rollwright.tokens.canonical import digests, tools_digest
from rollwright.tokens.tree import Plan, Trajectory, Turn
from rollwright.tokens.verify import prompt_digest
from rollwright.types import FinishReason, Sampling, TrafficClass, VersionSpan

__all__ = ["Asked", "Flight", "Policy", "TurnMaker", "read_request", "restored_flight"]

_STALL_SECONDS = 600.0
"""How long an engine may abort every try without one new token (a weight update takes minutes at most)."""

_SIGNATURE = "rw"
"""How the signatures we mint begin."""
_PIECE = 1 << 16
"""Characters counted at once."""
_SUSPICIOUS = 8
"""Characters a token: a text with more than that is counted before it is rendered."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What answers every session of a gateway."""

    engine: Engine
    gate: EngineGate
    """To the engine: every call goes through it."""
    renderer: Renderer
    model: str
    threads: anyio.CapacityLimiter
    """For rendering, parsing and logging, which would hold up the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it reached the gateway."""

    dialect: Dialect
    request: Request
    traffic: Traffic
    keys: tuple[str, ...]
    """Digests of its messages."""
    tools_key: str
    digest: str
    """Equal for two requests that ask for the same turn: wire, agent, and the meaning of messages and tools."""
    program: str
    """Digest of what sent it, by its headers."""
    size: int
    """Bytes of its body: it has no more characters."""
    retry: bool = False
    """The client says that it has sent this before."""
    idempotency_key: str = ""

    def as_foreign(self) -> Asked:
        """The same, from something that is not the session's CLI: it shares no turn with it."""
        return replace(self, traffic=FOREIGN, digest=f"{self.program}{self.digest}")


def read_request(
    dialect: Dialect,
    body: bytes,
    headers: Mapping[str, str],
    keys_of: Callable[[Sequence[Message]], tuple[str, ...]] = digests,
) -> Asked:
    """Understand a request. `keys_of`: the digests of its messages. Raises `MalformedRequest`."""
    try:
        request = dialect.parse(as_mapping(loads(body), "body"))
    except ValueError as error:
        raise MalformedRequest(f"body: not usable JSON: {error}", field="body") from error
    traffic = classify(headers, request)
    keys = keys_of(request.messages)
    tools_key = tools_digest(request.tools)
    said = [dialect.name, traffic.agent, tools_key, *keys]
    # Two answers of one text may be two turns: what tells them apart belongs to the request.
    said += [
        f"{position} {(message.reasoning or '').strip()} {sorted(message.carriers)}"
        for position, message in enumerate(request.messages)
        if message.role == "assistant"
    ]
    return Asked(
        dialect=dialect,
        request=request,
        traffic=traffic,
        keys=keys,
        tools_key=tools_key,
        digest=blake2b("\0".join(said).encode(), digest_size=16).hexdigest(),
        program=program_of(headers, dialect.name),
        size=len(body),
        retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        idempotency_key=headers.get("idempotency-key", "")[:200],
    )


class Flight:
    """One turn in the making. Equal requests share it; each of them is a reader."""

    def __init__(self, opening: Opening, idempotency_key: str = "") -> None:
        self.opening = opening
        """Its `prompt_tokens` is 0 until `planned`."""
        self.idempotency_key = idempotency_key
        self.scope = anyio.CancelScope()
        self.planned = anyio.Event()
        """Set when the prompt is known, or with `done`."""
        self.done = anyio.Event()
        self.joined = anyio.Event()
        """Set, and made anew, when a reader comes."""
        self.reply: Reply | None = None
        self.turn: int | None = None
        """Index in the trajectory. Without `reply` it could not be logged, and nobody will get it."""
        self.error: RollwrightError | None = None
        """With `done` set: neither this nor `reply` means that the flight was cancelled."""
        self.readers = 0
        self.receipts: list[Receipt] = []
        """Of the readers that got the whole reply, as far as was known when they left."""
        self.marked: bool | None = None
        """What the log says of its delivery."""

    @property
    def delivered(self) -> bool:
        return any(not receipt.lost for receipt in self.receipts)

    @property
    def settled(self) -> bool:
        """Nothing more will be known of its delivery."""
        return all(receipt.settled for receipt in self.receipts)

    def received(self, receipt: Receipt) -> None:
        """A reader got the whole reply. One that has it for good is enough."""
        kept = [other for other in self.receipts if not other.lost]
        if not any(other.settled for other in kept):
            self.receipts = [*kept, receipt]

    def look(self) -> None:
        """Hear of what became of its replies before the event loop does."""
        for receipt in self.receipts:
            receipt.look()


@dataclass(slots=True)
class _Sampled:
    """What the engine calls of one turn have given so far."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[VersionSpan] = field(default_factory=list[VersionSpan])
    intents: list[int] = field(default_factory=list[int])
    cached_tokens: int = 0
    finish: FinishReason = "stop"

    def take(self, part: Generation, budget: int) -> None:
        """Append one generation. Raises `EngineProtocolError` when it breaks the engine's contract."""
        offset = len(self.ids)
        if len(part.ids) != len(part.logprobs):
            raise EngineProtocolError(f"{len(part.ids)} sampled ids came with {len(part.logprobs)} logprobs")
        if offset + len(part.ids) > budget:
            raise EngineProtocolError(f"{len(part.ids)} ids were sampled where {budget - offset} were asked for")
        self.ids += part.ids
        self.logprobs += part.logprobs
        for span in part.versions:
            last = self.versions[-1] if self.versions else None
            if last is not None and last.version == span.version and last.end == offset + span.start:
                self.versions[-1] = VersionSpan(last.version, last.start, offset + span.end)
            else:
                self.versions.append(VersionSpan(span.version, offset + span.start, offset + span.end))


class TurnMaker:
    """Makes the turns of one session. Several may be in the making at once; the tree changes one at a time."""

    def __init__(
        self,
        *,
        policy: Policy,
        trajectory: Trajectory,
        log: TurnLog | None,
        key: str,
        sampling: Sampling,
        trained: frozenset[TrafficClass],
        intents: int = 0,
    ) -> None:
        """`key` is unique to the session and keeps it on one engine replica. `intents`: how many it has announced."""
        self._policy = policy
        self._trajectory = trajectory
        self._log = log
        self._key = key
        self._sampling = sampling
        self._trained = trained
        self._numbers = itertools.count(intents)
        self._commits = anyio.Lock()
        # One thread each, however much a session asks at once: the threads are those of all sessions.
        self._reading = anyio.Lock(fast_acquire=True)
        self._planning = anyio.Lock(fast_acquire=True)

    async def read(self, dialect: Dialect, unpack: Callable[[], bytes], headers: Mapping[str, str]) -> Asked:
        """See `read_request`. `unpack`: gives the body, from any thread."""
        async with self._reading:
            return await self._thread(
                lambda: read_request(dialect, unpack(), headers, self._trajectory.keys_of),
            )

    def flight(self, asked: Asked) -> Flight:
        """To be filled by `make`."""
        opening = Opening(
            id=asked.dialect.reply_prefix + secrets.token_hex(12),
            model=asked.request.model or self._policy.model,
            created=int(time.time()),
            prompt_tokens=0,
        )
        return Flight(opening, asked.idempotency_key)

    async def make(self, flight: Flight, asked: Asked) -> None:
        """Complete `flight.opening`, then fill `flight.turn` and `flight.reply`; by then the turn is durable.

        Raises what `Engine.generate` and `Renderer.render` raise, `PromptTooLong`, and `StoreError`.
        """
        clock = _Clock()
        async with self._planning:
            plan, intent = await self._thread(partial(self._plan, asked))
        flight.opening = replace(flight.opening, prompt_tokens=len(plan.prompt))
        flight.planned.set()
        clock.lap("planned")
        sampled = await self._sample(plan, intent)
        clock.lap("sampled")
        # From here on the turn exists: whoever leaves now must not undo it.
        with anyio.CancelScope(shield=True):
            async with self._commits:
                await self._thread(partial(self._commit, flight, asked, plan, sampled, clock.seconds))

    async def count(self, asked: Asked) -> int:
        """How many tokens the prompt of this request has. Raises `PromptTooLong` for one that was not even rendered."""
        async with self._planning:
            return len((await self._thread(partial(self._planned, asked))).prompt)

    async def _thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._policy.threads)

    def _plan(self, asked: Asked) -> tuple[Plan, Intent]:
        plan = self._planned(asked)
        maximum = self._policy.engine.capabilities.max_context - 1
        if len(plan.prompt) > maximum:
            raise _too_long(len(plan.prompt), maximum)
        return plan, self._intend(plan, plan.prompt, 0)

    def _planned(self, asked: Asked) -> Plan:
        request = asked.request
        maximum = self._policy.engine.capabilities.max_context - 1
        if asked.size > _SUSPICIOUS * maximum:
            refuse_hopeless(request, self._policy.renderer, maximum)
        look_up = partial(
            self._trajectory.plan,
            request.messages,
            request.tools,
            self._policy.renderer,
            keys=asked.keys,
            tools_key=asked.tools_key,
        )
        plan = look_up()
        kept = plan.drift is not None and plan.drift.cause == "history_kept"
        if kept and len(plan.prompt) >= self._policy.engine.capabilities.max_context:
            # What was kept no longer fits: what the client has made of its history may.
            return look_up(history="exact")
        return plan

    def _intend(self, plan: Plan, prompt: Sequence[int], partial_tokens: int) -> Intent:
        intent = Intent(
            number=next(self._numbers),
            parent=plan.parent,
            prompt_tokens=len(prompt),
            prompt_digest=prompt_digest(prompt),
            partial_tokens=partial_tokens,
            at=round(time.time(), 3),
        )
        if self._log is not None:
            self._log.intent(intent)
        return intent

    async def _ask(self, prompt: Sequence[int], sampling: Sampling, **named: Any) -> Generation:
        """One call of the engine. Raises like it, and `PromptTooLong` (with its error as cause) where that is what it
        says: its context may be smaller than we were told, and the client can do something about it."""
        try:
            return await self._policy.gate.generate(prompt, sampling, **named)
        except EngineRejected as error:
            if not error.details.get("too_long"):
                raise
            told = self._policy.engine.capabilities.max_context - 1
            raise _too_long(len(prompt), min(told, len(prompt) - 1)) from error

    async def _sample(self, plan: Plan, intent: Intent) -> _Sampled:
        """Sample until the turn is whole: what the engine aborts is sent again with what it has said so far."""
        policy = self._policy
        room = policy.engine.capabilities.max_context - len(plan.prompt)
        budget = min(self._sampling.max_new_tokens, room)
        sampled = _Sampled()
        stalled: float | None = None
        delay = 0.01
        prompt: Sequence[int] = plan.prompt
        while True:
            sampled.intents.append(intent.number)
            part = await self._ask(
                prompt,
                replace(
                    self._sampling,
                    max_new_tokens=budget - len(sampled.ids),
                    seed=self._seed_of(intent),
                ),
                stop_ids=policy.renderer.stop_ids,
                # SGLang aborts every id that begins with the named one.
                request_id=f"{self._key}-{intent.number}.",
                session_key=self._key,
            )
            sampled.take(part, budget)
            if intent.partial_tokens == 0:
                sampled.cached_tokens = part.cached_tokens
            ended = bool(sampled.ids) and sampled.ids[-1] in policy.renderer.stop_ids
            if part.finish == "stop" and not ended:
                raise EngineProtocolError("the engine says it stopped, but the last id is no stop id")
            if part.finish == "length" and not sampled.ids:
                raise EngineProtocolError("the engine sampled nothing")
            if ended or part.finish == "length" or len(sampled.ids) >= budget:
                sampled.finish = "stop" if ended else "length"
                return sampled
            if part.ids:
                stalled, delay = None, 0.01
            else:
                now = anyio.current_time()
                stalled = now if stalled is None else stalled
                if now - stalled > _STALL_SECONDS:
                    raise EngineUnreachable(f"the engine aborted every try for {_STALL_SECONDS:.0f} s")
                await anyio.sleep(delay)
                delay = min(2 * delay, 1.0)
            if await policy.gate.passable():
                stalled = None
            prompt = [*plan.prompt, *sampled.ids]
            intent = await self._thread(partial(self._intend, plan, prompt, len(sampled.ids)))

    def _seed_of(self, intent: Intent) -> int | None:
        """Another seed for each call, the same ones for the same session seed."""
        if self._sampling.seed is None:
            return None
        return int.from_bytes(blake2b(f"{self._sampling.seed}/{intent.number}".encode(), digest_size=4).digest()) >> 1

    def _commit(
        self, flight: Flight, asked: Asked, plan: Plan, sampled: _Sampled, seconds: Mapping[str, float]
    ) -> None:
        opening = flight.opening
        parsed = self._policy.renderer.parse(sampled.ids, asked.request.tools)
        message, signature = _minted(parsed, sampled.finish, asked.dialect)
        message = asked.dialect.settle(message, opening, asked.request)
        turn = self._trajectory.commit(
            plan,
            sampled=sampled.ids,
            logprobs=sampled.logprobs,
            finish=sampled.finish,
            versions=sampled.versions,
            reply=message,
            role=asked.traffic.role,
            logprob_kind=self._policy.engine.capabilities.logprob_kind,
            temperature=self._sampling.temperature,
            ill_formed=parsed.ill_formed,
            trained=asked.traffic.kind in self._trained,
            meta={
                "reply": opening.id,
                "dialect": asked.dialect.name,
                "agent": asked.traffic.agent,
                "class": asked.traffic.kind,
                "class_told_by": asked.traffic.told_by,
                "program": asked.program,
                "request": asked.digest,
                "idempotency_key": asked.idempotency_key,
                "asked": dict(asked.request.recorded),
                "sampling": {"top_p": self._sampling.top_p, "top_k": self._sampling.top_k},
                "intents": sampled.intents,
                "cached_tokens": sampled.cached_tokens,
                "seconds": dict(seconds),
                "at": round(time.time(), 3),
            },
        )
        flight.turn = turn.index
        if self._log is not None:
            self._log.turn(turn, asked.request.tools)
        flight.reply = Reply(
            opening=opening,
            message=message,
            signature=signature,
            finish=sampled.finish,
            usage=Usage(
                prompt_tokens=len(plan.prompt),
                sampled_tokens=len(sampled.ids),
                cached_tokens=sampled.cached_tokens,
            ),
        )


def restored_flight(turn: Turn, prompt_tokens: int, model: str) -> Flight:
    """The finished flight of a turn that an earlier process committed: its reply can be sent again."""
    meta = turn.meta
    opening = Opening(
        id=meta["reply"],
        model=meta["asked"].get("model") or model,
        created=int(meta["at"]),
        prompt_tokens=prompt_tokens,
    )
    flight = Flight(opening, meta["idempotency_key"])
    flight.turn = turn.index
    flight.marked = turn.delivered
    if turn.delivered:
        flight.receipts.append(Receipt())
    flight.reply = Reply(
        opening=opening,
        message=turn.reply,
        signature=next((name for name in turn.reply.carriers if name.startswith(_SIGNATURE)), ""),
        finish=turn.finish,
        usage=Usage(prompt_tokens=prompt_tokens, sampled_tokens=len(turn.sampled), cached_tokens=meta["cached_tokens"]),
    )
    flight.planned.set()
    flight.done.set()
    return flight


def refuse_hopeless(request: Request, renderer: Renderer, maximum: int) -> None:
    """Raises `PromptTooLong` for a prompt that is far beyond `maximum` tokens, at the cost of one that is not.

    Its texts are counted until they have twice as many: cut into pieces they have hardly more than as a whole.
    """
    size = sum(map(len, _texts(request)))
    if len(request.messages) > maximum:
        raise _too_long(max(len(request.messages), size // _SUSPICIOUS), maximum)
    if size <= _SUSPICIOUS * maximum:
        return
    tokens = seen = 0
    for text in _texts(request):
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            tokens += len(renderer.encode(piece))
            seen += len(piece)
            if tokens > 2 * maximum:
                raise _too_long(tokens * size // seen, maximum)


def _texts(request: Request) -> Iterator[str]:
    """What every template says of a request."""
    for message in request.messages:
        yield message.content
        for call in message.tool_calls:
            if isinstance(call.arguments, str):
                yield call.arguments
            else:
                yield from _words(call.arguments)
    for tool in request.tools:
        yield tool.description
        yield from _words(tool.parameters)


def _words(value: Mapping[str, Any]) -> Iterator[str]:
    """The texts in a JSON object, its keys among them."""
    for key, item in value.items():
        yield key
        if isinstance(item, str):
            yield item
        else:
            with suppress(ValueError):  # nested beyond what a template writes
                yield dumps(item).decode()


def _too_long(tokens: int, maximum: int) -> PromptTooLong:
    return PromptTooLong(
        f"the prompt has {tokens} tokens, the policy's context takes {maximum}", tokens=tokens, maximum=maximum
    )


class _Clock:
    def __init__(self) -> None:
        self._since = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._since, 4)
        self._since = now


def _minted(parsed: ParsedTurn, finish: FinishReason, dialect: Dialect) -> tuple[Message, str]:
    """The parsed turn as the message the client gets, and the signature of its reasoning.

    Every id is new and random, so it can only come back in an echo of this very turn.
    """
    signature = _SIGNATURE + secrets.token_hex(15)
    calls = tuple(
        replace(
            call,
            id=dialect.call_prefix + secrets.token_hex(12),
            name=scrub_text(call.name),
            arguments=_sendable(call.arguments),
        )
        for call in parsed.tool_calls
        # Arguments that ran out of tokens are no call: a client that repairs them would run half a command.
        if not (finish == "length" and isinstance(call.arguments, str))
    )
    message = Message(
        role="assistant",
        content=scrub_text(parsed.content),
        reasoning=None if parsed.reasoning is None else scrub_text(parsed.reasoning),
        tool_calls=calls,
        carriers=(*((signature,) if parsed.reasoning else ()), *(call.id for call in calls)),
    )
    return message, signature


def _sendable(arguments: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    """Arguments every JSON writer takes."""
    try:
        dumps(arguments)
    except ValueError:
        return "[arguments nested too deeply]"
    return scrub(arguments)
