"""Doing it again: which failed operations of a backend may be repeated, when, and for how long.

A backend turns whatever its SDK raises into our error tree; here only that tree decides.

    error                        SAFE operation      UNSAFE operation
    Transient                    again               again only if it was surely not carried out
    AmbiguousOutcome             again               raised
    any other                    raised              raised

Surely not carried out: `RateLimited`, or `details["sent"] is False`. An error that the backend did not know is an
`AmbiguousOutcome` whose `details["unclassified"]` names its type; it is counted under that name and logged, so that a
missed type shows.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeVar, runtime_checkable

import anyio

from rollwright.errors import AmbiguousOutcome, RateLimited, RollwrightError, Transient, Unreachable

__all__ = ["Breaker", "Counts", "Retries", "Safety", "Tally"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_PAUSES = 64
"""Where the doubling of the pause stops being counted; it is long at its ceiling by then."""
_UNCLASSIFIED = "unclassified "


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What failed and was borne with, for the summary of a run. Two of them add up."""

    failures: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """How often each operation failed in which way: (operation, class of the error) to a number."""
    outages: int = 0
    """How often a backend was found to be down, and asked by one caller at a time only."""
    down: bool = False
    """Whether it is now."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            failures=dict(Counter(self.failures) + Counter(other.failures)),
            outages=self.outages + other.outages,
            down=self.down or other.down,
        )

    @property
    def unclassified(self) -> dict[str, int]:
        """Types of errors that a backend does not know: each a gap in it."""
        found: Counter[str] = Counter()
        for (_, kind), count in self.failures.items():
            if kind.startswith(_UNCLASSIFIED):
                found[kind.removeprefix(_UNCLASSIFIED)] += count
        return dict(found)

    def to_json(self) -> dict[str, Any]:
        failures = sorted(self.failures.items(), key=lambda item: (-item[1], item[0]))
        return {
            "failures": [{"operation": what, "error": kind, "count": count} for (what, kind), count in failures],
            "unclassified": self.unclassified,
            "outages": self.outages,
            "down": self.down,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Tally:
        """Raises `LookupError`, `TypeError` for what `to_json` did not make."""
        return Tally(
            failures={(each["operation"], each["error"]): each["count"] for each in data["failures"]},
            outages=data["outages"],
            down=data["down"],
        )


@runtime_checkable
class Counts(Protocol):
    """A provider that counts what fails."""

    def tally(self) -> Tally:
        """Since it was made."""
        ...


class Safety(Enum):
    """What an operation's author promises."""

    SAFE = "safe"
    """Carrying it out twice does what once does: reading, asking, starting by id, putting the same content, killing."""
    UNSAFE = "unsafe"
    """It may be carried out once at the most."""


class Breaker:
    """Keeps callers from a backend that is down: after a run of failures one at a time may try.

    It opens after `failures` in a row that lie at least `seconds` apart from first to last: a cut that fails every
    open request at once is no outage. `first_pause` is the time between two tries while open; it doubles up to
    `longest_pause`. The first success closes it.
    """

    def __init__(
        self, *, failures: int = 10, seconds: float = 3.0, first_pause: float = 0.5, longest_pause: float = 8.0
    ) -> None:
        self._failures = failures
        self._seconds = seconds
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._in_a_row = 0
        self._since = 0.0
        self._pause = 0.0
        self._next_try = 0.0
        self.openings = 0
        """How often it opened."""

    @property
    def open(self) -> bool:
        return self._pause > 0

    def wait(self, now: float) -> float:
        """Seconds until the caller may ask again; 0: it may go now, and while open it is the one that tries."""
        if not self.open:
            return 0.0
        if now < self._next_try:
            return self._next_try - now
        self._next_try = now + self._pause
        return 0.0

    def succeeded(self) -> None:
        self._in_a_row = 0
        self._pause = 0.0

    def failed(self, now: float) -> None:
        """The backend gave no answer, or refused to."""
        if self._in_a_row == 0:
            self._since = now
        self._in_a_row += 1
        if self.open:
            self._pause = min(self._longest_pause, self._pause * 2)
        elif self._in_a_row >= self._failures and now - self._since >= self._seconds:
            self._pause = self._first_pause
            self.openings += 1
        self._next_try = now + self._pause


