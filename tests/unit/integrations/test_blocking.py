"""An asynchronous source, taken group by group from a thread that has no event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from rollwright.integrations.blocking import blocking_groups
from rollwright.integrations.record import Rollout, StoredRollout


@dataclass
class Group:
    attempts: Sequence[Rollout]


@asynccontextmanager
async def source(groups: list[Group], closed: list[str], *, then: str = "end") -> AsyncGenerator[AsyncIterator[Group]]:
    async def iterate() -> AsyncGenerator[Group]:
        for group in groups:
            await anyio.lowlevel.checkpoint()
            yield group
        if then == "wait":
            await anyio.sleep_forever()
        if then == "fail":
            raise OSError("disk full")

    try:
        yield iterate()
    finally:
        closed.append("closed")


def test_groups_come_in_order_and_end_with_the_source(calc: list[StoredRollout]) -> None:
    closed: list[str] = []
    with blocking_groups(source([Group(calc), Group(calc[:2])], closed)) as groups:
        assert [len(group) for group in groups] == [5, 2]
    assert closed == ["closed"]


def test_leaving_ends_a_thread_that_waits_for_a_group(calc: list[StoredRollout]) -> None:
    closed: list[str] = []
    got: list[int] = []
    first = threading.Event()

    with blocking_groups(source([Group(calc)], closed, then="wait")) as groups:

        def pull() -> None:
            for group in groups:
                got.append(len(group))
                first.set()

        thread = threading.Thread(target=pull)
        thread.start()
        assert first.wait(60)
    thread.join(60)
    assert not thread.is_alive()
    assert (got, closed) == ([5], ["closed"])


def test_what_the_source_raises_is_raised(calc: list[StoredRollout]) -> None:
    with (
        pytest.raises(OSError, match="disk full"),
        blocking_groups(source([Group(calc)], [], then="fail")) as groups,
    ):
        for _ in groups:
            pass
