"""Caches of prompts seen lately, so that a session's next turn computes only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollwright.engines.runtime import Cache

__all__ = ["PrefixStore"]


@dataclass(frozen=True, slots=True)
class _Entry:
    session_key: str
    ids: NDArray[np.int64]
    cache: Cache


class PrefixStore:
    """The last used prompts, up to `max_bytes`. Any session's prompt may help another: caches depend on ids alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: list[_Entry] = []
        """Oldest first."""

    @property
    def nbytes(self) -> int:
        return sum(entry.cache.nbytes for entry in self._entries)

    def find(self, session_key: str, ids: Sequence[int]) -> tuple[Cache, int] | None:
        """The cache sharing the longest prefix with `ids` and that prefix's length; None when nothing is shared."""
        wanted = np.asarray(ids)
        best: tuple[int, bool, int] = (0, False, -1)
        for index, entry in enumerate(self._entries):
            shared = _shared(entry.ids, wanted)
            best = max(best, (shared, entry.session_key == session_key, index))
        shared, _, index = best
        if not shared:
            return None
        entry = self._entries.pop(index)
        self._entries.append(entry)
        return entry.cache, shared

    def put(self, session_key: str, ids: Sequence[int], cache: Cache) -> None:
        """Keep `cache` (which holds exactly `ids`; not to be changed any more), forget what it makes needless."""
        own = np.asarray(ids)
        self._entries = [
            entry
            for entry in self._entries
            if entry.session_key != session_key or _shared(entry.ids, own) < len(entry.ids)
        ]
        self._entries.append(_Entry(session_key, own, cache))
        held = self.nbytes
        while held > self._max_bytes:
            held -= self._entries.pop(0).cache.nbytes

    def clear(self) -> None:
        self._entries.clear()


def _shared(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size
