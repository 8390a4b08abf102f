"""The workers of a run: what is owed is rolled out, so many at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from rollwright.rollout import RolloutPlan
from rollwright.run.executor import Executor
from rollwright.run.observer import Observer
from rollwright.store import RolloutRecord


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    interrupted: bool = False

    @property
    def ungraded(self) -> int:
        return sum(not record.graded for record in self.records)

    @property
    def statuses(self) -> Counter[str]:
        return Counter(str(record.status) for record in self.records)


async def execute(executor: Executor, plans: Sequence[RolloutPlan], observer: Observer) -> Summary:
    """Run `plans`, as many at a time as the executor takes; each is stored as it ends.

    Cancelling it cleans up what is in flight (boxes closed, nothing stored of it). A bug in a rollout stops the run.
    """
    summary = Summary()

    async def one(plan: RolloutPlan) -> None:
        try:
            attempt = await executor.run(plan, observer)
        finally:
            executor.room.release()
        summary.records.append(attempt.record)

    async with anyio.create_task_group() as group:
        for plan in plans:
            await executor.room.acquire()
            group.start_soon(one, plan)
    return summary
