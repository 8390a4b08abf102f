"""The workers of a run: what is owed is rolled out, begun again where that may help, and stored as it ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from rollwright.rollout import Finished, RolloutPlan, Toolbox, run_rollout
from rollwright.run.observer import Observer, current_rollout
from rollwright.store import RolloutRecord, RunWriter
from rollwright.types import Stage

log = logging.getLogger(__name__)


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


async def execute(tools: Toolbox, plans: Sequence[RolloutPlan], writer: RunWriter, observer: Observer) -> Summary:
    """Run `plans`, `run.concurrency` at a time, and store each as it ends.

    Cancelling it cleans up what is in flight (boxes closed, nothing stored of it). A bug in a rollout stops the run.
    """
    summary = Summary()
    owed = iter(plans)
    storing = anyio.Lock()  # one writer; storing must not block the event loop
    async with anyio.create_task_group() as group:
        for _ in range(min(tools.config.run.concurrency, len(plans))):
            group.start_soon(_worker, owed, tools, writer, storing, observer, summary)
    return summary


async def _worker(
    owed: Iterator[RolloutPlan],
    tools: Toolbox,
    writer: RunWriter,
    storing: anyio.Lock,
    observer: Observer,
    summary: Summary,
) -> None:
    for plan in owed:
        token = current_rollout.set(plan.name)
        observer.started(plan)
        finished = await _with_retries(plan, tools, writer, observer)
        with anyio.CancelScope(shield=True):  # a finished rollout is not lost to a Ctrl-C that comes now
            async with storing:
                await anyio.to_thread.run_sync(writer.store, finished.record, finished.folder, finished.samples)
        summary.records.append(finished.record)
        observer.entered(plan, Stage.STORED)
        observer.stored(plan, finished.record)
        current_rollout.reset(token)


async def _with_retries(plan: RolloutPlan, tools: Toolbox, writer: RunWriter, observer: Observer) -> Finished:
    """Begin again, in new sandboxes and a new session, while the failure is ours and may pass."""
    last = 1 + tools.config.run.retries
    for attempt in range(1, last + 1):
        finished = await run_rollout(
            plan, tools, writer.begin(plan.name), entered=lambda stage: observer.entered(plan, stage), tries=attempt
        )
        failure = finished.record.failure
        if failure is None or not failure.retryable or attempt == last:
            return finished
        log.warning("try %d of %d failed: %s: %s", attempt, last, failure.error, failure.message)
    raise AssertionError("unreachable")
