"""Group statistics: one advantage for each rollout of a group, and weights by which each rollout counts once.

A rollout that was cut into several samples is one observation. What was not graded, or does not count in the baseline,
changes nothing and has no advantage: it cannot be trained by mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, hypot, isfinite, sqrt
from typing import Literal

from rollwright.errors import UsageError
from rollwright.types import Sample

__all__ = [
    "DEFAULT_QUORUM",
    "Estimator",
    "GroupAdvantages",
    "GroupStatus",
    "Member",
    "advantages",
    "members_of",
    "quorum_of",
    "rollout_weights",
]

DEFAULT_QUORUM = 2

Estimator = Literal["grpo", "dr_grpo", "rloo"]
"""grpo: (reward - mean) / (deviation + epsilon). dr_grpo: reward - mean. rloo: reward - mean of the other rollouts."""

GroupStatus = Literal["ok", "constant", "below_quorum"]
"""ok: it says which rollouts were better. constant: all that count have one reward, so every advantage is 0 (DAPO drops
such a group). below_quorum: too few rollouts count, so there are no advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout of a group."""

    rollout_id: str
    reward: float | None
    """None: it was not graded."""
    counts: bool = True
    """May enter the group's mean and deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """What a group teaches."""

    status: GroupStatus
    advantages: Mapping[str, float]
    """Rollout → advantage, of those that count; empty below the quorum. They sum to 0."""
    mean: float
    """Of the rewards that count; 0.0 when none does."""
    deviation: float
    """Sample deviation (n - 1) of the rewards that count; 0.0 for fewer than two."""
    counted: int
    total: int
    """Rollouts in the group, with those that do not count."""

    @property
    def informative(self) -> bool:
        """Some advantage is not 0. DAPO's dynamic sampling keeps these groups only."""
        return self.status == "ok"

    def of(self, sample: Sample) -> float | None:
        """The advantage of each trained token of a sample; None: it is not to be trained."""
        return self.advantages.get(sample.rollout_id) if sample.trainable else None


def members_of(samples: Iterable[Sample]) -> list[Member]:
    """The rollouts that samples come from, each once, in order of their first sample.

    Raises `UsageError` when two samples of one rollout disagree about its reward, or are of different groups.
    """
    members: dict[str, Member] = {}
    groups: dict[str, str] = {}
    for sample in samples:
        counts = sample.counts_in_baseline
        member = Member(rollout_id=sample.rollout_id, reward=sample.reward, counts=counts)
        if members.setdefault(member.rollout_id, member) != member:
            raise UsageError(f"the samples of rollout {member.rollout_id} disagree about its reward")
        if groups.setdefault(member.rollout_id, sample.group_id) != sample.group_id:
            raise UsageError(f"the samples of rollout {member.rollout_id} are of different groups")
    if len(set(groups.values())) > 1:
        raise UsageError(f"samples of {len(set(groups.values()))} groups; advantages are made group by group")
    return list(members.values())


def quorum_of(setting: float, attempts: int) -> int:
    """How many rollouts of a group of `attempts` must count. `setting`: a number of them (an int, never more than the
    group has) or a share of the group (a float below 1)."""
    wanted = setting if isinstance(setting, int) else ceil(setting * attempts)
    return max(1, min(wanted, attempts))


def advantages(
    members: Iterable[Member], *, estimator: Estimator = "grpo", quorum: int = 2, epsilon: float = 1e-6
) -> GroupAdvantages:
    """One advantage per rollout of one group.

    `quorum`: how many rollouts must count for the group to say anything (with 1, a rollout alone has advantage 0).
    `epsilon` is added to the deviation (`grpo` only). Raises `UsageError` for a rollout given twice, a reward that is
    not finite, and a quorum below 1.
    """
    if quorum < 1:
        raise UsageError(f"quorum is {quorum}; at least one rollout must count")
    everyone = list(members)
    twice = [name for name, count in Counter(member.rollout_id for member in everyone).items() if count > 1]
    if twice:
        raise UsageError(f"rollout {twice[0]} is in the group twice")
    rewards = {member.rollout_id: member.reward for member in everyone if member.reward is not None and member.counts}
    for name, reward in rewards.items():
        if not isfinite(reward):
            raise UsageError(f"the reward of rollout {name} is {reward}")
    count = len(rewards)
    # An exact sum and a sorted spread: the order of the rollouts changes nothing.
    mean = fsum(rewards.values()) / count if count else 0.0
    constant = len(set(rewards.values())) <= 1
    spread = sorted(reward - mean for reward in rewards.values())
    deviation = 0.0 if constant else hypot(*spread) / sqrt(count - 1)
    if count < quorum:
        status: GroupStatus = "below_quorum"
        values: dict[str, float] = {}
    elif constant:
        status, values = "constant", dict.fromkeys(rewards, 0.0)
    else:
        status = "ok"
        scale = {"grpo": 1 / (deviation + epsilon), "dr_grpo": 1.0, "rloo": count / (count - 1)}[estimator]
        values = {name: (reward - mean) * scale for name, reward in rewards.items()}
    return GroupAdvantages(
        status=status,
        advantages=values,
        mean=mean,
        deviation=deviation,
        counted=count,
        total=len(everyone),
    )


def rollout_weights(samples: Sequence[Sample]) -> list[float]:
    """For each sample its share of its rollout's trained tokens, so that every rollout weighs 1 in all.

    Shares are of the samples given: leave one out, and the others of its rollout make up for it. A sample that is not
    trainable weighs 0. Divide by a sample's trained tokens for the weight of each of them.
    """
    trained = [sample.loss_mask.tobytes().count(1) if sample.trainable else 0 for sample in samples]
    totals: Counter[str] = Counter()
    for sample, count in zip(samples, trained, strict=True):
        totals[sample.rollout_id] += count
    return [count / totals[sample.rollout_id] if count else 0.0 for sample, count in zip(samples, trained, strict=True)]
