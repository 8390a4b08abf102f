"""Places for rollouts at a time, whose number may change."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

__all__ = ["Room"]


class Room:
    """Hands out places in the order in which they were asked for."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._waiting: deque[anyio.Event] = deque()

    @property
    def places(self) -> int:
        return self._places

    @property
    def taken(self) -> int:
        return self._taken

    async def acquire(self) -> None:
        """Wait for a place, and take it; `release` gives it back."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._taken < self._places and not self._waiting:
            self._taken += 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self.release()  # it was handed over just then
            else:
                self._waiting.remove(turn)
            raise

    @asynccontextmanager
    async def place(self, cut: anyio.Event) -> AsyncGenerator[None]:
        """A place for as long as the body runs. What is cut already only has its end recorded, and needs none."""

        async def stop_waiting() -> None:
            await cut.wait()
            waiting.cancel_scope.cancel()

        held = False
        try:
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(stop_waiting)
                await self.acquire()
                held = True
                waiting.cancel_scope.cancel()
            yield
        finally:
            if held:
                self.release()

    def release(self) -> None:
        self._taken -= 1
        self._hand_out()

    def resize(self, places: int) -> None:
        """Fewer places take nobody's away: they are missing when they come back."""
        self._places = places
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._taken < self._places:
            self._taken += 1
            self._waiting.popleft().set()
