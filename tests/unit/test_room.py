"""Places for rollouts: in order, never too many, none lost to whoever stops waiting."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.run import Room

pytestmark = pytest.mark.anyio


async def test_places_are_handed_out_in_order() -> None:
    room, served = Room(1), list[int]()

    async def want(number: int) -> None:
        await room.acquire()
        served.append(number)

    await room.acquire()
    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(want, number)
            await anyio.wait_all_tasks_blocked()
        assert served == []
        for _ in range(3):
            room.release()
            await anyio.wait_all_tasks_blocked()
    assert served == [0, 1, 2]
    assert room.taken == 1


async def test_more_places_let_more_in_and_fewer_take_none_away() -> None:
    room = Room(0)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(room.acquire)
        await anyio.wait_all_tasks_blocked()
        room.resize(2)
        await anyio.wait_all_tasks_blocked()
        assert room.taken == 2
        room.resize(1)
        room.release()
        await anyio.wait_all_tasks_blocked()
        assert room.taken == 1, "the missing place is the one that came back"
        room.release()
        await anyio.wait_all_tasks_blocked()
    assert room.taken == 1


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("steps", range(8))
async def test_who_is_cancelled_just_when_it_gets_a_place_gives_it_back(steps: int, waits: bool) -> None:
    room = Room(1)

    async def want() -> None:
        async with room.place(anyio.Event()):
            await anyio.sleep_forever()

    if waits:
        await room.acquire()
    async with anyio.create_task_group() as group:
        group.start_soon(want)
        if waits:
            await anyio.wait_all_tasks_blocked()
            room.release()
        for _ in range(steps):
            await anyio.lowlevel.cancel_shielded_checkpoint()
        group.cancel_scope.cancel()
    assert room.taken == 0


@given(st.lists(st.sampled_from(["ask", "leave", "release", "more", "fewer"]), max_size=40))
def test_whatever_happens_places_add_up(steps: list[str]) -> None:
    async def play() -> None:
        room, size, held = Room(2), 2, 0
        scopes: list[anyio.CancelScope] = []
        got: list[anyio.CancelScope] = []

        async def want(scope: anyio.CancelScope) -> None:
            with scope:
                await room.acquire()
                got.append(scope)

        async with anyio.create_task_group() as group:
            for step in steps:
                match step:
                    case "ask":
                        scopes.append(anyio.CancelScope())
                        group.start_soon(want, scopes[-1])
                    case "leave" if scopes:
                        scopes.pop(0).cancel()
                    case "release" if held < len(got):
                        held += 1
                        room.release()
                    case "more" | "fewer":
                        size = max(0, size + (1 if step == "more" else -1))
                        room.resize(size)
                    case _:
                        pass
                await anyio.wait_all_tasks_blocked()
                assert room.taken == len(got) - held
            waiting = [scope for scope in scopes if scope not in got and not scope.cancel_called]
            assert not waiting or room.taken >= room.places
            group.cancel_scope.cancel()

    anyio.run(play)
