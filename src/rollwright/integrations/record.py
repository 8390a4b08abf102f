"""The neutral record that every converter reads: one rollout as it ended, with its samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from rollwright.errors import UsageError
from rollwright.groups import Estimator, GroupAdvantages, Member, advantages
from rollwright.store import RolloutRecord, RunDir
from rollwright.types import Sample

__all__ = [
    "Rollout",
    "StoredRollout",
    "baselined",
    "group_advantages",
    "longest",
    "rows",
    "stand_in",
    "steps",
    "stored_groups",
    "trained",
]


class Rollout(Protocol):
    """One attempt that has ended, graded or not. `rollwright.run.Attempt` is one, and so is a stored rollout."""

    @property
    def record(self) -> RolloutRecord: ...

    @property
    def samples(self) -> Sequence[Sample]:
        """Empty when it is ungraded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A rollout of a run folder."""

    record: RolloutRecord
    samples: Sequence[Sample]


def stored_groups(run: RunDir) -> Iterator[list[StoredRollout]]:
    """The groups of a run folder, ungraded rollouts in them, by name and attempt. Raises `StoreError`."""
    members = [record for record in run.records() if not record.superseded]
    records = sorted(members, key=lambda record: (record.group, record.attempt))
    for _, group in groupby(records, key=lambda record: record.group):
        yield [
            StoredRollout(record=record, samples=run.samples(record.rollout) if record.graded else ())
            for record in group
        ]


def group_advantages(
    group: Iterable[Rollout], *, estimator: Estimator = "grpo", quorum: int = 2, epsilon: float = 1e-6
) -> GroupAdvantages:
    """`rollwright.groups.advantages` of rollouts. Raises `UsageError`."""
    members = [
        Member(rollout_id=each.record.rollout, reward=each.record.reward, counts=each.record.counts_in_baseline)
        for each in group
    ]
    return advantages(members, estimator=estimator, quorum=quorum, epsilon=epsilon)


def trained(rollout: Rollout) -> list[Sample]:
    """The samples that may enter the loss."""
    return [sample for sample in rollout.samples if sample.trainable and sample.reward is not None]


def baselined(group: Iterable[Rollout], *, quorum: int = 2) -> list[Rollout]:
    """What a trainer that makes its own baseline may be given of a group: only what counts, and nothing of a group in
    which fewer than `quorum` rollouts count (several trainers take a lone reward for its advantage)."""
    kept = [each for each in group if each.record.reward is not None and each.record.counts_in_baseline]
    return kept if len(kept) >= quorum else []


def longest(samples: Sequence[Sample]) -> Sample:
    """The sample that trains the most tokens; of several, the oldest."""
    return max(samples, key=lambda sample: sample.loss_mask.tobytes().count(1))


def rows(rollout: Rollout, *, filler: int) -> list[Sample]:
    """A rollout for a trainer that learns its reward from its rows: what it trains, or else its stand-in."""
    return trained(rollout) or [stand_in(rollout, filler=filler)]


def stand_in(rollout: Rollout, *, filler: int) -> Sample:
    """A row without loss, for a rollout that must be in the batch and trains nothing.

    It is the rollout's first sample without its mask, or two `filler` tokens where it has none: one as the prompt, one
    as the reply.
    """
    record = rollout.record
    made = Sample(
        task_id=record.task_id,
        group_id=record.group,
        rollout_id=record.rollout,
        segment_index=0,
        n_segments=1,
        role="main",
        tokens=array("i", [filler, filler]),
        loss_mask=array("b", bytes(2)),
        logprobs=array("d", bytes(16)),
        versions=[],
        prompt_length=1,
        reward=record.reward,
        weight=1.0,
        trainable=False,
        counts_in_baseline=record.counts_in_baseline,
    )
    first = rollout.samples[0] if rollout.samples else made
    if first.prompt_length == len(first.tokens):
        return made  # the whole of it is prompt, and every trainer wants a reply
    length = len(first.tokens)
    return replace(first, loss_mask=array("b", bytes(length)), logprobs=array("d", bytes(8 * length)), trainable=False)


def steps(samples: Iterable[Sample], step_of: Callable[[str], int]) -> tuple[int, int] | None:
    """The oldest and the newest trainer step that trained tokens of these samples were sampled at; None: no token.

    `step_of` makes a step of a weight version. Raises `UsageError` where it cannot.
    """
    versions = {span.version for sample in samples for span in sample.versions}
    try:
        found = [step_of(version) for version in versions]
    except ValueError as error:
        raise UsageError(f"a weight version is no trainer step: {error}; give `step_of`") from error
    return (min(found), max(found)) if found else None
