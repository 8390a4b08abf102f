"""An endless or finite stream of groups for a trainer: rolled out ahead of it, never too old, each in a typed end.

The trainer pulls; at most `ahead` groups are open or waiting. Weight updates go through `new_weights`, so that no
rollout is lost to them.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal, Self, TypeAlias

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from rollwright.concurrency import plain_errors
from rollwright.errors import RolloutSuperseded, RolloutTooOld, UsageError
from rollwright.gateway.gate import PauseMode
from rollwright.groups import DEFAULT_QUORUM
from rollwright.rollout import RolloutPlan, failure_of
from rollwright.run.executor import Attempt, Executor
from rollwright.run.observer import Observer
from rollwright.store import RolloutRecord, group_id, withdrawn
from rollwright.tokens.samples import within_lag
from rollwright.types import Failure, Sample, Stage, Task

__all__ = ["Group", "GroupState", "Pace", "Rollouts"]

log = logging.getLogger(__name__)

GroupState: TypeAlias = Literal["complete", "partial", "lost", "stale"]
"""complete: all attempts were graded. partial: some were. lost: none was. stale: it was rolled out as often as it may
be, and attempts that were too old even then are out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far ahead of the trainer to run, and how long to wait for whom."""

    epochs: int | None = 1
    """Passes over the tasks; None: without end."""
    shuffle: int | None = None
    """Seed of the order of the tasks in each epoch; None: file order."""
    ahead: int = 8
    """Groups that are open or wait for the trainer, at most: what bounds memory and staleness."""
    max_lag: int | None = None
    """A group with a graded attempt that has a token more weight versions old than this, when the trainer asks for it,
    is rolled out again."""
    max_rolls: int = 3
    """How often a group is rolled out at most. What is too old after the last time is taken out of it, and the group
    comes as it is then: "stale"."""
    proved: bool = False
    """Hand a group out only after a control of its image that came after its last rollout: what it convicts is ungraded
    then. It costs a control for each group. Where none can be run, the group comes all the same. Needs
    `grading.controls`."""
    group_seconds: float | None = None
    """Longest life of a group from its first rollout on; what is not done then is cut."""
    straggler_share: float = 1.0
    """When this share of a group is done, the rest has `straggler_seconds` left; 1.0: stragglers are waited for."""
    straggler_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, good in (
            ("epochs", self.epochs is None or self.epochs >= 1),
            ("ahead", self.ahead >= 1),
            ("max_lag", self.max_lag is None or self.max_lag >= 0),
            ("max_rolls", self.max_rolls >= 1),
            ("group_seconds", self.group_seconds is None or self.group_seconds > 0),
            ("straggler_share", 0 < self.straggler_share <= 1),
            ("straggler_seconds", self.straggler_seconds >= 0),
        ):
            if not good:
                raise UsageError(f"{name} cannot be {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task in one epoch. Each has ended: graded, or ungraded with its failure."""

    id: str
    """The `group_id` of its samples."""
    task: str
    epoch: int
    attempts: tuple[Attempt, ...]

    @property
    def state(self) -> GroupState:
        if _were_taken_out(self.attempts):
            return "stale"
        graded = sum(attempt.record.graded for attempt in self.attempts)
        return "complete" if graded == len(self.attempts) else "partial" if graded else "lost"

    @property
    def samples(self) -> list[Sample]:
        return [sample for attempt in self.attempts for sample in attempt.samples]

    @property
    def versions(self) -> frozenset[str]:
        """The weight versions that the tokens of its graded attempts came from."""
        graded = [attempt.record for attempt in self.attempts if attempt.record.graded]
        return frozenset(version for record in graded for version in record.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A group that is owed."""

    task: str
    epoch: int
    had: tuple[Attempt, ...] = ()
    """Attempts that there are."""
    rolls: int = 1
    """How often it has been rolled out, with this time."""
    proved: bool = False

    @property
    def id(self) -> str:
        return group_id(self.task, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A group on its way to the trainer: all its attempts are there."""

    wanted: _Wanted
    sender: MemoryObjectSendStream[_Done]


_Sender: TypeAlias = MemoryObjectSendStream[_Done]


class Rollouts:
    """Groups in the order in which they are done.

        async with source.running():
            async for group in source:
                ...  # train
                async with source.new_weights("step-7"):
                    ...  # put the weights into the engine

    A bug in a rollout ends the stream and is raised by the context manager.
    """

    def __init__(
        self,
        executor: Executor,
        tasks: Mapping[str, Task],
        *,
        run: str,
        attempts: int,
        pace: Pace,
        observer: Observer,
        quorum: int = DEFAULT_QUORUM,
        stored: Sequence[Attempt] = (),
        held: Collection[str] = (),
        delivered: Collection[str] = (),
    ) -> None:
        """`run`: the run folder's name. `attempts`: the group size. `quorum`: how many of a group must count.

        `stored`: the attempts of an earlier process of this run; `held`: rollouts that it left with their agents
        running, which are made first; `delivered`: ids of the groups that the trainer has had from it. Those are not
        made again; of the others only what is missing is.
        """
        self.stale = 0
        """How often a group had become too old and was rolled out again."""
        self.given_up = 0
        """Groups that were too old the last time, too, so that attempts are out of them."""
        self.cut = 0
        """Rollouts that were cut."""
        self._executor = executor
        self._tasks = tasks
        self._run = run
        self._attempts = attempts
        self._pace = pace
        self._quorum = quorum
        self._observer = observer
        self._delivered = set(delivered)
        self._had: dict[str, list[Attempt]] = {}
        self._rolls: dict[str, int] = {}
        """By group, where it is not the first time."""
        for attempt in sorted(stored, key=lambda attempt: attempt.plan.attempt):
            group = attempt.plan.group
            if attempt.record.superseded:
                self._rolls[group] = max(self._rolls.get(group, 1), 1 + _roll_of(attempt.record))
            else:
                self._had.setdefault(group, []).append(attempt)
        self._taken_back: dict[str, RolloutRecord] = {}
        """By rollout: what a control has taken back before the trainer had it."""
        self._heard = 0
        """So many of the executor's `taken_back` are known here."""
        self._withdrawn: list[RolloutRecord] = []
        names = {attempt.plan.name for attempt in stored}
        self._numbers = {task: _numbers(task, names, held) for task in tasks}
        self._open = anyio.Semaphore(pace.ahead)
        self._send: _Sender
        self._send, self._done = anyio.create_memory_object_stream[_Done](pace.ahead)
        self._senders: set[_Sender] = set()
        """One for each group that the trainer has not had: the stream ends when all are closed."""
        self._background: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Roll out in the background for as long as the body runs."""
        try:
            with plain_errors(), self._send, self._done:
                async with anyio.create_task_group() as background:
                    self._background = background
                    background.start_soon(self._begin_all, background)
                    yield self
                    background.cancel_scope.cancel()
        finally:
            for sender in self._senders:
                sender.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        """The next group that is done. Raises `StopAsyncIteration` after the last one."""
        assert self._background is not None, "the source is not running"
        while True:
            try:
                done = await self._done.receive()
            except anyio.EndOfStream:
                raise StopAsyncIteration from None
            wanted = replace(done.wanted, had=self._as_they_are(done.wanted.had))
            if self._too_old(wanted.had):  # in the background: whoever stops waiting for a group must not lose it
                self._background.start_soon(self._roll_out, wanted, done.sender)
                continue
            self._senders.discard(done.sender)
            done.sender.close()
            self._open.release()
            self._delivered.add(wanted.id)
            return Group(id=wanted.id, task=wanted.task, epoch=wanted.epoch, attempts=wanted.had)

    @property
    def withdrawn(self) -> Sequence[RolloutRecord]:
        """Rollouts whose verdicts a control (`grading.controls`) took back after the trainer had had their groups: they
        should not have been trained. As they are now, in order; of this process."""
        self._hear()
        return self._withdrawn

    @asynccontextmanager
    async def new_weights(self, version: str, mode: PauseMode = "abort") -> AsyncGenerator[None]:
        """No engine call runs in the body, which changes the weights; then all go on under the new `version`.

        Rollouts are not touched: an aborted call is resumed from the tokens it has. If the body fails, or the pause
        (with what `Executor.pause` raises), the engine goes on with what it has, under the old name.
        """
        told: str | None = None
        try:
            await self._executor.pause(mode)
            yield
            told = version
        finally:
            with anyio.CancelScope(shield=True):
                await self._executor.resume(told)

    async def load_weights(self, folder: Path, version: str) -> None:
        """Give the engine the weights in `folder` and call them `version`.

        Raises `ConfigError` for another model, `Unsupported` for an engine that only its trainer can reach.
        """
        async with self.new_weights(version):
            await self._executor.load_weights(folder, version)

    def _too_old(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Those of them that may not be trained any more."""
        if self._pace.max_lag is None:
            return []
        young = within_lag(self._executor.versions, self._pace.max_lag)
        return [
            attempt for attempt in attempts if attempt.record.graded and not young.issuperset(attempt.record.versions)
        ]

    def _hear(self) -> None:
        """Of controls."""
        taken = self._executor.taken_back
        for record in taken[self._heard :]:
            if record.group in self._delivered:
                self._withdrawn.append(record)
            else:
                self._taken_back[record.rollout] = record
        self._heard = len(taken)

    def _as_they_are(self, attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """A control may have taken verdicts back since."""
        self._hear()
        found = [(attempt, self._taken_back.pop(attempt.record.rollout, None)) for attempt in attempts]
        return tuple(
            attempt if record is None else replace(attempt, record=record, samples=()) for attempt, record in found
        )

    async def _begin_all(self, background: TaskGroup) -> None:
        """Begin group after group, as the trainer takes them."""
        with self._send:
            for wanted in self._wanted():
                await self._open.acquire()
                sender = self._send.clone()
                self._senders.add(sender)
                background.start_soon(self._roll_out, wanted, sender)

    def _wanted(self) -> Iterator[_Wanted]:
        epochs = itertools.count(1) if self._pace.epochs is None else range(1, self._pace.epochs + 1)
        for epoch in epochs:
            names = list(self._tasks)
            if self._pace.shuffle is not None:
                random.Random(f"{self._pace.shuffle}/{epoch}").shuffle(names)
            for name in names:
                group = group_id(name, epoch)
                if group not in self._delivered:
                    had = tuple(self._had.pop(group, ()))
                    yield _Wanted(task=name, epoch=epoch, had=had, rolls=self._rolls.get(group, 1))

    async def _roll_out(self, wanted: _Wanted, sender: _Sender) -> None:
        """What is missing of a group, and what of it is too old, to the end."""
        if old := self._too_old(wanted.had):
            if wanted.rolls < self._pace.max_rolls:
                wanted = await self._begin_again(wanted)
            elif len(wanted.had) >= self._attempts:
                wanted = await self._take_out(wanted, old)
        made = await self._make(wanted, self._attempts - len(wanted.had))
        attempts = sorted((*wanted.had, *made), key=lambda attempt: attempt.plan.attempt)
        if self._pace.proved and not wanted.proved:
            graded = [attempt.record.rollout for attempt in attempts if attempt.record.graded]
            async with self._executor.room.place(anyio.Event()):
                await self._executor.prove(attempts[0].plan, graded)
        wanted = replace(wanted, had=tuple(attempts), proved=self._pace.proved)
        await sender.send(_Done(wanted=wanted, sender=sender))

    async def _begin_again(self, wanted: _Wanted) -> _Wanted:
        """All attempts that there are make room for others: durably, before the first of those begins."""
        self.stale += 1
        log.log(
            logging.WARNING if self.stale == 1 else logging.INFO,
            "group %s is more than %s weight versions old and is rolled out again (time %d of at most %d); with fewer "
            "groups `ahead`, stragglers cut or a larger `max_lag` that happens less",
            *(wanted.id, self._pace.max_lag, wanted.rolls + 1, self._pace.max_rolls),
        )
        why = RolloutSuperseded("its group had become too old and was rolled out again", **self._details(wanted))
        await self._withdraw(wanted.had, why)
        return replace(wanted, had=(), rolls=wanted.rolls + 1, proved=False)

    async def _take_out(self, wanted: _Wanted, old: Sequence[Attempt]) -> _Wanted:
        """Attempts that are too old end ungraded."""
        self.given_up += not _were_taken_out(wanted.had)
        log.log(
            logging.WARNING if self.given_up == 1 else logging.INFO,
            "group %s is more than %s weight versions old also after %d times: %d of its %d attempts are out of it; "
            "groups take longer than `max_lag` allows",
            *(wanted.id, self._pace.max_lag, wanted.rolls, len(old), len(wanted.had)),
        )
        why = RolloutTooOld("it was too old when the trainer wanted it", **self._details(wanted))
        failure = await self._withdraw(old, why)
        kept = {attempt.record.rollout for attempt in wanted.had} - {attempt.record.rollout for attempt in old}
        attempts = (
            a if a.record.rollout in kept else replace(a, record=withdrawn(a.record, failure), samples=())
            for a in wanted.had
        )
        return replace(wanted, had=tuple(attempts))

    def _details(self, wanted: _Wanted) -> dict[str, object]:
        return {"max_lag": self._pace.max_lag, "roll": wanted.rolls}

    async def _withdraw(self, attempts: Sequence[Attempt], why: RolloutTooOld) -> Failure:
        failure = failure_of(why, Stage.STORED)
        await self._executor.withdraw({attempt.record.rollout for attempt in attempts}, failure)
        return failure

    async def _make(self, wanted: _Wanted, owed: int) -> list[Attempt]:
        """So many attempts, each to its end."""
        made: list[Attempt] = []
        begun, enough, cut = anyio.Event(), anyio.Event(), anyio.Event()
        needed = ceil(self._pace.straggler_share * owed)

        async def attempt() -> None:
            async with self._executor.room.place(cut):
                begun.set()
                made.append(await self._executor.run(self._plan(wanted), self._observer, cut=cut))
            if len(made) >= needed:
                enough.set()

        async def watch() -> None:
            await begun.wait()
            with anyio.move_on_after(self._pace.group_seconds):
                await enough.wait()
                await anyio.sleep(self._pace.straggler_seconds)
            cut.set()

        async with anyio.create_task_group() as watching:
            watching.start_soon(watch)
            async with anyio.create_task_group() as group:
                for _ in range(owed):
                    group.start_soon(attempt)
            watching.cancel_scope.cancel()
        self.cut += sum(a.record.failure is not None and a.record.failure.error == "RolloutCut" for a in made)
        return made

    def _plan(self, wanted: _Wanted) -> RolloutPlan:
        return RolloutPlan(
            run=self._run,
            task_name=wanted.task,
            task=self._tasks[wanted.task],
            attempt=next(self._numbers[wanted.task]),
            epoch=wanted.epoch,
            quorum=self._quorum,
        )


def _numbers(task: str, stored: Collection[str], held: Collection[str]) -> Iterator[int]:
    """Of the attempts to make: first those whose agents may run, then what is free, from 1 on. An earlier process may
    have stored a later one before an earlier one."""
    named = (name.rpartition(".") for name in held if name not in stored)
    running = sorted(int(number) for name, _, number in named if name == task)
    taken = {*stored, *(f"{task}.{number}" for number in running)}
    return itertools.chain(running, (number for number in itertools.count(1) if f"{task}.{number}" not in taken))


def _were_taken_out(attempts: Sequence[Attempt]) -> bool:
    failures = (attempt.record.failure for attempt in attempts)
    return any(failure is not None and failure.error == RolloutTooOld.__name__ for failure in failures)


def _roll_of(record: RolloutRecord) -> int:
    """Which time its group was rolled out when a superseded rollout was made."""
    roll = record.failure.details.get("roll") if record.failure is not None else None
    return roll if isinstance(roll, int) else 1
