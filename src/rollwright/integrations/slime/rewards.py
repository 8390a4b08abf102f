"""slime's `--custom-reward-post-process-path`: one advantage per rollout, from the rollouts that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollwright.groups import Estimator, Member, advantages
from rollwright.integrations.slime.samples import is_graded, note_of, rollout_of

__all__ = ["post_process_rewards"]

_NORMALIZED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""slime's estimators that take a group's baseline off."""


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw and normalized reward of each sample, in order.

    A rollout that was cut into several samples is one value of its group; a rollout that does not count (ABORTED, or
    below the quorum) has advantage 0 and moves nobody's baseline. With estimators that have no group baseline, and with
    slime's `--disable-rewards-normalization`, the raw rewards are handed through.
    """
    raw = [float(sample.get_reward_value(args)) if is_graded(sample) else 0.0 for sample in samples]
    kind = getattr(args, "advantage_estimator", "grpo")
    if kind not in _NORMALIZED or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    with_deviation = kind != "reinforce_plus_plus_baseline" and getattr(args, "grpo_std_normalization", True)
    estimator: Estimator = "grpo" if with_deviation else "dr_grpo"
    groups: dict[Any, dict[str, Member]] = {}
    quorums: dict[Any, int] = {}
    """`grading.group_quorum`, as the rollouts were made with it."""
    for sample, reward in zip(samples, raw, strict=True):
        member = Member(rollout_id=rollout_of(sample), reward=reward, counts=_counts(sample))
        groups.setdefault(sample.group_index, {}).setdefault(member.rollout_id, member)
        quorums[sample.group_index] = max(quorums.get(sample.group_index, 1), note_of(sample).get("quorum", 1))
    made = {
        group: advantages(members.values(), estimator=estimator, quorum=quorums[group]).advantages
        for group, members in groups.items()
    }
    return raw, [made[sample.group_index].get(rollout_of(sample), 0.0) for sample in samples]


def _counts(sample: Any) -> bool:
    return bool(note_of(sample).get("counts_in_baseline", True)) and is_graded(sample)
