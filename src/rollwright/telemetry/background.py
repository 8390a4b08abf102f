"""A listener whose work is done in a thread of its own, in order, and whose trouble is told once."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from rollwright.rollout import RolloutPlan
from rollwright.store import RolloutRecord
from rollwright.telemetry import Listener
from rollwright.types import Stage

__all__ = ["BackgroundListener"]

log = logging.getLogger(__name__)

_HAND_OVER_SECONDS = 30.0


class BackgroundListener(Listener, ABC):
    """Give it `begin`, `write` and `end`: they may block and may raise anything. After the first error of `begin` or
    `write` nothing more is written."""

    what: str
    """The system, for the log."""

    def begin(self) -> None:
        """Before the first rollout."""

    @abstractmethod
    def write(self, plan: RolloutPlan, record: RolloutRecord, entered: list[tuple[Stage, float]]) -> None:
        """A rollout was stored. `entered`: when it began (`admitted`) and reached each stage, in seconds since the
        epoch; a rollout that was begun again has the stages of each try."""

    def end(self) -> None:
        """The run is over. Called also after an error of the others, so what `begin` makes may be missing."""

    async def __aenter__(self) -> Self:
        self._stages: dict[str, list[tuple[Stage, float]]] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a system that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"telemetry: {self.what}", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join, _HAND_OVER_SECONDS)
        if self._thread.is_alive():
            log.warning("%s did not take the end of the run in %g s", self.what, _HAND_OVER_SECONDS)

    def preparing(self, what: str) -> None: ...

    def started(self, plan: RolloutPlan) -> None:
        self._stages[plan.name] = [(Stage.ADMITTED, time.time())]

    def entered(self, plan: RolloutPlan, stage: Stage) -> None:
        self._stages.setdefault(plan.name, []).append((stage, time.time()))

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None:
        stages = self._stages.pop(plan.name, [])
        self._jobs.put(lambda: self.write(plan, record, stages))

    def _work(self) -> None:
        well = self._done(self.begin)
        while (job := self._jobs.get()) is not None:
            well = well and self._done(job)
        self._done(self.end)

    def _done(self, job: Callable[[], None]) -> bool:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - another system's trouble is no reason to lose a rollout
            log.warning("%s hears nothing more of this run: %s: %s", self.what, type(error).__name__, error)
            return False
        return True
