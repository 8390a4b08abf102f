"""Tinker: samples as `Datum`s with our advantages, or a group as tinker-cookbook's `TrajectoryGroup`.

A `Datum` is shifted: position i has the input token i and the target token i + 1, with the target's logprob, advantage
and mask. Rollouts that do not count are left out of the data; those that were not graded are the group's
`rollout_errors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np

from rollwright.groups import GroupAdvantages, rollout_weights
from rollwright.integrations.arrays import views
from rollwright.integrations.classes import module
from rollwright.integrations.record import Rollout, comparable, parts
from rollwright.types import Sample

__all__ = ["data", "datum_fields", "trajectory_group", "transitions"]


def datum_fields(
    group: Sequence[Rollout], advantages: GroupAdvantages, *, each: Literal["token", "rollout"] = "token"
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Input tokens and `loss_fn_inputs` of each `Datum`, all of length L - 1.

    `each`: what counts once in a loss that is summed over tokens. With `rollout` every token's advantage is divided by
    the number of trained tokens of its rollout. Raises `UsageError` for logprobs that `record.comparable` refuses.
    """
    samples = [sample for rollout in group for sample in comparable(rollout)]
    for sample, weight in zip(samples, rollout_weights(samples), strict=True):
        advantage = advantages.of(sample)
        if advantage is None:
            continue
        tokens, mask, logprobs = views(sample)
        targets = mask[1:].astype(np.float32)
        scale = weight / float(targets.sum()) if each == "rollout" else 1.0
        yield (
            tokens[:-1].tolist(),
            {
                "target_tokens": tokens[1:].astype(np.int64),
                "logprobs": logprobs[1:].astype(np.float32),
                "advantages": targets * np.float32(advantage * scale),
                "mask": targets,
            },
        )


def data(
    group: Sequence[Rollout], advantages: GroupAdvantages, *, each: Literal["token", "rollout"] = "token"
) -> list[Any]:
    """`tinker.Datum`s. Needs tinker."""
    tinker = module("tinker")
    # The chunk is constructed without validation: it would copy its list once more.
    return [
        tinker.Datum(
            model_input=tinker.ModelInput(chunks=[tinker.EncodedTextChunk.model_construct(tokens=tokens)]),
            loss_fn_inputs={name: tinker.TensorData.from_numpy(values) for name, values in inputs.items()},
        )
        for tokens, inputs in datum_fields(group, advantages, each=each)
    ]


def transitions(samples: Sequence[Sample]) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Observation, action and the action's logprobs, one for each run of trained tokens."""
    for sample in samples:
        tokens, logprobs = memoryview(sample.tokens), memoryview(sample.logprobs)
        for start, end in sample.trained_spans():
            yield tokens[:start].tolist(), tokens[start:end].tolist(), cast("list[float]", logprobs[start:end].tolist())


def trajectory_group(group: Sequence[Rollout], *, quorum: int | None = None) -> Any | None:
    """tinker-cookbook's `TrajectoryGroup`, whose own `compute_advantages` and `trajectory_to_data` take it from there.

    None below the quorum (see `record.parts`). A rollout's samples become one trajectory; where one does not continue
    the one before, `trajectory_to_data` begins a new datum. Raises `UsageError` for logprobs that `record.comparable`
    refuses. Needs tinker-cookbook.
    """
    tinker = module("tinker")
    completers = module("tinker_cookbook.completers")
    made = module("tinker_cookbook.rl.types")
    kept = [part for part in parts(group, quorum=quorum) if part.counts]
    if not kept:
        return None
    trajectories: list[Any] = []
    for part in kept:
        moves = [
            made.Transition(
                ob=tinker.ModelInput.from_ints(observation),
                ac=completers.TokensWithLogprobs(tokens=action, maybe_logprobs=logprobs),
                reward=0.0,
                episode_done=False,
            )
            for observation, action, logprobs in transitions(part.samples)
        ]
        trajectories.append(
            made.Trajectory(
                transitions=moves,
                final_ob=tinker.ModelInput.empty(),
                stop_reason=part.rollout.record.stop_reason or None,
            )
        )
    failures = [rollout.record.failure for rollout in group if rollout.record.failure is not None]
    return made.TrajectoryGroup(
        trajectories_G=trajectories,
        final_rewards_G=[part.rollout.record.reward for part in kept],
        metrics_G=[{} for _ in kept],
        rollout_errors=[made.RolloutError(error_type=each.error, error_message=each.message) for each in failures],
    )
