"""The calls for the single rollouts of one prompt, gathered into one for their group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from rollwright.errors import InfraError

__all__ = ["Gathered"]

T = TypeVar("T")


class Gathered(Generic[T]):
    """For trainers that ask for each rollout of a prompt by itself, all at once: what one of them may be given depends
    on the others."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Group[T]] = {}

    async def one(self, key: Hashable, make: Callable[[int], Awaitable[Sequence[T]]]) -> T:
        """The result for one of the calls with this `key` that were begun together; `make` is called for the first of
        them, with how many they are, and has as many results.

        The first raises what `make` raises, the others `InfraError`.
        """
        group = self._waiting.setdefault(key, _Group())
        place = group.count
        group.count += 1
        if place == 0:
            try:
                try:
                    await anyio.lowlevel.checkpoint()  # all others of this prompt have joined when we go on
                finally:
                    del self._waiting[key]
                group.results = await make(group.count)
            finally:
                group.done.set()
        await group.done.wait()
        if not group.results:
            raise InfraError("the group of this sample could not be rolled out; its first sample says why")
        return group.results[place]


@dataclass(slots=True)
class _Group(Generic[T]):
    """The calls for the rollouts of one prompt."""

    count: int = 0
    done: anyio.Event = field(default_factory=anyio.Event)
    results: Sequence[T] = ()
