"""OpenRLHF: the rollouts of one prompt as the results of `AgentExecutorBase.execute`.

OpenRLHF makes its baseline by position: every prompt has `n_samples_per_prompt` results, and there is no way to say
that one is missing. So this takes whole groups. The place of a rollout that was not graded is held by a result without
actions, which trains nothing, and whose reward is the mean of the graded ones: that leaves the group's mean as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Any

from rollwright.integrations.arrays import logprob_list
from rollwright.integrations.record import Rollout, baselined, longest, stand_in, trained

__all__ = ["responses"]


def responses(group: Sequence[Rollout], *, prompt: str, label: str, filler: int = 0) -> list[dict[str, Any]]:
    """One result per rollout, in order. `prompt` and `label` are what `execute` was called with.

    OpenRLHF has one row a rollout: of several samples the one that trains the most tokens is taken, and
    `extra_logs["dropped_tokens"]` counts the trained tokens of the others. A group in which fewer than two rollouts
    count trains nothing. `filler` is the token of a row that stands in for a rollout without one.
    """
    counting = {each.record.rollout for each in baselined(group)}
    rewards = [each.record.reward or 0.0 for each in group if each.record.rollout in counting]
    mean = fsum(rewards) / len(rewards) if rewards else 0.0
    return [
        _response(each, each.record.rollout in counting, mean, filler) | {"prompt": prompt, "label": label}
        for each in group
    ]


def _response(rollout: Rollout, counts: bool, mean: float, filler: int) -> dict[str, Any]:
    samples = trained(rollout) if counts else []
    sample = longest(samples) if samples else stand_in(rollout, filler=filler)
    reward = rollout.record.reward if counts else mean
    spans = sample.trained_spans()
    dropped = sum(end - start for each in samples if each is not sample for start, end in each.trained_spans())
    return {
        "reward": reward,
        "scores": reward,
        "observation_tokens": sample.tokens.tolist(),
        "action_ranges": spans,
        "rollout_log_probs": logprob_list(sample),
        "truncated": sample.truncated,
        "extra_logs": {"ungraded": float(not counts), "dropped_tokens": float(dropped)},
        "images": None,
        "mm_train_inputs": None,
    }
