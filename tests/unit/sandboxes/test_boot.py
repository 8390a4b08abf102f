"""Boots that wait for their turn. Time is a number that only waiting moves."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import (
    AmbiguousOutcome,
    ConfigError,
    ProvisionFailed,
    RateLimited,
    SandboxError,
    Unreachable,
    Unsupported,
)
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.boot import Bucket, PacedProvider
from rollwright.sandboxes.docker import DockerProvider
from rollwright.sandboxes.namespaces import NamespacesProvider
from support.scripted_provider import Script

pytestmark = pytest.mark.anyio

SPEC = SandboxSpec(image="host")


def paced(script: Script, *, concurrency: int = 4, rate: float | None = None, retries: int = 2) -> PacedProvider:
    return PacedProvider(
        script,
        concurrency=concurrency,
        rate=rate,
        retries=retries,
        clock=script.clock,
        sleep=script.sleep,
        uniform=random.Random(0).uniform,
    )


# --------------------------------------------------------------------------- the bucket


@given(
    rate=st.floats(0.1, 50),
    burst=st.integers(1, 20),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_no_stretch_of_time_has_more_turns_than_the_rate_and_one_burst(
    rate: float, burst: int, gaps: list[float]
) -> None:
    bucket, now, turns = Bucket(rate, burst=burst), 0.0, list[float]()
    for gap in gaps:
        now += gap
        turns.append(now + bucket.take(now))
    assert turns == sorted(turns)
    for first in range(len(turns)):
        for last in range(first, len(turns)):
            assert last - first + 1 <= burst + (turns[last] - turns[first]) * rate + 1e-6


@given(rate=st.floats(0.1, 50), burst=st.integers(1, 20))
def test_after_a_quiet_time_a_whole_burst_comes_at_once(rate: float, burst: int) -> None:
    bucket = Bucket(rate, burst=burst)
    for _ in range(40):
        bucket.take(0.0)
    quiet = 1000.0
    assert [bucket.take(quiet) for _ in range(burst)] == pytest.approx([0.0] * burst, abs=1e-9)
    assert bucket.take(quiet) == pytest.approx(1 / rate)


@given(rate=st.none() | st.floats(0.1, 50), burst=st.integers(1, 20), takes=st.integers(0, 30))
def test_no_turn_comes_while_they_are_held(rate: float | None, burst: int, takes: int) -> None:
    bucket = Bucket(rate, burst=burst)
    for _ in range(takes):
        bucket.take(10.0)
    bucket.hold(25.0)
    for _ in range(5):
        assert 10.0 + bucket.take(10.0) >= 25.0 - 1e-6


def test_without_a_rate_nobody_waits() -> None:
    bucket = Bucket(None)
    assert {bucket.take(0.0) for _ in range(1000)} == {0.0}


# --------------------------------------------------------------------------- boots


async def test_a_start_of_many_is_no_avalanche() -> None:
    script = Script(boot_seconds=0.001)
    provider = paced(script, concurrency=3, rate=2)
    async with anyio.create_task_group() as group:
        for n in range(20):
            group.start_soon(lambda n=n: provider.create(SPEC, key=f"k{n}"))
    assert script.most_booting <= 3
    assert len(script.boots) == 20
    assert script.boots[-1][0] - script.boots[0][0] >= (20 - 2) / 2 - 1e-6


@pytest.mark.parametrize("error", [ProvisionFailed("no"), Unreachable("no"), AmbiguousOutcome("no")])
async def test_a_boot_that_failed_is_begun_again_under_the_same_key_after_a_pause(error: SandboxError) -> None:
    script = Script(failures=[error, error])
    provider = paced(script)
    box = await provider.create(SPEC, key="k")
    assert [key for _, key in script.boots] == ["k"] * 3
    pauses = [later[0] - earlier[0] for earlier, later in zip(script.boots, script.boots[1:], strict=False)]
    assert 0 < pauses[0] <= 1
    assert 0 < pauses[1] <= 2
    assert box is script.boxes[0]
    assert provider.tally().failures == {("boot", type(error).__name__): 2}


async def test_a_boot_that_goes_on_failing_is_given_up_with_its_last_error() -> None:
    errors = [ProvisionFailed(str(n)) for n in range(9)]
    script = Script(failures=[*errors])
    with pytest.raises(ProvisionFailed, match=r"^2$"):
        await paced(script, retries=2).create(SPEC, key="k")
    assert len(script.boots) == 3


@pytest.mark.parametrize("error", [ConfigError("no such image"), Unsupported("no mounts")])
async def test_what_the_user_must_mend_is_not_tried_again(error: ConfigError) -> None:
    script = Script(failures=[error])
    with pytest.raises(type(error)):
        await paced(script).create(SPEC, key="k")
    assert len(script.boots) == 1


async def test_a_backend_that_limits_our_rate_is_left_alone_by_all() -> None:
    script = Script(failures=[RateLimited("slow", retry_after=7.0)])
    provider = paced(script, rate=100)
    began = script.now
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: provider.create(SPEC, key="first"))
        while not script.boots or script.booting:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        group.start_soon(lambda: provider.create(SPEC, key="second"))
    assert [at - began >= 7 for at, _ in script.boots] == [False, True, True]


async def test_a_boot_that_takes_too_long_is_ended_and_begun_again() -> None:
    script = Script(boot_seconds=3600)
    spec = SandboxSpec(image="slow", boot_seconds=0.05)
    with pytest.raises(ProvisionFailed, match="'slow' within"):
        await paced(script, retries=1).create(spec, key="k")
    assert len(script.boots) == 2
    assert script.booting == 0


async def test_waiting_for_ones_turn_is_not_booting() -> None:
    script = Script()
    provider = paced(script, concurrency=1, rate=0.001)
    spec = SandboxSpec(image="host", boot_seconds=5)
    for n in range(3):
        await provider.create(spec, key=f"k{n}")
    assert script.boots[-1][0] - script.boots[0][0] >= 2000 - 1e-6
    assert provider.tally().failures == {}


async def test_a_failed_boot_makes_room_for_the_next_while_it_pauses() -> None:
    script = Script(failures=[ProvisionFailed("no")])
    provider = paced(script, concurrency=1)
    async with anyio.create_task_group() as group:
        for n in range(2):
            group.start_soon(lambda n=n: provider.create(SPEC, key=f"k{n}"))
    assert script.most_booting == 1
    assert len(script.boxes) == 2


def test_no_boots_at_all_is_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.boot_concurrency"):
        PacedProvider(Script(), concurrency=0)


@pytest.mark.parametrize(("kind", "cls"), [("namespaces", NamespacesProvider), ("docker", DockerProvider)])
def test_a_backends_own_number_of_boots_is_named_as_the_run_file_has_it(
    kind: str, cls: type[NamespacesProvider | DockerProvider], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"sandbox\.{kind}\.boot_concurrency") as caught:
        cls(state_dir=tmp_path, boot_concurrency=0)
    assert caught.value.details["field"] == f"sandbox.{kind}.boot_concurrency"
