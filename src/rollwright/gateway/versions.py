"""In what order an engine had its weights, over all processes of a run or a gateway."""

from __future__ import annotations

import os
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from rollwright.dialects.jsonio import dumps, loads
from rollwright.errors import StoreError
from rollwright.types import SCHEMA

__all__ = ["WeightOrder", "merged_order", "read_order", "write_order"]


class WeightOrder:
    """Weight versions from the oldest to the newest.

    Those of earlier processes come first, unless the engine has them again: it may have gone back to a checkpoint.
    """

    def __init__(self, earlier: Sequence[str] = ()) -> None:
        """`earlier`: what `versions` was in the process before this one."""
        self._earlier = list(dict.fromkeys(earlier))
        self._now: list[str] = []

    @property
    def versions(self) -> list[str]:
        return [*(version for version in self._earlier if version not in self._now), *self._now]

    def given(self, version: str) -> None:
        """The engine has these weights from now on."""
        if version in self._now:
            self._now.remove(version)
        self._now.append(version)

    def seen(self, version: str) -> bool:
        """The engine sampled with these weights; whether that is new. Where it has copies that are updated one by one,
        that says nothing against a newer one."""
        if version in self._now:
            return False
        place = len(self._now)
        if version in self._earlier:
            newer = self._earlier[self._earlier.index(version) :]
            place = next((at for at, other in enumerate(self._now) if other in newer), place)
        self._now.insert(place, version)
        return True

    def heard(self, order: Sequence[str]) -> None:
        """What another process knows of the same engine, from the oldest to the newest. What was new to us comes before
        what is newer there, and else after what is older there; what we knew stays as it is."""
        known = set(self._now)
        for place, version in enumerate(order):
            if version in known:
                continue
            newer = known.intersection(order[place + 1 :])
            older = next((other for other in reversed(order[:place]) if other in known), None)
            if newer:
                self._now.insert(min(map(self._now.index, newer)), version)
            elif older is not None:
                self._now.insert(self._now.index(older) + 1, version)
            else:
                self.seen(version)
            known.add(version)


def merged_order(orders: Sequence[Sequence[str]]) -> list[str]:
    """One order of what several processes know, each maybe only in part. Where they contradict each other, the first
    one's, and what it does not know after it."""
    sorter = TopologicalSorter[str]()
    for order in orders:
        for version in order:
            sorter.add(version)
        for older, newer in pairwise(order):
            sorter.add(newer, older)
    try:
        return list(sorter.static_order())
    except CycleError:
        return list(dict.fromkeys(version for order in orders for version in order))


def read_order(path: Path) -> list[str]:
    """What `write_order` wrote; empty before that. Raises `StoreError`."""
    try:
        return [str(version) for version in loads(path.read_bytes())["versions"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
    except (ValueError, LookupError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}", path=str(path)) from error


def write_order(path: Path, versions: Sequence[str]) -> None:
    """The whole file or the old one, on the disk. Raises `StoreError`."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(dumps({"schema": SCHEMA, "versions": list(versions)}))
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}", path=str(path)) from error
