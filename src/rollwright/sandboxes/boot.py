"""Boots that come one after the other: so many at a time, so many a second, each in its time, again where that helps.

A start of hundreds of rollouts is an avalanche for whoever makes the boxes.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import anyio

from rollwright.errors import ConfigError, ProvisionFailed, RateLimited, SandboxError
from rollwright.sandboxes import Provider, Sandbox, SandboxSpec
from rollwright.sandboxes.retry import Tally
from rollwright.sandboxes.wrapped import WrappedProvider

__all__ = ["Bucket", "PacedProvider"]

log = logging.getLogger(__name__)

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Bucket:
    """Turns at a steady rate, after a burst. Pure: it is told the time, and tells how long to wait.

    `rate`: turns a second; None: as many as are asked for. `burst`: turns that may come at once after a quiet time.
    """

    def __init__(self, rate: float | None, *, burst: int = 1) -> None:
        self._gap = 0.0 if rate is None else 1 / rate
        self._slack = self._gap * (burst - 1)
        self._next = -math.inf
        """When the next turn comes once the burst is used up."""

    def take(self, now: float) -> float:
        """Take the next turn; the seconds until it comes."""
        due = max(self._next, now)
        self._next = due + self._gap
        return max(0.0, due - self._slack - now)

    def hold(self, until: float) -> None:
        """No turn that is taken from now on comes before `until`, and no burst then."""
        self._next = max(self._next, until + self._slack)


class PacedProvider(WrappedProvider):
    """A `Provider` whose boots wait for their turn; waiting is not booting.

    `concurrency`: boots at a time. `rate`: boots that may begin a second, as many of them at once as fit into one
    second; None: any number. `retries`: how often a boot that failed is begun again, after a random pause with a
    ceiling that doubles, or the longer one that the backend asks for; one that limits our rate is then left alone by
    all. `clock`, `sleep` and `uniform` are there for tests.
    """

    def __init__(
        self,
        inner: Provider,
        *,
        concurrency: int,
        rate: float | None = None,
        retries: int = 2,
        clock: Callable[[], float] = anyio.current_time,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        super().__init__(inner)
        if concurrency < 1:
            raise ConfigError("sandbox.boot_concurrency must be at least 1", field="sandbox.boot_concurrency")
        self._slots = anyio.Semaphore(concurrency)
        self._bucket = Bucket(rate, burst=max(1, math.floor(rate or 1)))
        self._retries = retries
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._failed: Counter[tuple[str, str]] = Counter()

    async def create(self, spec: SandboxSpec, *, key: str) -> Sandbox:
        """As the backend's. Raises `ProvisionFailed` also for a boot that takes longer than `spec.boot_seconds`."""
        failures = 0
        while True:
            try:
                async with self._slots:
                    if (wait := self._bucket.take(self._clock())) > 0:
                        await self._sleep(wait)
                    return await self._boot(spec, key)
            except SandboxError as error:
                self._failed["boot", type(error).__name__] += 1
                if failures >= self._retries:
                    raise
                pause = self._pause(error, failures)
                log.info("boot %d of image %s failed, again in %.1f s: %s", failures + 1, spec.image, pause, error)
            failures += 1
            await self._sleep(pause)

    async def _boot(self, spec: SandboxSpec, key: str) -> Sandbox:
        with anyio.move_on_after(spec.boot_seconds):
            return await self.inner.create(spec, key=key)
        raise ProvisionFailed(f"no box of image {spec.image!r} within {spec.boot_seconds:g} s", image=spec.image)

    def _pause(self, error: SandboxError, failures: int) -> float:
        asked = float(error.details.get("retry_after") or 0)
        pause = max(asked, self._uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**failures)))
        if isinstance(error, RateLimited):
            self._bucket.hold(self._clock() + pause)
        return pause

    def tally(self) -> Tally:
        return Tally(failures=dict(self._failed)) + super().tally()
