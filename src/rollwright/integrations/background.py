"""An async context that stays open on a thread of its own, for hosts whose event loop is not ours to keep."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from rollwright.concurrency import plain_errors
from rollwright.errors import RollwrightError

__all__ = ["Background"]

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class Background(Generic[T]):
    """Opens a context on a daemon thread with its own event loop, and runs calls there.

    A trainer calls us again and again and has no scope that outlives a call; gateway, sandboxes and engine need one.
    """

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> None:
        """`context` is called, entered and left on the thread, which is called `name`."""
        self._context = context
        self._opened: Future[tuple[BlockingPortal, T]] = Future()
        self._closed: Future[BaseException | None] = Future()
        """By which error it closed, if by one."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Begin to open; `call` waits for it."""
        self._thread.start()

    async def call(self, function: Callable[..., Awaitable[R]], *args: Any) -> R:
        """`await function(opened, *args)` on the thread, from any asyncio loop.

        Cancelled, it returns when the function has ended. Raises what opening raised, what the function raises, and by
        what the context ended if it did so by itself.
        """
        portal, value = await asyncio.shield(asyncio.wrap_future(self._opened))
        ended: Future[None] = Future()

        async def run() -> R:
            try:
                return await function(value, *args)
            finally:
                ended.set_result(None)

        try:
            call = portal.start_task_soon(run)
        except RuntimeError:  # it does not run any more
            await self._raise_what_closed_it()
            raise
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await asyncio.wrap_future(ended)
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # not by our caller
                await self._raise_what_closed_it()
            raise

    async def _raise_what_closed_it(self) -> None:
        error = await asyncio.shield(asyncio.wrap_future(self._closed))
        if error is not None:
            raise error

    def stop(self, seconds: float) -> bool:
        """End every call and leave the context. Whether that was done within `seconds`. Idempotent."""
        if self._thread.is_alive():
            try:
                portal, _ = self._opened.result(seconds)
                portal.start_task_soon(portal.stop, True)
            except (RollwrightError, RuntimeError, TimeoutError):
                pass  # it did not open, or is on its way out
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        closed_by: BaseException | None = None
        try:
            anyio.run(self._serve, backend_options={"use_uvloop": True})
        except BaseException as error:  # the thread's boundary: whoever waits for it is told by what it ended
            closed_by = error
            if not self._opened.done():
                self._opened.set_exception(error)
            else:
                log.exception("%s ended", self._thread.name)
        self._closed.set_result(closed_by)

    async def _serve(self) -> None:
        with plain_errors():
            async with self._context() as value, BlockingPortal() as portal:
                self._opened.set_result((portal, value))
                await portal.sleep_until_stopped()