class Retries:
    """The operations of one backend. `counts` is for the summary of a run.

    `patience`: seconds between an operation's first failure and the last moment that another try may begin.
    The pauses in between are random up to a ceiling that doubles (full jitter), and never shorter than the
    `details["retry_after"]` of the error. `counts`: where to count, for several that are told of as one. `clock`,
    `sleep` and `uniform` are there for tests.
    """

    def __init__(
        self,
        backend: str,
        *,
        patience: float = 60.0,
        breaker: Breaker | None = None,
        counts: Counter[tuple[str, str]] | None = None,
        clock: Callable[[], float] = anyio.current_time,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._backend = backend
        self._patience = patience
        self._breaker = breaker or Breaker()
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._counts: Counter[tuple[str, str]] = Counter() if counts is None else counts

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """How often each operation failed in which way: (operation, class of the error) to a number."""
        return self._counts

    def tally(self) -> Tally:
        """The counts and the breaker's state, for the summary of a run."""
        return Tally(failures=dict(self._counts), outages=self._breaker.openings, down=self._breaker.open)

    async def call(self, operation: str, attempt: Callable[[], Awaitable[T]], safety: Safety) -> T:
        """Carry an operation out, and again while that may help. Raises the last error."""
        deadline: float | None = None
        failures = 0
        while True:
            deadline = await self._admitted(operation, deadline)
            try:
                result = await attempt()
            except RollwrightError as error:
                now = self._clock()
                self._note(operation, error, now)
                if deadline is None:
                    deadline = now + self._patience
                pause = self._pause(error, failures)
                if not _repeatable(error, safety) or now + pause > deadline:
                    raise
            else:
                self._breaker.succeeded()
                return result
            failures += 1
            await self._sleep(pause)

    async def _admitted(self, operation: str, deadline: float | None) -> float | None:
        """Wait for the breaker. Waiting for a backend that is down uses patience up like failing does."""
        while (wait := self._breaker.wait(self._clock())) > 0:
            now = self._clock()
            if deadline is None:
                deadline = now + self._patience
            if now + wait > deadline:
                raise Unreachable(
                    f"{self._backend} has not answered for a while, so {operation} was not tried",
                    operation=operation,
                    retry_after=wait,
                    sent=False,
                )
            # A little late and never together, so that the one who tries is not a crowd.
            await self._sleep(min(wait + self._uniform(0, wait), max(wait, deadline - now)))
        return deadline

    def _pause(self, error: RollwrightError, failures: int) -> float:
        ceiling = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures, _PAUSES))
        return max(float(error.details.get("retry_after") or 0), self._uniform(0, ceiling))

    def _note(self, operation: str, error: RollwrightError, now: float) -> None:
        unclassified = error.details.get("unclassified")
        kind = type(error).__name__ if unclassified is None else f"{_UNCLASSIFIED}{unclassified}"
        self._counts[operation, kind] += 1
        level = logging.INFO if unclassified is None else logging.WARNING
        log.log(level, "%s: %s failed: %s: %s", self._backend, operation, kind, error)
        # Any other error is an answer: the backend is there.
        if isinstance(error, (Transient, AmbiguousOutcome)):
            self._breaker.failed(now)
        else:
            self._breaker.succeeded()


def _repeatable(error: RollwrightError, safety: Safety) -> bool:
    if not isinstance(error, (Transient, AmbiguousOutcome)):
        return False
    surely_not_done = isinstance(error, RateLimited) or error.details.get("sent") is False
    return safety is Safety.SAFE or surely_not_done
