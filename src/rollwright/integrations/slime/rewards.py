"""slime's hooks on rewards: one advantage per rollout, from the rollouts that count, and which groups to keep."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rollwright.groups import Estimator, GroupAdvantages, Member, advantages
from rollwright.integrations.slime.samples import is_graded, note_of, rollout_of

__all__ = ["keep_informative", "post_process_rewards"]

_NORMALIZED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""slime's estimators that take a group's baseline off."""


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """slime's `--custom-reward-post-process-path`: raw and normalized reward of each sample, in order.

    A rollout that was cut into several samples is one value of its group; a rollout that does not count (ABORTED, or
    below the quorum) has advantage 0 and moves nobody's baseline. With estimators that have no group baseline, and with
    slime's `--disable-rewards-normalization`, the raw rewards are handed through.
    """
    raw = [_raw(args, sample) for sample in samples]
    kind = getattr(args, "advantage_estimator", "grpo")
    if kind not in _NORMALIZED or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    with_deviation = kind != "reinforce_plus_plus_baseline" and getattr(args, "grpo_std_normalization", True)
    estimator: Estimator = "grpo" if with_deviation else "dr_grpo"
    groups: dict[Any, list[Any]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    made = {group: _group(args, members, estimator).advantages for group, members in groups.items()}
    return raw, [made[sample.group_index].get(rollout_of(sample), 0.0) for sample in samples]


def keep_informative(args: Any, samples: Sequence[Any], **_: Any) -> Any:
    """slime's `--dynamic-sampling-filter-path`, as DAPO has it: is this a group whose rewards say which rollouts were
    better? `samples`: of each rollout a sample or a list of them. Returns slime's `DynamicFilterOutput`.

    Only what counts is looked at: with its failures a group of equal rewards is none that says something.
    """
    found = _group(args, list(_flat(samples)), "grpo")
    output = importlib.import_module("slime.rollout.filter_hub.base_types").DynamicFilterOutput
    return output(keep=found.informative, reason=None if found.informative else found.status)


def _group(args: Any, samples: Iterable[Any], estimator: Estimator) -> GroupAdvantages:
    """Of the samples of one group. The quorum is `grading.group_quorum`, as its rollouts were made with it."""
    members: dict[str, Member] = {}
    quorum = 1
    for sample in samples:
        counts = bool(note_of(sample).get("counts_in_baseline", True)) and is_graded(sample)
        member = Member(rollout_id=rollout_of(sample), reward=_raw(args, sample), counts=counts)
        members.setdefault(member.rollout_id, member)
        quorum = max(quorum, note_of(sample).get("quorum", 1))
    return advantages(members.values(), estimator=estimator, quorum=quorum)


def _raw(args: Any, sample: Any) -> float:
    """slime wants a number of every sample."""
    return float(sample.get_reward_value(args)) if is_graded(sample) else 0.0


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    for each in samples:
        if isinstance(each, list):
            yield from each
        else:
            yield each
