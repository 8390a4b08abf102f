"""A token bucket: bursts up to `capacity`, then `rate` calls a second."""

import time


class Bucket:
    """One caller's budget. `clock` returns seconds and never goes back."""

    def __init__(self, rate, capacity, clock=time.monotonic):
        if rate <= 0 or capacity < 1:
            raise ValueError("rate must be positive and capacity at least 1")
        self.rate = rate
        self.capacity = capacity
        self._clock = clock
        self._tokens = float(capacity)
        self._filled_at = clock()

    def _refill(self):
        now = self._clock()
        earned = (now - self._filled_at) * self.rate
        self._tokens = min(self.capacity, self._tokens + earned)
        self._filled_at = now

    def allow(self):
        """Take one token. False when there is none; nothing is taken then."""
        self._refill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def retry_after(self):
        """Seconds until `allow` says yes; 0.0 when it would now."""
        self._refill()
        return min(0.0, (1 - self._tokens) / self.rate)
