"""One rollout's session with the gateway: its secret, its limits, its turns in flight and their retries."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from rollwright.dialects import Dialect, Problem, Reply
from rollwright.errors import EngineRejected, InfraError, LimitError, PromptTooLong, RollwrightError, StoreError
from rollwright.gateway.exchange import Refused
from rollwright.gateway.keys import SessionKey, forget_key
from rollwright.gateway.limits import LimitReason, SessionLimits
from rollwright.gateway.log import LoggedTrajectory, TurnLog
from rollwright.gateway.receipt import Receipt
from rollwright.gateway.turn import Asked, Flight, Policy, TurnMaker, restored_flight
from rollwright.tokens.tree import Trajectory
from rollwright.types import Sampling, TrafficClass

__all__ = ["CLOSED", "LimitReason", "Session", "SessionLimits"]

CLOSED = Problem(kind="closed", message="this session is closed")

_log = logging.getLogger("rollwright.gateway")

_REMEMBERED = 256
"""Finished turns a session can still replay."""
_LINGER_SECONDS = 1.0
"""How long `close` waits for replies that are on their way out."""
_LEAST_SECONDS = 0.1
"""Between two looks at whether a pause is over."""
_REFUSALS = 4
"""So many prompts in a row that are too long for the engine alone are a failure of ours: every CLI gives up before."""
_REJOIN_SECONDS = 1.0
"""How long a turn goes on without a reader: most clients that lose a connection ask again within half a second."""


class Session:
    """Made by `Gateway.open`. Its counters may be read at any time, also after `close`."""

    def __init__(
        self,
        rollout_id: str,
        *,
        key: SessionKey,
        trajectory: Trajectory,
        policy: Policy,
        log: TurnLog | None,
        sampling: Sampling,
        trained: frozenset[TrafficClass],
        one_program: bool,
        group: TaskGroup,
        on_close: Callable[[Session], None],
        past: LoggedTrajectory | None = None,
    ) -> None:
        """`past`: what an earlier process of this session has logged."""
        self.rollout_id = rollout_id
        self.secret = key.secret
        """The API key of the CLI."""
        self.limits = key.limits
        self.limit_reached = anyio.Event()
        """When set, the CLI is to be killed at once: it would only retry."""
        self.limit_reason: LimitReason | None = None
        self.turns = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.errors: Counter[str] = Counter()
        """How many requests failed, by class name of the error; `ClientGone`: the client left before its reply."""
        self.foreign = 0
        """How many requests did not come from the CLI."""
        self.last_error: RollwrightError | None = None
        """The last failure of ours that no turn has followed; None while all is well."""
        self.closed = False
        self._trajectory = trajectory
        self._log = log
        self._policy = policy
        self._group = group
        self._on_close = on_close
        self._maker = TurnMaker(
            policy=policy,
            trajectory=self._trajectory,
            log=log,
            key=key.routing,
            sampling=sampling,
            trained=trained,
            intents=0 if past is None else max(past.intents, default=-1) + 1,
        )
        self._flights: OrderedDict[str, Flight] = OrderedDict()
        """By request digest, the newest of each; in the air, or finished and kept for replay."""
        self._flying: set[Flight] = set()
        self._readers = 0
        self._left = anyio.Event()
        """Set, and made anew, when a reader leaves."""
        self._undelivered: set[int] = set()
        self._unsettled: set[Flight] = set()
        """Whose receipts may still be lost."""
        self._marking = anyio.Lock(fast_acquire=True)
        """Threads would overtake each other, and the last mark of a turn counts."""
        self._failures = 0
        self._refusals = 0
        """How often in a row the engine called a prompt too long that fits by what it said of itself."""
        self._program: str | None = None
        """What asked for the first turn: the CLI, for nothing else runs before it has an answer."""
        self._one_program = one_program
        self._closing = anyio.Event()
        self._sealed = anyio.Event()
        if past is not None:
            self._restore(past)
        if key.limits.seconds is not None:
            group.start_soon(self._expire, max(0.0, key.opened + key.limits.seconds - time.time()))

    async def read(self, dialect: Dialect, unpack: Callable[[], bytes], headers: Mapping[str, str]) -> Asked:
        """Understand a request, when those before it have been. `unpack`: gives its body, from any thread.

        Raises `MalformedRequest`, and what `unpack` does.
        """
        return await self._maker.read(dialect, unpack, headers)

    def join(self, asked: Asked) -> Flight:
        """Become a reader of the turn that answers `asked`; call `leave` in the end.

        That is the turn already in the making for an equal request, or one whose reply no client got whole; an equal
        request after a delivered reply asks for another sample. Raises `LimitError`, and `Refused` once `close` has
        begun: a request may have been read meanwhile.
        """
        self._still_open()
        asked = self._placed(asked)
        flight = self._flights.get(asked.digest)
        if flight is None or not self._answers(flight, asked):
            self._within_limits()
            flight = self._maker.flight(asked)
            self._flights[asked.digest] = flight
            self._flights.move_to_end(asked.digest)
            self._forget()
            self._flying.add(flight)
            self._group.start_soon(self._fly, flight, asked)
        self._readers += 1
        flight.readers += 1
        flight.joined.set()
        return flight

    async def leave(self, flight: Flight, receipt: Receipt | None) -> None:
        """One reader has gone, with a receipt for the whole reply or without it. The last one takes an unfinished turn
        with it."""
        try:
            await self._leave(flight, receipt)
        finally:
            self._readers -= 1
            self._left.set()
            self._left = anyio.Event()

    async def count(self, asked: Asked) -> int:
        """How many tokens the prompt of this request has. Raises `Refused` once `close` has begun."""
        self._still_open()
        return await self._maker.count(asked)

    async def close(self) -> Trajectory:
        """Abort what is in flight, seal the log, and hand over the trajectory. Idempotent.

        Leaves whose reply no client got are marked undelivered. Raises `StoreError` when the log cannot be sealed.
        """
        with anyio.CancelScope(shield=True):
            if not self.closed:
                self.closed = True
                self._closing.set()
                self._on_close(self)
                try:
                    for flight in self._flying:
                        flight.scope.cancel()
                    for flight in list(self._flying):
                        await flight.done.wait()
                    with anyio.move_on_after(_LINGER_SECONDS):
                        while self._readers:
                            await self._left.wait()
                    for flight in list(self._unsettled):
                        flight.look()
                    await anyio.to_thread.run_sync(self._seal, limiter=self._policy.threads)
                finally:
                    self._sealed.set()
            await self._sealed.wait()
        return self._trajectory

    def note(self, error: RollwrightError) -> None:
        """Count a request that failed; remember it when the failure is ours."""
        self.errors[type(error).__name__] += 1
        if isinstance(error, PromptTooLong) and isinstance(error.__cause__, EngineRejected):
            self._refusals += 1
            if self._refusals >= _REFUSALS:
                error = error.__cause__
        if not isinstance(error, InfraError):
            return
        self.last_error = error
        self._failures += 1
        allowed = self.limits.failures
        if not error.retryable or (allowed is not None and self._failures >= allowed):
            self._reach("failures")

    def _restore(self, past: LoggedTrajectory) -> None:
        """Count and remember what an earlier process did, so that its clients can ask again for what they missed."""
        for turn in list(past.trajectory.turns):
            self._program = self._program or turn.meta.get("program")
            prompt_tokens = past.intents[turn.meta["intents"][0]].prompt_tokens
            flight = restored_flight(turn, prompt_tokens, self._policy.model)
            self._flights[turn.meta["request"]] = flight
            self._flights.move_to_end(turn.meta["request"])
            if not flight.delivered:
                # Open again until the seal: its client may still ask for it.
                self._undelivered.add(turn.index)
                self._trajectory.mark_delivered(turn.index)
            assert flight.reply is not None
            self._committed(flight.reply)
        self._forget()

    async def _leave(self, flight: Flight, receipt: Receipt | None) -> None:
        flight.readers -= 1
        if receipt is None and not flight.done.is_set():
            self.errors["ClientGone"] += 1
            if flight.readers == 0:
                await self._await_reader(flight)
        if flight.turn is None:
            return
        if receipt is not None:
            flight.received(receipt)
            self._unsettled = {other for other in (*self._unsettled, flight) if not other.settled}
            receipt.on_loss(partial(self._take_back, flight))
        if flight.delivered:
            self._undelivered.discard(flight.turn)
        if flight.delivered or flight.readers == 0:
            await self._mark(flight)

    def _take_back(self, flight: Flight) -> None:
        """A client turned out not to have the reply that it was sent."""
        if flight.turn is None or flight.delivered or self._sealed.is_set():
            return
        self._undelivered.add(flight.turn)
        if not self.closed:
            self._group.start_soon(self._mark, flight)

    def _placed(self, asked: Asked) -> Asked:
        """A command of the policy can read the CLI's key, but it can hardly be the CLI."""
        if self._program is None:
            self._program = asked.program
        if asked.program == self._program or not self._one_program:
            return asked
        if not self.foreign:
            _log.warning("%s: something that is not its CLI asks with its key", self.rollout_id)
        self.foreign += 1
        return asked.as_foreign()

    def _answers(self, flight: Flight, asked: Asked) -> bool:
        if not flight.done.is_set():
            return not flight.scope.cancel_called
        if flight.reply is None:
            return False
        flight.look()
        key = asked.idempotency_key
        return not flight.delivered or asked.retry or (key != "" and key == flight.idempotency_key)

    def _still_open(self) -> None:
        if self.closed:
            raise Refused(CLOSED)

    def _within_limits(self) -> None:
        limits = self.limits
        if limits.turns is not None and self.turns + len(self._flying) >= limits.turns:
            self._reach("turns")
        if limits.sampled_tokens is not None and self.sampled_tokens >= limits.sampled_tokens:
            self._reach("sampled_tokens")
        if self.limit_reason is not None:
            raise LimitError(f"the session is over: its limit of {self.limit_reason} is reached")

    def _reach(self, reason: LimitReason) -> None:
        if self.limit_reason is None:
            self.limit_reason = reason
            self.limit_reached.set()

    async def _expire(self, seconds: float) -> None:
        """The time for which the trainer holds the engine is not the session's."""
        gate = self._policy.gate
        shut = gate.shut_seconds
        left = seconds
        while left >= 0 and not self.closed:
            with anyio.move_on_after(left):
                await self._closing.wait()
            shut, before = gate.shut_seconds, shut
            left = max(shut - before, _LEAST_SECONDS) if shut > before else -1.0
        if not self.closed:
            self._reach("seconds")

    async def _fly(self, flight: Flight, asked: Asked) -> None:
        try:
            with flight.scope:
                await self._maker.make(flight, asked)
            if flight.reply is not None:
                self._committed(flight.reply)
        except RollwrightError as error:
            flight.error = error
        except Exception as error:  # noqa: BLE001 - a turn's bug must fail this turn, not every session of the process
            _log.exception("a turn of %s failed", self.rollout_id)
            flight.error = InfraError(f"the gateway failed: {type(error).__name__}: {error}")
        finally:
            if flight.error is not None:
                self.note(flight.error)
            if flight.turn is not None:
                self._undelivered.add(flight.turn)
            self._flying.remove(flight)
            flight.done.set()
            flight.planned.set()

    def _committed(self, reply: Reply) -> None:
        usage = reply.usage
        self.turns += 1
        self.prompt_tokens += usage.prompt_tokens
        self.sampled_tokens += usage.sampled_tokens
        self.last_error = None
        self._failures = 0
        self._refusals = 0

    async def _await_reader(self, flight: Flight) -> None:
        flight.joined = anyio.Event()
        with anyio.move_on_after(_REJOIN_SECONDS):
            async with anyio.create_task_group() as group:

                async def until(event: anyio.Event) -> None:
                    await event.wait()
                    group.cancel_scope.cancel()

                group.start_soon(until, flight.joined)
                group.start_soon(until, flight.done)
        if flight.readers == 0 and not flight.done.is_set():
            flight.scope.cancel()
            await flight.done.wait()

    async def _mark(self, flight: Flight) -> None:
        """Have the log say of its delivery what is known now."""
        log, turn = self._log, flight.turn
        if log is None or turn is None:
            return
        async with self._marking:
            delivered = flight.delivered
            if delivered == flight.marked:
                return
            flight.marked = delivered
            try:
                await anyio.to_thread.run_sync(
                    partial(log.delivery, turn, delivered=delivered), limiter=self._policy.threads
                )
            except StoreError as error:
                self.note(error)

    def _forget(self) -> None:
        """Drop the oldest finished flights beyond what is remembered."""
        spare = len(self._flights) - _REMEMBERED
        for digest, flight in list(self._flights.items()) if spare > 0 else ():
            if spare > 0 and flight.done.is_set() and flight.readers == 0:
                del self._flights[digest]
                spare -= 1

    def _seal(self) -> None:
        for index in sorted(self._undelivered):
            self._trajectory.mark_undelivered(index)
        if self._log is not None:
            self._log.seal([turn.index for turn in self._trajectory.turns if not turn.delivered])
            forget_key(self._log.path)
