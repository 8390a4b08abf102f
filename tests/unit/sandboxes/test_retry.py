"""The retry layer: what is done again, when, and for how long. Time is a number that only we move."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import (
    AmbiguousOutcome,
    JobLost,
    PathNotFound,
    RateLimited,
    RollwrightError,
    SandboxBroken,
    SandboxGone,
    Transient,
    Unreachable,
    UsageError,
)
from rollwright.sandboxes.retry import Breaker, Retries, Safety, Tally


@dataclass
class Bench:
    """A backend whose next failures are listed, on a clock that only sleeping and trying move."""

    failures: list[RollwrightError] = field(default_factory=list)
    seconds_each: float = 0.0
    patience: float = 60.0
    seed: int = 0
    breaker: Breaker | None = None
    now: float = 1000.0
    tried_at: list[float] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.retries = Retries(
            "bench",
            patience=self.patience,
            breaker=self.breaker,
            clock=lambda: self.now,
            sleep=self.sleep,
            uniform=random.Random(self.seed).uniform,
        )

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    async def attempt(self) -> str:
        self.tried_at.append(self.now)
        self.now += self.seconds_each
        if self.failures:
            self.failed_at.append(self.now)
            raise self.failures.pop(0)
        return "done"

    def call(self, safety: Safety) -> str:
        return anyio.run(self.retries.call, "operation", self.attempt, safety)


ANSWERS: list[Callable[[str], RollwrightError]] = [SandboxGone, JobLost, SandboxBroken, PathNotFound, UsageError]

PASSING = st.one_of(
    st.sampled_from([Transient, Unreachable, AmbiguousOutcome, RateLimited]).map(lambda kind: kind("passing")),
    st.floats(0, 30).map(lambda seconds: RateLimited("slow down", retry_after=seconds)),
    st.just(AmbiguousOutcome("what is that", unclassified="json.JSONDecodeError")),
)


@given(failures=st.lists(PASSING, max_size=8), seed=st.integers(0, 1000))
def test_an_unsafe_operation_is_not_repeated_once_it_may_have_been_carried_out(
    failures: list[RollwrightError], seed: int
) -> None:
    refused = [isinstance(error, RateLimited) for error in failures]
    first_doubt = refused.index(False) if False in refused else None
    bench = Bench(list(failures), patience=1e6, seed=seed)
    if first_doubt is None:
        assert bench.call(Safety.UNSAFE) == "done"
    else:
        with pytest.raises(type(failures[first_doubt])):
            bench.call(Safety.UNSAFE)
        assert len(bench.tried_at) == first_doubt + 1


@pytest.mark.parametrize("kind", [Unreachable, AmbiguousOutcome, Transient])
def test_an_unsafe_operation_is_repeated_when_it_surely_was_not_sent(kind: type[RollwrightError]) -> None:
    bench = Bench([kind("no connection", sent=False), kind("no connection", sent=False)])
    assert bench.call(Safety.UNSAFE) == "done"
    assert len(bench.tried_at) == 3


@given(
    failures=st.lists(PASSING, min_size=1, max_size=60),
    seconds_each=st.floats(0, 20),
    patience=st.floats(0, 90),
    seed=st.integers(0, 1000),
)
def test_no_try_begins_after_the_deadline_and_none_before_the_backend_allowed_it(
    failures: list[RollwrightError], seconds_each: float, patience: float, seed: int
) -> None:
    given_failures = list(failures)
    bench = Bench(failures, seconds_each=seconds_each, patience=patience, seed=seed)
    try:
        assert bench.call(Safety.SAFE) == "done"
    except RollwrightError:
        assert bench.now <= bench.failed_at[0] + patience + seconds_each + 1e-6
    deadline = bench.failed_at[0] + patience
    assert all(at <= deadline + 1e-6 for at in bench.tried_at[1:])
    for error, failed_at, next_try in zip(given_failures, bench.failed_at, bench.tried_at[1:], strict=False):
        assert next_try >= failed_at + float(error.details.get("retry_after", 0)) - 1e-6


@given(failures=st.integers(1, 30), seed=st.integers(0, 1000))
def test_a_safe_operation_is_repeated_until_it_works(failures: int, seed: int) -> None:
    bench = Bench([AmbiguousOutcome("cut")] * failures, patience=1e6, seed=seed)
    assert bench.call(Safety.SAFE) == "done"
    assert len(bench.tried_at) == failures + 1


def test_an_answer_is_raised_at_once_however_safe_the_operation_is() -> None:
    for kind in ANSWERS:
        bench = Bench([kind("an answer")])
        with pytest.raises(kind):
            bench.call(Safety.SAFE)
        assert len(bench.tried_at) == 1


def test_a_bug_is_not_ours_to_repeat() -> None:
    bench = Bench()

    async def attempt() -> None:
        bench.tried_at.append(bench.now)
        raise TypeError("a bug")

    with pytest.raises(TypeError):
        anyio.run(bench.retries.call, "operation", attempt, Safety.SAFE)
    assert len(bench.tried_at) == 1
    assert bench.retries.counts == {}


def test_pauses_are_spread_over_the_whole_range() -> None:
    pauses: list[float] = []
    for seed in range(200):
        bench = Bench([Transient("later")], seed=seed)
        bench.call(Safety.SAFE)
        pauses.append(bench.tried_at[1] - bench.failed_at[0])
    assert min(pauses) < 0.01
    assert max(pauses) > 0.09
    assert max(pauses) <= 0.1


def test_every_classification_is_counted_and_an_unknown_one_stands_out(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench([RateLimited("a"), RateLimited("b"), AmbiguousOutcome("c", unclassified="weird.NewError")])
    with caplog.at_level(logging.INFO, logger="rollwright.sandboxes.retry"):
        bench.call(Safety.SAFE)
    assert bench.retries.counts == {
        ("operation", "RateLimited"): 2,
        ("operation", "unclassified weird.NewError"): 1,
    }
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.INFO, logging.WARNING]
    assert "weird.NewError" in caplog.text


# --------------------------------------------------------------------------- the breaker


def down(breaker: Breaker, *, since: float, until: float, step: float = 0.5) -> None:
    at = since
    while at <= until:
        breaker.failed(at)
        at += step


def test_a_burst_of_failures_at_one_moment_is_no_outage() -> None:
    breaker = Breaker()
    for _ in range(500):
        breaker.failed(100.0)
    assert not breaker.open
    assert breaker.wait(100.0) == 0


def test_while_a_backend_is_down_one_caller_at_a_time_tries() -> None:
    breaker = Breaker()
    down(breaker, since=100, until=110)
    assert breaker.open
    pause = breaker.wait(110.0)
    assert pause > 0
    assert breaker.wait(110.0 + pause) == 0, "the one that tries"
    assert breaker.wait(110.0 + pause) > 0, "the others wait"


def test_the_first_success_lets_everybody_in_again() -> None:
    breaker = Breaker()
    down(breaker, since=100, until=110)
    breaker.succeeded()
    assert [breaker.wait(110.0) for _ in range(3)] == [0, 0, 0]
    breaker.failed(111)
    assert not breaker.open


def test_a_try_that_never_reports_back_blocks_nobody_for_ever() -> None:
    breaker = Breaker(longest_pause=8)
    down(breaker, since=100, until=110)
    at = 110.0 + breaker.wait(110.0)
    assert breaker.wait(at) == 0
    assert 0 < breaker.wait(at) <= 8
    assert breaker.wait(at + 8) == 0


def test_an_open_breaker_keeps_callers_away_but_never_beyond_their_patience() -> None:
    breaker = Breaker(first_pause=4, longest_pause=4)
    down(breaker, since=980, until=1000)
    bench = Bench(breaker=breaker, patience=3)
    with pytest.raises(Unreachable) as raised:
        bench.call(Safety.UNSAFE)
    assert bench.tried_at == []
    assert raised.value.details["sent"] is False
    bench = Bench(breaker=breaker, patience=60)
    assert bench.call(Safety.UNSAFE) == "done"
    assert bench.tried_at[0] > 1000
    assert not breaker.open


def test_a_long_outage_is_survived_with_few_tries() -> None:
    tries = 0
    now = 0.0

    async def attempt() -> str:
        nonlocal tries
        tries += 1
        if now < 30:
            raise Unreachable("down")
        return "up"

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    retries = Retries("bench", clock=lambda: now, sleep=sleep, uniform=random.Random(1).uniform)
    assert anyio.run(retries.call, "operation", attempt, Safety.SAFE) == "up"
    assert tries < 30
    assert 30 <= now < 60


# --------------------------------------------------------------------------- what a run tells of it

COUNTS = st.dictionaries(
    st.tuples(st.sampled_from(["exec", "boot"]), st.text(max_size=5)), st.integers(1, 9), max_size=4
)
TALLIES = st.builds(
    lambda failures, outages, down: Tally(failures=failures, outages=outages, down=down),
    COUNTS,
    st.integers(0, 5),
    st.booleans(),
)


@given(TALLIES, TALLIES)
def test_tallies_add_up_and_survive_being_stored(one: Tally, other: Tally) -> None:
    both = one + other
    assert sum(both.failures.values()) == sum(one.failures.values()) + sum(other.failures.values())
    assert both.outages == one.outages + other.outages
    assert Tally.from_json(orjson.loads(orjson.dumps(both.to_json()))) == both


@pytest.mark.anyio
async def test_an_error_that_no_adapter_knows_shows_by_its_type() -> None:
    unknown = AmbiguousOutcome("what?", unclassified="vendor.Oops")
    bench = Bench(failures=[unknown, Unreachable("no"), unknown])
    await bench.retries.call("exec", bench.attempt, Safety.SAFE)
    await bench.retries.call("put", bench.attempt, Safety.SAFE)
    tally = bench.retries.tally()
    assert tally.unclassified == {"vendor.Oops": 2}
    assert tally.to_json()["failures"] == [
        {"operation": "exec", "error": "unclassified vendor.Oops", "count": 2},
        {"operation": "exec", "error": "Unreachable", "count": 1},
    ]


def test_an_outage_is_counted_once() -> None:
    breaker = Breaker(failures=2, seconds=1.0)
    for now in (0.0, 5.0, 6.0, 7.0):
        breaker.failed(now)
    assert (breaker.open, breaker.openings) == (True, 1)
    breaker.succeeded()
    for now in (10.0, 15.0):
        breaker.failed(now)
    assert breaker.openings == 2
