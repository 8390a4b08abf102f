"""A lease that is asked for little by little lasts while its box is used, and not long after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.sandboxes.lease import Lease, checked_survive

SURVIVE = st.floats(1, 1000)
USES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 300)))
"""Idle times as shares of the time to survive, and how long something may take then."""


@given(SURVIVE, USES, st.floats(1, 100_000))
def test_a_box_outlives_every_use_by_the_time_it_is_to_survive_and_by_little_more(
    survive: float, uses: list[tuple[float, float]], lifetime: float
) -> None:
    lease = Lease(lifetime, now=0, survive=survive)
    now, longest = 0.0, 0.0
    for idle, busy in uses:
        now += idle * survive * 0.999
        if now >= lifetime - 1:
            break
        assert lease.until > now, "it lasts while it is used often enough"
        if lease.due(now, busy):
            lease.given(lease.amount(now, busy), now=now)
        longest = max(longest, busy)
        now += busy
        assert lease.until >= min(now + survive, lifetime) - 1.001
        assert lease.until <= min(now + 2 * survive + longest, lifetime) + 0.001


@given(st.floats(1, 1000), st.lists(st.floats(0, 0.49)), st.floats(1, 100_000), st.sampled_from([0.0, 5.0, 5000.0]))
def test_no_more_than_the_backend_gives_is_asked_for_and_it_is_asked_in_time(
    longest: float, idles: list[float], lifetime: float, survive: float
) -> None:
    lease = Lease(lifetime, now=0, survive=survive, longest=longest)
    now = 0.0
    for idle in idles:
        now += idle * (min(longest, survive) if survive else longest)
        if now >= lifetime - 1:
            break
        assert lease.until > now
        assert lease.amount(now, 10) <= longest
        if lease.due(now, 10):
            lease.given(lease.amount(now, 10), now=now)


def test_without_either_everything_is_asked_for_at_once() -> None:
    lease = Lease(7200, now=10)
    assert lease.until == 7210
    assert not lease.due(7000, 300)
    lease.renew(100, now=7000)
    assert lease.amount(7000) == 100


def test_a_renewed_lease_is_due_again() -> None:
    lease = Lease(50, now=0, survive=100)
    assert not lease.due(49, 30)
    lease.renew(5000, now=49)
    assert lease.due(49, 30)
    assert lease.amount(49, 30) == 230


def test_no_time_is_negative() -> None:
    assert checked_survive(0, field="f") == 0
    with pytest.raises(ConfigError, match="f cannot be negative"):
        checked_survive(-1, field="f")
