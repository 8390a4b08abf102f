"""In what order an engine had its weights, over all processes of a run."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["WeightOrder"]


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

    def seen(self, version: str) -> None:
        """The engine sampled with these weights. Where it has copies that are updated one by one, that says nothing
        against a newer one."""
        if version in self._now:
            return
        place = len(self._now)
        if version in self._earlier:
            newer = self._earlier[self._earlier.index(version) :]
            place = next((at for at, other in enumerate(self._now) if other in newer), place)
        self._now.insert(place, version)
