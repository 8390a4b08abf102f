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
from rollwright.errors import UsageError
from rollwright.gateway.gate import PauseMode
from rollwright.rollout import RolloutPlan
from rollwright.run.executor import Attempt, Executor
from rollwright.run.observer import Observer
from rollwright.store import group_id
from rollwright.tokens.samples import within_lag
from rollwright.types import Sample, Task

__all__ = ["Group", "GroupState", "Pace", "Rollouts"]

log = logging.getLogger(__name__)

GroupState: TypeAlias = Literal["complete", "partial", "lost"]
"""complete: all attempts were graded. partial: some were. lost: none was."""


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
    """A group with a token more weight versions old than this when the trainer asks for it is rolled out again."""
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
        graded = sum(attempt.record.graded for attempt in self.attempts)
        return "complete" if graded == len(self.attempts) else "partial" if graded else "lost"

    @property
    def samples(self) -> list[Sample]:
        return [sample for attempt in self.attempts for sample in attempt.samples]

    @property
    def versions(self) -> frozenset[str]:
        """The weight versions its tokens came from."""
        return frozenset(version for attempt in self.attempts for version in attempt.record.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A group that is owed."""

    task: str
    epoch: int
    had: tuple[Attempt, ...]
    """Attempts of an earlier process."""
    owed: int
    """Attempts still to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A group on its way to the trainer."""

    wanted: _Wanted
    group: Group
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
        stored: Sequence[Attempt] = (),
        delivered: Collection[str] = (),
    ) -> None:
        """`run`: the run folder's name. `attempts`: the group size.

        `stored`: the attempts of an earlier process of this run; `delivered`: ids of the groups that the trainer has
        had from it. Those are not made again; of the others only what is missing is.
        """
        self.stale = 0
        """Groups that had become too old and were rolled out again."""
        self.cut = 0
        """Rollouts that were cut."""
        self._executor = executor
        self._tasks = tasks
        self._run = run
        self._attempts = attempts
        self._pace = pace
        self._observer = observer
        self._delivered = frozenset(delivered)
        self._had: dict[str, list[Attempt]] = {}
        for attempt in stored:
            self._had.setdefault(attempt.plan.group, []).append(attempt)
        self._numbers = {
            name: itertools.count(1 + max((a.plan.attempt for a in stored if a.plan.task_name == name), default=0))
            for name in tasks
        }
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
            if self._too_old(done.group):
                self.stale += 1
                log.info("group %s is more than %s weight versions old: again", done.group.id, self._pace.max_lag)
                fresh = replace(done.wanted, had=(), owed=self._attempts)
                self._background.start_soon(self._roll_out, fresh, done.sender)
                continue
            self._senders.discard(done.sender)
            done.sender.close()
            self._open.release()
            return done.group

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

    def _too_old(self, group: Group) -> bool:
        if self._pace.max_lag is None:
            return False
        return not group.versions <= within_lag(self._executor.versions, self._pace.max_lag)

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
                    # the newest: what came before them had become too old and was rolled out again
                    stored = sorted(self._had.get(group, ()), key=lambda attempt: attempt.plan.attempt)
                    had = tuple(stored[-self._attempts :])
                    yield _Wanted(task=name, epoch=epoch, had=had, owed=max(0, self._attempts - len(had)))

    async def _roll_out(self, wanted: _Wanted, sender: _Sender) -> None:
        """All attempts of a group, to their ends."""
        made: list[Attempt] = []
        begun, enough, cut = anyio.Event(), anyio.Event(), anyio.Event()
        needed = ceil(self._pace.straggler_share * wanted.owed)

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
                for _ in range(wanted.owed):
                    group.start_soon(attempt)
            watching.cancel_scope.cancel()
        self.cut += sum(a.record.failure is not None and a.record.failure.error == "RolloutCut" for a in made)
        attempts = sorted((*wanted.had, *made), key=lambda a: a.plan.attempt)
        group_done = Group(
            id=group_id(wanted.task, wanted.epoch), task=wanted.task, epoch=wanted.epoch, attempts=tuple(attempts)
        )
        await sender.send(_Done(wanted=wanted, group=group_done, sender=sender))

    def _plan(self, wanted: _Wanted) -> RolloutPlan:
        return RolloutPlan(
            run=self._run,
            task_name=wanted.task,
            task=self._tasks[wanted.task],
            attempt=next(self._numbers[wanted.task]),
            epoch=wanted.epoch,
        )
