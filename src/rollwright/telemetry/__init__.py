"""Telemetry: what other systems hear of a run. One system a file; this is the contract, and how several listen.

A listener may be slow or fail: what it does is done in the background, and no rollout waits for it or is lost by it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rollwright import plugins
from rollwright.config import RunConfig
from rollwright.rollout import RolloutPlan
from rollwright.run import Observer
from rollwright.store import RolloutRecord, RunDir
from rollwright.types import Stage

__all__ = ["Listener", "listeners_of", "listening", "make_listeners"]


class Listener(Observer, Protocol):
    """An `Observer` that holds something open. Options of the run file's `[telemetry.NAME]` table reach the constructor
    as keywords, beside `run`, the run folder, if it names that. Constructor errors are `ConfigError`.

    It is an async context manager, entered when the run folder is there. Leaving it hands over what is still under way,
    within some seconds. Neither raises for trouble with the other system: that is logged, once.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_listeners(
    kinds: Sequence[str], options: Mapping[str, Mapping[str, Any]], *, run: RunDir, base: Path
) -> list[Listener]:
    """The listeners of a run. Raises `UsageError`: an unknown name, a wrong option, an extra that is not installed."""
    return [
        plugins.make("telemetry", kind, options.get(kind, {}), table=f"telemetry.{kind}", base=base, run=run)
        for kind in kinds
    ]


def listeners_of(config: RunConfig, run: RunDir) -> list[Listener]:
    """The listeners that a run file asks for, not yet open. Raises as `make_listeners`."""
    return make_listeners(config.telemetry.kinds, config.telemetry.options, run=run, base=config.base)


@asynccontextmanager
async def listening(first: Observer, listeners: Sequence[Listener]) -> AsyncGenerator[Observer]:
    """One observer for `first` and every listener; the listeners are open meanwhile."""
    async with AsyncExitStack() as stack:
        yield _All([first, *[await stack.enter_async_context(listener) for listener in listeners]])


class _All(Observer):
    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def preparing(self, what: str) -> None:
        for observer in self._observers:
            observer.preparing(what)

    def started(self, plan: RolloutPlan) -> None:
        for observer in self._observers:
            observer.started(plan)

    def entered(self, plan: RolloutPlan, stage: Stage) -> None:
        for observer in self._observers:
            observer.entered(plan, stage)

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None:
        for observer in self._observers:
            observer.stored(plan, record)
