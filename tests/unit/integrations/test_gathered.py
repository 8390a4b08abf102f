"""Calls for the rollouts of one prompt become one call for its group."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from rollwright.errors import InfraError
from rollwright.integrations.gathered import Gathered

pytestmark = pytest.mark.anyio


async def test_calls_that_begin_together_are_one_group_and_each_has_its_own_result() -> None:
    gathered: Gathered[str] = Gathered()
    asked: list[tuple[str, int]] = []
    found: dict[tuple[str, int], str] = {}

    async def call(prompt: str, place: int) -> None:
        async def make(count: int) -> list[str]:
            asked.append((prompt, count))
            await anyio.lowlevel.checkpoint()
            return [f"{prompt}{number}" for number in range(count)]

        found[prompt, place] = await gathered.one(prompt, make)

    async with anyio.create_task_group() as group:
        for prompt, count in (("a", 4), ("b", 1)):
            for place in range(count):
                group.start_soon(call, prompt, place)
    assert asked == [("a", 4), ("b", 1)]
    assert sorted(found.values()) == ["a0", "a1", "a2", "a3", "b0"]
    await call("a", 0)
    assert asked[2:] == [("a", 1)], "a call that comes later is a group of its own"


async def test_a_group_that_fails_fails_for_each_of_its_calls() -> None:
    gathered: Gathered[str] = Gathered()
    errors: list[Exception] = []

    async def make(count: int) -> list[str]:
        await anyio.lowlevel.checkpoint()
        raise OSError("no engine")

    async def call() -> None:
        try:
            await gathered.one("a", make)
        except (OSError, InfraError) as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(call)
    assert sorted(type(error).__name__ for error in errors) == ["InfraError", "InfraError", "OSError"]


async def test_a_first_call_that_is_cancelled_leaves_nobody_waiting() -> None:
    gathered: Gathered[str] = Gathered()

    async def make(count: int) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return ["one"] * count

    with anyio.CancelScope() as scope:
        scope.cancel()
        await gathered.one("a", make)
    assert await gathered.one("a", make) == "one"
