"""Groups for a trainer that is not asynchronous: the source runs on a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rollwright.integrations.record import Rollout

__all__ = ["blocking_groups"]


class _Group(Protocol):
    @property
    def attempts(self) -> Sequence[Rollout]: ...


@contextmanager
def blocking_groups(
    source: AbstractAsyncContextManager[AsyncIterator[_Group]],
) -> Generator[Iterator[Sequence[Rollout]]]:
    """The rollouts of each group of a source, one group at a time, from any thread.

        with blocking_groups(rollwright.rollouts("run.toml", folder="runs/grpo")) as groups:
            for group in groups: ...

    Leaving it ends the source, and an iterator that waits for a group in another thread. Raises what the source raises.
    """
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(source) as opened:
        pulling = _Pulling(opened)
        try:
            yield pulling.groups(portal)
        finally:
            portal.call(pulling.end)


class _Pulling:
    """Takes groups from the source, in its event loop, until it is told to end."""

    def __init__(self, source: AsyncIterator[_Group]) -> None:
        self._source = source
        self._waiting: anyio.CancelScope | None = None
        self._ended = False

    def groups(self, portal: BlockingPortal) -> Iterator[Sequence[Rollout]]:
        while not self._ended:
            try:
                group = portal.call(self._next)
            except RuntimeError:
                if self._ended:  # the portal was closed since we looked
                    return
                raise
            if group is None:
                return
            yield group.attempts

    async def _next(self) -> _Group | None:
        if self._ended:
            return None
        with anyio.CancelScope() as self._waiting:
            return await anext(self._source, None)
        return None

    def end(self) -> None:
        self._ended = True
        if self._waiting is not None:
            self._waiting.cancel()
