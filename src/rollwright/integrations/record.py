"""The neutral record that every converter reads: one rollout as it ended, with its samples.

What of it is trained, and whether its reward counts, is decided here for all of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from rollwright.errors import UsageError
from rollwright.groups import Estimator, GroupAdvantages, Member, advantages
from rollwright.quorum import group_quorum
from rollwright.store import RolloutRecord, RunDir
from rollwright.types import Sample

__all__ = [
    "Part",
    "Rollout",
    "StoredRollout",
    "baselined",
    "comparable",
    "counts",
    "group_advantages",
    "longest",
    "needed",
    "parts",
    "parts_by_group",
    "stand_in",
    "steps",
    "stored_groups",
    "trained",
    "trained_versions",
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
    """The groups of a run folder, ungraded rollouts in them, by name and attempt. Raises `StoreError`, and
    `ConfigError` for what is no run folder."""
    run.resolved()
    members = [record for record in run.records() if not record.superseded]
    records = sorted(members, key=lambda record: (record.group, record.attempt))
    for _, group in groupby(records, key=lambda record: record.group):
        yield [
            StoredRollout(record=record, samples=run.samples(record.rollout) if record.graded else ())
            for record in group
        ]


def counts(rollout: Rollout) -> bool:
    """Its reward is somebody's verdict, and may enter the baseline of its group."""
    record = rollout.record
    return record.graded and record.reward is not None and record.counts_in_baseline


def trained(rollout: Rollout) -> list[Sample]:
    """The samples that may enter the loss. Whether enough of its group counts, `parts` and `group_advantages` say."""
    if not counts(rollout) or not rollout.record.trainable:
        return []
    samples = rollout.samples
    return [each for each in samples if each.trainable and each.counts_in_baseline and each.reward is not None]


def comparable(rollout: Rollout) -> list[Sample]:
    """`trained`, for a trainer that takes logprobs for those of the distribution that was sampled from, and has no
    place where it would be told that they are not.

    Raises `UsageError` for logprobs before a temperature that is not 1: every importance ratio of them would be wrong.
    """
    samples = trained(rollout)
    for sample in samples:
        if sample.logprob_kind == "raw" and sample.temperature != 1:
            raise UsageError(
                f"rollout {sample.rollout_id} was sampled at temperature {sample.temperature:g} and has logprobs from "
                "before the temperature (raw): a trainer would make wrong importance ratios of them. Set "
                'engine.vllm.logprob_kind = "behaviour" (and start vLLM with --logprobs-mode processed_logprobs), '
                'engine.sglang.logprob_kind = "temperature", or sampling.temperature = 1'
            )
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rollout is to a trainer that makes the baseline of its group."""

    rollout: Rollout
    counts: bool
    """Its reward is in the baseline. False for all of a group below its quorum."""
    samples: Sequence[Sample]
    """What is trained of it."""

    def rows(self, *, filler: int) -> list[Sample]:
        """For a trainer that learns its reward from its rows: what it trains, or else its stand-in."""
        return list(self.samples) or [stand_in(self.rollout, filler=filler)]


def parts(group: Sequence[Rollout], *, quorum: int | None = None) -> list[Part]:
    """Each rollout of one group, in order, for a trainer that makes its own baseline.

    `quorum`: how many must count for any to; without it the one that the rollouts were made with
    (`grading.group_quorum`), and at least two of several: trainers take a lone reward for its advantage. With 1, as for
    an evaluation, each speaks for itself. Raises `UsageError` (see `comparable`).
    """
    enough = sum(map(counts, group)) >= needed(group, quorum)
    made = ((rollout, enough and counts(rollout)) for rollout in group)
    return [Part(rollout=each, counts=so, samples=comparable(each) if so else ()) for each, so in made]


def parts_by_group(rollouts: Iterable[Rollout], *, quorum: int | None = None) -> list[Part]:
    """`parts` of a batch of several groups, in the order of the batch."""
    everyone = list(rollouts)
    groups: dict[str, list[Rollout]] = {}
    for each in everyone:
        groups.setdefault(each.record.group, []).append(each)
    made = {name: iter(parts(group, quorum=quorum)) for name, group in groups.items()}
    return [next(made[each.record.group]) for each in everyone]


def needed(group: Sequence[Rollout], quorum: int | None) -> int:
    """How many rollouts of a group must count: see `parts`."""
    return group_quorum([each.record for each in group]) if quorum is None else quorum


def group_advantages(
    group: Sequence[Rollout], *, estimator: Estimator = "grpo", quorum: int | None = None, epsilon: float = 1e-6
) -> GroupAdvantages:
    """`rollwright.groups.advantages` of rollouts. `quorum`: as for `parts`. Raises `UsageError`."""
    members = [Member(rollout_id=each.record.rollout, reward=each.record.reward, counts=counts(each)) for each in group]
    return advantages(members, estimator=estimator, quorum=needed(group, quorum), epsilon=epsilon)


def baselined(group: Sequence[Rollout], *, quorum: int | None = None) -> list[Rollout]:
    """What a trainer that makes its own baseline may be given of a group: what counts, by the rule of `parts`."""
    return [part.rollout for part in parts(group, quorum=quorum) if part.counts]


def longest(samples: Sequence[Sample]) -> Sample:
    """The sample that trains the most tokens; of several, the oldest."""
    return max(samples, key=lambda sample: sample.loss_mask.tobytes().count(1))


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


def trained_versions(sample: Sample) -> list[str]:
    """The weight versions that its trained tokens come from, each once, in their order."""
    mask = sample.loss_mask.tobytes()
    return list(dict.fromkeys(span.version for span in sample.versions if mask.find(1, span.start, span.end) >= 0))


def steps(samples: Iterable[Sample], step_of: Callable[[str], int]) -> tuple[int, int] | None:
    """The oldest and the newest trainer step that trained tokens of these samples were sampled at; None: no token.

    `step_of` makes a step of a weight version. Raises `UsageError` where it cannot.
    """
    versions = {version for sample in samples for version in trained_versions(sample)}
    try:
        found = [step_of(version) for version in versions]
    except ValueError as error:
        raise UsageError(f"a weight version is no trainer step: {error}; give `step_of`") from error
    return (min(found), max(found)) if found else None
