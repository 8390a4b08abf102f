"""SkyRL: rollouts as one `GeneratorOutput` in step-wise form, what `GeneratorInterface.generate` returns.

Each sample is a row; the rows of a rollout stand together and the last has `is_last_step`, so that SkyRL gives all of
them the advantage of their rollout (set `generator.step_wise_trajectories`). A rollout that does not count has no row,
and neither has a group of which too few count: in step-wise form a trajectory may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollwright.errors import InfraError
from rollwright.integrations.arrays import response_lists
from rollwright.integrations.record import Rollout, counts, parts_by_group

__all__ = ["generator_output"]


def generator_output(
    trajectories: Iterable[tuple[Any, Rollout]], *, filler: int = 0, quorum: int | None = None
) -> dict[str, Any]:
    """`trajectories`: SkyRL's own `TrajectoryID` of each rollout, with it.

    The rollouts of an instance are to be of one group, which is looked at as a whole (`quorum`: see `record.parts`; 1
    for an evaluation). Every row has its rollout's reward. `filler` is the token of a row that stands in for a rollout
    without one (it has no loss).

    Raises `InfraError` when nothing is left (SkyRL has no empty batch), and `UsageError` for logprobs that
    `record.comparable` refuses.
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
    pairs = list(trajectories)
    ungraded = sum(not counts(rollout) for _, rollout in pairs)
    kept = 0
    for (trajectory_id, rollout), part in zip(
        pairs, parts_by_group((rollout for _, rollout in pairs), quorum=quorum), strict=True
    ):
        if not part.counts:
            continue
        kept += 1
        samples = part.rows(filler=filler)
        for number, sample in enumerate(samples, start=1):
            values = (
                *response_lists(sample),
                rollout.record.reward,
                "length" if sample.truncated else "stop",
                trajectory_id,
                number == len(samples),
            )
            for column, value in zip(columns, values, strict=True):
                output[column].append(value)
    if not kept:
        raise InfraError(
            f"of {len(pairs)} rollouts {len(pairs) - ungraded} count, and in no group enough of them: "
            "there is no batch to train"
        )
    metrics = {
        "rollwright/rollouts": len(pairs),
        "rollwright/ungraded": ungraded,
        "rollwright/below_quorum": len(pairs) - ungraded - kept,
    }
    return output | {"rollout_metrics": metrics}
