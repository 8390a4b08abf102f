"""An executor that rolls nothing out: a script says how each rollout ends, and when. For tests of schedulers."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel

from rollwright.gateway.gate import PauseMode
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Observer, Room, Store
from rollwright.store import RolloutRecord
from rollwright.types import SCHEMA, AgentView, Failure, GraderView, Sample, Stage, Task, VersionSpan

__all__ = ["ScriptedExecutor", "plain_task", "scripted_attempt"]

Ending = Callable[[RolloutPlan], Awaitable[float | None]]
"""Takes as long as the rollout, and returns its reward; None: our own failure."""


@dataclass
class ScriptedExecutor:
    """Each rollout ends as `ending` says, or as cut; its tokens are of the weights it began and ended with."""

    ending: Ending
    told: list[str] = field(default_factory=lambda: ["v0"])
    """The weight versions, in order."""
    running: set[str] = field(default_factory=set[str])
    seen: list[str] = field(default_factory=list[str])
    """Every rollout that was begun, by name."""
    most: int = 0
    """The most rollouts that ever ran at once."""
    paused: bool = False
    room: Room = field(default_factory=lambda: Room(4))
    store: Store | None = None
    """Where rollouts go, if anywhere."""
    withdrawn: dict[str, Failure] = field(default_factory=dict[str, Failure])
    """What `withdraw` was called with."""
    proved: list[tuple[str, tuple[str, ...]]] = field(default_factory=list[tuple[str, tuple[str, ...]]])
    """What `prove` was called with: task, stored rollouts."""
    taken_back: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    """As if by a control."""

    async def run(self, plan: RolloutPlan, observer: Observer, *, cut: anyio.Event | None = None) -> Attempt:
        self.seen.append(plan.name)
        self.running.add(plan.name)
        self.most = max(self.most, len(self.running))
        observer.started(plan)
        began = self.told[-1]
        ends: list[float | None] = []
        try:
            async with anyio.create_task_group() as group:
                if cut is not None:
                    group.start_soon(_cancel_at, cut, group.cancel_scope)
                ends.append(await self.ending(plan))
                group.cancel_scope.cancel()
        finally:
            self.running.discard(plan.name)
        failure = "RolloutCut" if not ends else "SandboxGone" if ends[0] is None else None
        versions = tuple(dict.fromkeys((began, self.told[-1])))
        attempt = scripted_attempt(plan, reward=ends[0] if ends else None, failure=failure, versions=versions)
        if self.store is not None:
            self.store.store_versions(self.told)
            folder = self.store.begin(plan.name)
            outcome = "graded" if attempt.record.graded else "ungraded"
            folder.write_json(folder.verdict, {"schema": SCHEMA, outcome: {}})
            self.store.store(attempt.record, folder, list(attempt.samples))
        observer.stored(plan, attempt.record)
        return attempt

    async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> None:
        await anyio.lowlevel.checkpoint()
        self.proved.append((plan.task_name, tuple(earlier)))

    async def withdraw(self, names: Collection[str], failure: Failure) -> None:
        await anyio.lowlevel.checkpoint()
        self.withdrawn |= dict.fromkeys(names, failure)
        if self.store is not None:
            self.store.withdraw(names, failure)

    @property
    def versions(self) -> Sequence[str]:
        return self.told

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True

    async def load_weights(self, folder: Path, version: str) -> None:
        assert self.paused

    async def resume(self, version: str | None) -> None:
        self.paused = False
        if version is not None:
            self.told = [*(other for other in self.told if other != version), version]
            if self.store is not None:
                self.store.store_versions(self.told)


async def _cancel_at(cut: anyio.Event, scope: anyio.CancelScope) -> None:
    await cut.wait()
    scope.cancel()


def scripted_attempt(
    plan: RolloutPlan, *, reward: float | None, failure: str | None = None, versions: Sequence[str] = ("v0",)
) -> Attempt:
    """A stored rollout of two tokens, of which one was sampled; of none when `failure` names an error."""
    graded = failure is None
    record = RolloutRecord(
        rollout=plan.name,
        task=plan.task_name,
        task_id=plan.task.id,
        attempt=plan.attempt,
        epoch=plan.epoch,
        status=("resolved" if reward else "unresolved") if graded else "ungraded",
        reward=reward if graded else None,
        trainable=graded,
        counts_in_baseline=graded,
        failure=None
        if failure is None
        else Failure(stage=Stage.AGENT_DONE, error=failure, message="as scripted", fault="infra", retryable=False),
        versions=tuple(versions),
        quorum=plan.quorum,
    )
    sample = Sample(
        task_id=plan.task.id,
        group_id=plan.group,
        rollout_id=plan.name,
        segment_index=0,
        n_segments=1,
        role="main",
        tokens=array("i", [1, 2]),
        loss_mask=array("b", [0, 1]),
        logprobs=array("d", [0.0, -0.5]),
        versions=[VersionSpan(versions[-1], 1, 2)],
        prompt_length=1,
        reward=reward,
        weight=1.0,
        trainable=True,
        counts_in_baseline=True,
    )
    return Attempt(plan=plan, record=record, samples=[sample] if graded else [])


def plain_task(name: str) -> Task:
    """A task of which only the name matters."""
    return Task(
        agent=AgentView(id=name, image="host", workdir="/work", prompt="Do it."),
        grader=GraderView(source_id=name, protocol="scaleswe", payload={}),
    )
