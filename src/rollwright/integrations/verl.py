"""verl: a rollout as `AgentLoopOutput`s, what `AgentLoopBase.run` returns.

Fan-out is a list whose last output carries the session: verl makes the GRPO advantage of it and gives the others of
the session the same. A rollout that was not graded is an empty list, which verl takes for a session that is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollwright.integrations.arrays import response_lists
from rollwright.integrations.classes import module
from rollwright.integrations.record import Rollout, rows, steps

__all__ = ["output_fields", "outputs"]


def output_fields(
    rollout: Rollout, *, filler: int = 0, step_of: Callable[[str], int] | None = None
) -> list[dict[str, Any]]:
    """The arguments of each `AgentLoopOutput`, in the order of the samples.

    `filler` is the token of a row that stands in for a rollout without one (it has no loss). `step_of` makes verl's
    global step of a weight version; without it verl is told none. Raises `UsageError` where it cannot.
    """
    record = rollout.record
    if record.reward is None or not record.counts_in_baseline:
        return []
    found: list[dict[str, Any]] = []
    for sample in rows(rollout, filler=filler):
        prompt, response, mask, logprobs = response_lists(sample)
        low, high = (step_of and steps([sample], step_of)) or (None, None)
        found.append(
            {
                "prompt_ids": prompt,
                "response_ids": response,
                "response_mask": mask,
                "response_logprobs": logprobs,
                "reward_score": record.reward,
                "num_turns": record.turns,
                "extra_fields": {
                    "min_global_steps": low,
                    "max_global_steps": high,
                    "reward_extra_info": {},
                    "rollout_id": record.rollout,
                    "task_id": record.task_id,
                    "segment_index": sample.segment_index,
                    "truncated": sample.truncated,
                },
            }
        )
    return found


def outputs(rollout: Rollout, *, filler: int = 0, step_of: Callable[[str], int] | None = None) -> list[Any]:
    """`verl.experimental.agent_loop.agent_loop.AgentLoopOutput`s. Needs verl."""
    verl = module("verl.experimental.agent_loop.agent_loop")
    spent = rollout.record.seconds.get("agent_done", 0.0)
    # Constructed without validation: it would copy every list once more.
    return [
        verl.AgentLoopOutput.model_construct(**fields, metrics=verl.AgentLoopMetrics(generate_sequences=spent))
        for fields in output_fields(rollout, filler=filler, step_of=step_of)
    ]
