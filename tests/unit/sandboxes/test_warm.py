"""Boxes made ahead: who gets which, and that none is forgotten."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from rollwright.errors import ProvisionFailed
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.sandboxes.warm import WarmProvider
from support.scripted_provider import Script

pytestmark = pytest.mark.anyio

SPEC = SandboxSpec(image="host", labels={"rollout": "a.1"}, lifetime_seconds=50)


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.001)


async def test_the_second_box_of_a_kind_is_there_already_and_is_replaced() -> None:
    script = Script()
    async with WarmProvider(script, ahead=2) as provider:
        await provider.create(SPEC, key="one")
        await until(lambda: provider.ready == 2)
        made = len(script.boots)
        box = await provider.create(replace(SPEC, labels={"rollout": "a.2"}, lifetime_seconds=70), key="two")
        assert len(script.boots) == made
        assert script.boxes[1] is box
        assert script.boxes[1].lease == 70
        await until(lambda: provider.ready == 2)
        labels = {info.id: dict(info.labels) for info in await provider.list()}
        assert labels["box0"] == {"rollout": "a.1"}
        assert labels["box1"] == {"rollout": "a.2"}
        assert labels["box2"] == {"warm": "1"}
    assert [box.id for box in script.open] == ["box0", "box1"]


async def test_one_key_gets_one_box(tmp_path: Path) -> None:
    async with NamespacesProvider(state_dir=tmp_path) as inner, WarmProvider(inner, ahead=1) as provider:
        await provider.create(SPEC, key="one")
        await until(lambda: provider.ready == 1)
        box = await provider.create(SPEC, key="two")
        assert await provider.create(SPEC, key="two") is box


async def test_a_box_made_ahead_is_taken_over_by_the_key_it_was_made_under(tmp_path: Path) -> None:
    async with NamespacesProvider(state_dir=tmp_path, survive=100) as inner:
        async with WarmProvider(inner, ahead=1) as provider:
            first = await provider.create(SPEC, key="one")
            await until(lambda: provider.ready == 1)
            box = await provider.create(SPEC, key="two")
            assert await provider.attach(provider.known_as("one")) is first
            assert provider.known_as("two") != "two"
            name = provider.known_as("two")
        async with WarmProvider(inner, ahead=1) as later:
            assert await later.attach(name) is box


@pytest.mark.parametrize(
    "other", [{"image": "other"}, {"network": "open"}, {"env": {"A": "1"}}, {"disk_mb": 1}, {"memory_mb": 5}]
)
async def test_a_box_of_another_kind_is_never_handed_out(other: dict[str, object]) -> None:
    script = Script()
    async with WarmProvider(script, ahead=1) as provider:
        await provider.create(SPEC, key="one")
        await until(lambda: provider.ready == 1)
        spec = replace(SPEC, **other)  # type: ignore[arg-type]
        box = await provider.create(spec, key="two")
        assert next(idle for idle in script.boxes if idle is box).spec == spec


async def test_a_box_that_died_while_it_waited_is_not_handed_out() -> None:
    script = Script()
    async with WarmProvider(script, ahead=1) as provider:
        await provider.create(SPEC, key="one")
        await until(lambda: provider.ready == 1)
        script.boxes[1].dead = True
        box = await provider.create(SPEC, key="two")
        assert box is not script.boxes[1]
        assert script.boxes[1].closed


async def test_a_box_whose_caller_is_cancelled_while_it_gets_it_is_removed() -> None:
    script = Script()
    async with WarmProvider(script, ahead=1) as provider:
        await provider.create(SPEC, key="one")
        await until(lambda: provider.ready == 1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await provider.create(SPEC, key="two")
        assert script.boxes[1].closed
    assert [box.id for box in script.open] == ["box0"]


async def test_a_boot_ahead_that_fails_harms_nobody() -> None:
    script = Script(failures=[None, ProvisionFailed("no")])
    async with WarmProvider(script, ahead=1) as provider:
        await provider.create(SPEC, key="one")
        await until(lambda: not script.failures)
        assert await provider.create(SPEC, key="two")
        await until(lambda: provider.ready == 1)


async def test_a_kind_that_nobody_asks_for_is_given_up() -> None:
    script = Script()
    async with WarmProvider(script, ahead=2, idle_seconds=0.02, clock=script.clock) as provider:
        await provider.create(SPEC, key="one")
        await until(lambda: provider.ready == 2)
        script.now += 1
        await until(lambda: provider.ready == 0)
        assert [box.id for box in script.open] == ["box0"]


async def test_more_kinds_than_there_is_room_for_give_up_the_oldest() -> None:
    script = Script()
    async with WarmProvider(script, ahead=1, clock=script.clock) as provider:
        for n in range(12):
            script.now += 1
            await provider.create(replace(SPEC, image=f"image{n}"), key=f"k{n}")
            await until(lambda n=n: provider.ready == min(n + 1, 8))
        idle = {box.spec.image for box in script.open if "warm" in box.spec.labels}
        assert idle == {f"image{n}" for n in range(4, 12)}


async def test_leaving_in_the_middle_of_boots_leaves_no_box_ahead(tmp_path: Path) -> None:
    async with NamespacesProvider(state_dir=tmp_path) as inner:
        async with WarmProvider(inner, ahead=5) as provider:
            await provider.create(SPEC, key="one")
            await anyio.lowlevel.checkpoint()
        assert len(await inner.list()) == 1


_KILLED = """
import sys, anyio
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.sandboxes.warm import WarmProvider

async def main():
    async with NamespacesProvider(state_dir=sys.argv[1]) as inner, WarmProvider(inner, ahead=3) as provider:
        await provider.create(SandboxSpec(image="host"), key="k")
        while provider.ready < 3:
            await anyio.sleep(0.01)
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_boxes_ahead_of_a_killed_process_are_reaped(tmp_path: Path) -> None:
    async with await anyio.open_process([sys.executable, "-c", _KILLED, str(tmp_path)], stderr=None) as process:
        assert process.stdout is not None
        assert (await process.stdout.receive()).startswith(b"ready")
        process.kill()
    async with NamespacesProvider(state_dir=tmp_path) as provider:
        assert len(await provider.list()) == 4
        assert len(await provider.reap()) == 4
        assert await provider.list() == []
