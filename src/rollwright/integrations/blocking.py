"""Groups for a trainer that is not asynchronous: the source runs on a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rollwright.gateway.gate import PauseMode
from rollwright.integrations.record import Rollout
from rollwright.store import RolloutRecord

__all__ = ["BlockingGroups", "Source", "blocking_groups"]


class _Group(Protocol):
    @property
    def attempts(self) -> Sequence[Rollout]: ...


class Source(Protocol):
    """What `rollwright.rollouts` gives."""

    def __aiter__(self) -> AsyncIterator[_Group]: ...

    @property
    def withdrawn(self) -> Sequence[RolloutRecord]: ...

    def new_weights(self, version: str, mode: PauseMode = "abort") -> AbstractAsyncContextManager[None]: ...

    async def load_weights(self, folder: Path, version: str) -> None: ...


@contextmanager
def blocking_groups(source: AbstractAsyncContextManager[Source]) -> Generator[BlockingGroups]:
    """The rollouts of each group of a source, one group at a time, from any thread.

        with blocking_groups(rollwright.rollouts("run.toml", folder="runs/grpo")) as groups:
            for group in groups:
                ...  # train
                with groups.new_weights("step-7"):
                    ...  # put the weights into the engine

    Leaving it ends the source, and an iterator that waits for a group in another thread. Raises what the source raises.
    """
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(source) as opened:
        groups = BlockingGroups(opened, portal)
        try:
            yield groups
        finally:
            groups.end()


class BlockingGroups:
    """What `blocking_groups` gives. Any thread may call it."""

    def __init__(self, source: Source, portal: BlockingPortal) -> None:
        self._source = source
        self._portal = portal
        self._pulling = _Pulling(source)

    def __iter__(self) -> Iterator[Sequence[Rollout]]:
        return self._pulling.groups(self._portal)

    @contextmanager
    def new_weights(self, version: str, mode: PauseMode = "abort") -> Generator[None]:
        """No engine call runs in the body, which changes the weights; then all go on under the new `version`.

        See `Rollouts.new_weights`, and what it raises.
        """
        with self._portal.wrap_async_context_manager(self._source.new_weights(version, mode)):
            yield

    def load_weights(self, folder: Path, version: str) -> None:
        """See `Rollouts.load_weights`, and what it raises."""
        self._portal.call(self._source.load_weights, folder, version)

    @property
    def withdrawn(self) -> Sequence[RolloutRecord]:
        """See `Rollouts.withdrawn`."""
        return self._portal.call(lambda: list(self._source.withdrawn))

    def end(self) -> None:
        """Give no more groups."""
        self._portal.call(self._pulling.end)


class _Pulling:
    """Takes groups from the source, in its event loop, until it is told to end."""

    def __init__(self, source: Source) -> None:
        self._groups = aiter(source)
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
            return await anext(self._groups, None)
        return None

    def end(self) -> None:
        self._ended = True
        if self._waiting is not None:
            self._waiting.cancel()
