"""The one way to the engine: where all calls are held while the trainer updates the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from rollwright.concurrency import plain_errors
from rollwright.engines import Engine, Generation
from rollwright.errors import UsageError
from rollwright.gateway.versions import WeightOrder, write_order
from rollwright.types import Sampling

__all__ = ["EngineGate", "PauseMode"]

PauseMode = Literal["abort", "finish", "keep"]
"""What becomes of calls that run when a pause begins. abort: they return what they have and go on after it.
finish: the pause begins when they have ended. keep: they go on over the update; the engine tells the versions."""

_AGAIN_SECONDS = 0.5
"""An abort that overtakes its own request is lost, so it is sent until the call has returned."""


class EngineGate:
    """Counts the calls that run, and lets none through while it is shut."""

    def __init__(self, engine: Engine, weights: Path | None = None) -> None:
        """`weights`: where the order of the weight versions is kept, for the next process."""
        self.order = WeightOrder()
        self._engine = engine
        self._weights = weights
        self._changes = 0
        """Of the order, ever."""
        self._written = 0
        """How many of them."""
        self._writing = anyio.Lock()
        self._running: set[str] = set()
        self._left = anyio.Event()
        """Set, and made anew, when a call has returned or the gate opens."""
        self._opened: anyio.Event | None = None
        """While shut: set when it opens."""
        self._shut_at = 0.0
        self._was_shut = 0.0

    @property
    def shut_seconds(self) -> float:
        """How long it has been shut in all."""
        return self._was_shut + (anyio.current_time() - self._shut_at if self.shut else 0.0)

    @property
    def shut(self) -> bool:
        return self._opened is not None

    async def passable(self) -> bool:
        """Wait while shut; whether that was so."""
        waited = False
        while self._opened is not None:
            waited = True
            await self._opened.wait()
        return waited

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        session_key: str,
    ) -> Generation:
        """`Engine.generate`, once the gate is open. Raises `StoreError` when new weights cannot be noted."""
        await self.passable()
        self._running.add(request_id)
        try:
            part = await self._engine.generate(
                ids, sampling, stop_ids=stop_ids, request_id=request_id, session_key=session_key
            )
        finally:
            self._running.discard(request_id)
            self._left.set()
            self._left = anyio.Event()
        for span in part.versions:
            self._changes += self.order.seen(span.version)
        # Before a token of new weights is: whoever reads it later must be able to tell how old it is.
        await self.store_order()
        return part

    def given(self, version: str) -> None:
        """The engine has these weights from now on."""
        self.order.given(version)
        self._changes += 1

    async def store_order(self) -> None:
        """Write down the order of the weight versions, where that is wanted and it has changed. Raises `StoreError`."""
        while self._weights is not None and self._written < self._changes:
            async with self._writing:
                changes = self._changes
                if self._written < changes:
                    await anyio.to_thread.run_sync(write_order, self._weights, self.order.versions)
                    self._written = changes

    async def shut_for(self, mode: PauseMode) -> None:
        """Let nothing new through. Returns when no call runs; with `keep`, at once.

        Raises what `Engine.abort` raises, and `UsageError` when it is opened before that.
        """
        if self._opened is None:
            self._opened = anyio.Event()
            self._shut_at = anyio.current_time()
        opened = self._opened
        while mode != "keep" and self._running and not opened.is_set():
            if mode == "abort":
                with plain_errors():
                    async with anyio.create_task_group() as group:
                        for request_id in self._running:
                            group.start_soon(self._engine.abort, request_id)
            with anyio.move_on_after(_AGAIN_SECONDS):
                while self._running and not opened.is_set():
                    await self._left.wait()
        if opened.is_set():
            raise UsageError("there was a resume before the pause had begun: calls are running")

    def open(self) -> None:
        """Let everything through again."""
        if self._opened is not None:
            self._was_shut = self.shut_seconds
            self._opened.set()
            self._opened = None
            self._left.set()
            self._left = anyio.Event()
