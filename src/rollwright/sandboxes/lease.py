"""How long a box is to live, and how much of that its backend has been asked for. Pure: it is told the time."""

from __future__ import annotations

from rollwright.errors import ConfigError

__all__ = ["Lease", "checked_survive"]

_NOT_WORTH_IT = 1.0
"""So many seconds more are no reason for a request."""


class Lease:
    """The life of one box, by any clock whose seconds are given in.

    `longest`: what the backend gives at a time, at most. `survive`: seconds that the box is to outlive a process that
    dies. Then it is given little more than that at a time, for as long as it is used.
    """

    def __init__(self, lifetime: float, *, now: float, survive: float = 0, longest: float | None = None) -> None:
        self._survive = survive
        self._longest = longest
        self._wanted = now + lifetime
        self._until = now + self.amount(now)

    @property
    def until(self) -> float:
        """When the box ends if nothing more is asked for."""
        return self._until

    def renew(self, lifetime: float, *, now: float) -> None:
        """The box is to live that long from now on; `amount` says what to ask for first."""
        self._wanted = now + lifetime

    def amount(self, now: float, busy: float = 0) -> float:
        """Seconds to ask the backend for, so that something that may take `busy` of them fits in."""
        seconds = self._wanted - now
        if self._survive:
            seconds = min(seconds, 2 * self._survive + busy)
        if self._longest is not None:
            seconds = min(seconds, self._longest)
        return max(0.0, seconds)

    def due(self, now: float, busy: float = 0) -> bool:
        """Whether to ask for more before something that may take `busy` seconds, after which the process may die."""
        if self._wanted - self._until < _NOT_WORTH_IT:
            return False
        left = self._until - now
        if self._longest is not None and left >= self._longest / 2:
            return False
        return not self._survive or left < self._survive + busy

    def given(self, seconds: float, *, now: float) -> None:
        """The backend was asked for that many seconds, and gave them."""
        self._until = now + seconds


def checked_survive(seconds: float, *, field: str) -> float:
    """Raises `ConfigError` for what no time is."""
    if seconds < 0:
        raise ConfigError(f"{field} cannot be negative", field=field)
    return seconds
