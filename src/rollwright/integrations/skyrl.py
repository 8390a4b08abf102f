"""SkyRL: rollouts as one `GeneratorOutput` in step-wise form, what `GeneratorInterface.generate` returns.

Each sample is a row; the rows of a rollout stand together and the last has `is_last_step`, so that SkyRL gives all of
them the advantage of their rollout (set `generator.step_wise_trajectories`). A rollout that was not graded has no row:
in step-wise form a trajectory may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollwright.errors import UsageError
from rollwright.integrations.arrays import response_lists
from rollwright.integrations.record import Rollout, rows

__all__ = ["generator_output"]


def generator_output(trajectories: Iterable[tuple[Any, Rollout]], *, filler: int = 0) -> dict[str, Any]:
    """`trajectories`: SkyRL's own `TrajectoryID` of each rollout, with it.

    Every row has its rollout's reward. `filler` is the token of a row that stands in for a rollout without one (it has
    no loss). Raises `UsageError` when no rollout was graded: SkyRL has no empty batch.
    """
    columns = (
        "prompt_token_ids",
        "response_ids",
        "loss_masks",
        "rollout_logprobs",
        "rewards",
        "stop_reasons",
        "trajectory_ids",
        "is_last_step",
    )
    output: dict[str, Any] = {column: [] for column in columns}
    lost = total = 0
    for trajectory_id, rollout in trajectories:
        total += 1
        reward = rollout.record.reward
        if reward is None or not rollout.record.counts_in_baseline:
            lost += 1
            continue
        samples = rows(rollout, filler=filler)
        for number, sample in enumerate(samples, start=1):
            values = (
                *response_lists(sample),
                reward,
                "length" if sample.truncated else "stop",
                trajectory_id,
                number == len(samples),
            )
            for column, value in zip(columns, values, strict=True):
                output[column].append(value)
    if not output["response_ids"]:
        raise UsageError(f"none of {total} rollouts was graded: there is no batch to train")
    return output | {"rollout_metrics": {"rollwright/rollouts": total, "rollwright/ungraded": lost}}
