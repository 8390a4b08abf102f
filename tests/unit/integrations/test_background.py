"""A context on a thread of its own: who calls it hears how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from rollwright.errors import InfraError
from rollwright.integrations.background import Background

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def that_ends() -> AsyncGenerator[anyio.Event]:
    """Ends by an error when it is told to, as a cluster does that lost its last node."""
    end = anyio.Event()

    async def fail() -> None:
        await end.wait()
        raise InfraError("the last node is gone")

    async with anyio.create_task_group() as group:
        group.start_soon(fail)
        yield end
        group.cancel_scope.cancel()


async def end_and_wait(end: anyio.Event) -> None:
    end.set()
    await anyio.sleep_forever()


async def wait(end: anyio.Event, begun: threading.Event) -> None:
    begun.set()
    await anyio.sleep_forever()


async def test_a_call_under_way_and_a_later_one_raise_what_ended_the_context() -> None:
    background = Background(that_ends, name="test")
    background.start()
    with pytest.raises(InfraError, match="last node"):
        await background.call(end_and_wait)
    with pytest.raises(InfraError, match="last node"):
        await background.call(wait, threading.Event())
    assert background.stop(10)


async def test_a_call_is_cancelled_by_its_caller_and_by_the_end() -> None:
    background = Background(that_ends, name="test")
    background.start()
    begun = threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(background.call, wait, begun)
        await anyio.to_thread.run_sync(begun.wait)
        group.cancel_scope.cancel()
    begun.clear()
    under_way = asyncio.ensure_future(background.call(wait, begun))
    await anyio.to_thread.run_sync(begun.wait)
    assert await anyio.to_thread.run_sync(background.stop, 10)
    with pytest.raises(asyncio.CancelledError):
        await under_way
