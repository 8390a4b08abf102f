"""One rollout for slime: in a place of its own, under its guard, and cut when slime has enough."""

from __future__ import annotations

from typing import Protocol

import anyio

from rollwright.concurrency import plain_errors
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Executor, Observer

__all__ = ["AbortFlag", "rolled_out"]

_ABORT_POLL_SECONDS = 0.25


class AbortFlag(Protocol):
    """slime's own state of a rollout step."""

    aborted: bool


async def rolled_out(
    plan: RolloutPlan, executor: Executor, observer: Observer, *, guard_seconds: float, abort: AbortFlag | None
) -> Attempt:
    """Wait for a place, then roll out; at most `guard_seconds` from then on, with all tries.

    So nobody waits for ever: each place comes back after the guard at the latest, and when slime has enough, waiting
    ends, too. Raises what `Executor.run` raises.
    """
    cut, attempts = anyio.Event(), list[Attempt]()
    with plain_errors():
        async with anyio.create_task_group() as watching:
            if abort is not None:
                watching.start_soon(_set_when_aborted, cut, abort)
            async with executor.room.place(cut):
                watching.start_soon(_set_later, cut, guard_seconds)
                attempts.append(await executor.run(plan, observer, cut=cut))
            watching.cancel_scope.cancel()
    return attempts[0]


async def _set_later(cut: anyio.Event, seconds: float) -> None:
    await anyio.sleep(seconds)
    cut.set()


async def _set_when_aborted(cut: anyio.Event, abort: AbortFlag) -> None:
    while not abort.aborted:  # noqa: ASYNC110 - slime has only a flag
        await anyio.sleep(_ABORT_POLL_SECONDS)
    cut.set()
