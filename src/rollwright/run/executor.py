"""Where the rollouts of a run happen: the contract, and the variant that runs them in this process."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from rollwright.engines import UpdatesWeights
from rollwright.errors import Unsupported, UsageError
from rollwright.gateway.gate import PauseMode
from rollwright.rollout import Finished, Held, RolloutPlan, Toolbox, failure_of, not_started, run_rollout
from rollwright.run.controls import control_of
from rollwright.run.observer import Observer, current_rollout
from rollwright.run.room import Room
from rollwright.sandboxes.retry import Counts, Tally
from rollwright.store import RolloutDir, RolloutRecord, withdrawn
from rollwright.types import Failure, Sample, Stage

log = logging.getLogger(__name__)

_TAKING_UP = frozenset({Stage.BOOTED, Stage.PREPARED, Stage.AGENT_RUNNING})
"""What fails before these stages of a rollout that is gone on with says only that it cannot be: its box is in use, its
log is sealed already, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One rollout that is stored."""

    plan: RolloutPlan
    record: RolloutRecord
    samples: Sequence[Sample]
    """Empty when it is ungraded."""


class Store(Protocol):
    """Where finished rollouts go. `RunWriter` is one."""

    def held(self, name: str) -> tuple[RolloutDir, Mapping[str, Any]] | None:
        """A rollout whose agent an earlier process left running. Raises `StoreError`."""
        ...

    def begin(self, name: str) -> RolloutDir:
        """An empty folder for a rollout in flight. Raises `StoreError`."""
        ...

    def store(self, record: RolloutRecord, folder: RolloutDir, samples: list[Sample]) -> None:
        """Make a finished rollout durable. Raises `StoreError`."""
        ...

    def withdraw(self, names: Collection[str], failure: Failure) -> Sequence[RolloutRecord]:
        """Stored rollouts end as `failure` instead. Returns the records that are others now. Raises `StoreError`."""
        ...

    def versions(self) -> Sequence[str]:
        """The weight versions of earlier processes, in order. Raises `StoreError`."""
        ...

    def store_versions(self, versions: Sequence[str]) -> None:
        """Raises `StoreError`."""
        ...

    def infra(self) -> Mapping[str, Any]:
        """What earlier processes bore with in this run; empty: nothing."""
        ...

    def store_infra(self, borne: Mapping[str, Any]) -> None:
        """Raises `StoreError`."""
        ...


class Executor(Protocol):
    """Runs one rollout to its end, begun again where that may help, and stores it."""

    room: Room
    """How many rollouts it takes at a time. Whoever calls `run` holds a place."""

    async def run(self, plan: RolloutPlan, observer: Observer, *, cut: anyio.Event | None = None) -> Attempt:
        """`cut`: when it is set, the rollout is ended and stored as ungraded. A rollout of a quarantined image
        (`grading.controls`) is not begun; one that was graded in it is withdrawn, in the run folder at least.

        Cancelling the call cleans up (boxes closed, nothing stored), unless the rollout is already being stored. Our
        own failures are in the record; raises `StoreError`, and what is a bug.
        """
        ...

    async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> None:
        """A control of the plan's image, where rollouts were graded in it since its last good one. `earlier`: stored
        ones to prove, whoever graded them; those of another process are proved by this control only. What it convicts
        is withdrawn, and in `taken_back` when this returns. Without `grading.controls`, and where no control can be
        run, nothing happens. Raises `StoreError`."""
        ...

    async def withdraw(self, names: Collection[str], failure: Failure) -> None:
        """Stored rollouts end as `failure` instead. Durable when it returns. Raises `StoreError`."""
        ...

    @property
    def taken_back(self) -> Sequence[RolloutRecord]:
        """Stored rollouts whose verdicts a control took back, as they are now, in order."""
        ...

    @property
    def versions(self) -> Sequence[str]:
        """The engine's weight versions from the oldest to the newest, those of earlier processes of this run too. A
        rollout is stored only after the versions it was sampled with."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Let no engine call begin until `resume`; returns when none runs (with `keep`, at once).

        Raises what `Engine.abort` raises; the pause stays in force.
        """
        ...

    async def resume(self, version: str | None) -> None:
        """Go on after `pause`. `version`: what the engine calls its new weights."""
        ...

    async def load_weights(self, folder: Path, version: str) -> None:
        """`UpdatesWeights.load_weights` of the engine. Raises `Unsupported` when it is none."""
        ...


class LocalExecutor:
    """Rollouts in this process, on its toolbox."""

    def __init__(self, tools: Toolbox, store: Store) -> None:
        self.room = Room(tools.config.run.concurrency)
        self._tools = tools
        self._store = store
        self._controls = control_of(tools)
        self._taken_back: list[RolloutRecord] = []
        before = store.infra()
        self._earlier = Tally.from_json(before) if before else Tally()
        """What the processes counted that worked on this run before."""
        self._stored_versions = list(store.versions())
        tools.gateway.know(self._stored_versions)
        self._storing = anyio.Lock()
        """One writer; storing must not block the event loop."""

    async def run(self, plan: RolloutPlan, observer: Observer, *, cut: anyio.Event | None = None) -> Attempt:
        token = current_rollout.set(plan.name)
        try:
            observer.started(plan)
            finished = await self._with_retries(plan, observer, cut)
            with anyio.CancelScope(shield=True):  # a finished rollout is not lost to a Ctrl-C that comes now
                async with self._storing:
                    await self._store_versions()
                    await anyio.to_thread.run_sync(
                        self._store.store, finished.record, finished.folder, finished.samples
                    )
                    if isinstance(self._tools.provider, Counts):
                        borne = self._earlier + self._tools.provider.tally()
                        await anyio.to_thread.run_sync(self._store.store_infra, borne.to_json())
            observer.entered(plan, Stage.STORED)
            attempt = Attempt(plan=plan, record=finished.record, samples=finished.samples)
            attempt = await self._after_control(attempt)
            observer.stored(plan, attempt.record)
        finally:
            current_rollout.reset(token)
        return attempt

    async def _after_control(self, attempt: Attempt) -> Attempt:
        """The attempt, or what is left of it when its image turns out to be broken."""
        suspects = await self._controls.ended(attempt.plan, attempt.record)
        failure = await self._take_back(attempt.plan, suspects)
        if failure is None or attempt.plan.name not in suspects:
            return attempt
        return replace(attempt, record=withdrawn(attempt.record, failure), samples=())

    async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> None:
        await self._take_back(plan, await self._controls.prove(plan, earlier))

    async def _take_back(self, plan: RolloutPlan, suspects: Collection[str]) -> Failure | None:
        """What a control of the plan's image convicted ends as the failure that is returned."""
        broken = self._controls.quarantined(plan)
        if broken is None or not suspects:
            return None
        failure = failure_of(broken, Stage.GRADED)
        with anyio.CancelScope(shield=True):
            async with self._storing:
                self._taken_back += await anyio.to_thread.run_sync(self._store.withdraw, suspects, failure)
        return failure

    async def withdraw(self, names: Collection[str], failure: Failure) -> None:
        with anyio.CancelScope(shield=True):
            async with self._storing:
                await anyio.to_thread.run_sync(self._store.withdraw, names, failure)

    @property
    def taken_back(self) -> Sequence[RolloutRecord]:
        return self._taken_back

    async def _store_versions(self) -> None:
        versions = list(self._tools.gateway.versions)
        if versions != self._stored_versions:
            await anyio.to_thread.run_sync(self._store.store_versions, versions)
            self._stored_versions = versions

    @property
    def versions(self) -> Sequence[str]:
        return self._tools.gateway.versions

    async def pause(self, mode: PauseMode) -> None:
        await self._tools.gateway.pause(mode)

    async def resume(self, version: str | None) -> None:
        self._tools.gateway.resume(version)
        with anyio.CancelScope(shield=True):
            async with self._storing:
                await self._store_versions()

    async def load_weights(self, folder: Path, version: str) -> None:
        engine = self._tools.engine
        if not isinstance(engine, UpdatesWeights):
            raise Unsupported(f"engine {engine.capabilities.name} is given its weights by the trainer, not by us")
        await engine.load_weights(folder, version)

    async def _with_retries(self, plan: RolloutPlan, observer: Observer, cut: anyio.Event | None) -> Finished:
        """Begin again, in new sandboxes and a new session, while the failure is ours and may pass."""
        broken = self._controls.quarantined(plan)
        if broken is not None:
            return not_started(plan, self._store.begin(plan.name), broken)
        taken_up = await self._take_up(plan, observer, cut)
        if isinstance(taken_up, Finished):
            return taken_up
        plan = taken_up
        last = 1 + self._tools.config.run.retries
        for tries in range(1, last + 1):
            finished = await run_rollout(
                plan,
                self._tools,
                self._store.begin(plan.name),
                entered=lambda stage: observer.entered(plan, stage),
                tries=tries,
                cut=cut,
            )
            failure = finished.record.failure
            if failure is None or not failure.retryable or tries == last:
                return finished
            log.warning("try %d of %d failed: %s: %s", tries, last, failure.error, failure.message)
        raise AssertionError("unreachable")

    async def _take_up(self, plan: RolloutPlan, observer: Observer, cut: anyio.Event | None) -> Finished | RolloutPlan:
        """Go on with what an earlier process left running; where that does not work, the plan that begins anew."""
        left = self._store.held(plan.name) if self._tools.capabilities.attach else None
        if left is None:
            return plan
        folder, data = left
        try:
            held = Held.from_json(data)
        except UsageError as error:
            log.warning("%s is begun again: %s", plan.name, error.message)
            return plan
        finished = await run_rollout(
            replace(plan, lease=held.lease),
            self._tools,
            folder,
            entered=lambda stage: observer.entered(plan, stage),
            tries=held.tries,
            cut=cut,
            held=held,
        )
        failure = finished.record.failure
        if failure is None or not (failure.retryable or failure.stage in _TAKING_UP):
            return finished
        log.warning("what an earlier process left is begun again: %s: %s", failure.error, failure.message)
        return replace(plan, lease=held.lease + 1)
