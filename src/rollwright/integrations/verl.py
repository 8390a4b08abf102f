"""verl: a rollout as `AgentLoopOutput`s, what `AgentLoopBase.run` returns.

Fan-out is a list whose last output carries the session: verl makes the GRPO advantage of it and gives the others of
the session the same. A rollout that does not count is an empty list, which verl takes for a session that is missing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rollwright.errors import InfraError
from rollwright.integrations.arrays import response_lists
from rollwright.integrations.classes import module
from rollwright.integrations.gathered import Gathered
from rollwright.integrations.record import Rollout, counts, parts, steps
from rollwright.store import RolloutRecord
from rollwright.types import Sample

__all__ = ["Sessions", "group_fields", "output_fields", "outputs"]

StepOf: TypeAlias = Callable[[str], int]
"""Weight version → verl's global step."""


def group_fields(
    group: Sequence[Rollout], *, filler: int = 0, step_of: StepOf | None = None, quorum: int | None = None
) -> list[list[dict[str, Any]]]:
    """For each rollout of a group the arguments of each `AgentLoopOutput`, in the order of the samples.

    All are empty where too few count (`record.parts`): verl's GRPO takes a lone reward for its advantage. `filler` is
    the token of a row that stands in for a rollout without one (it has no loss). Without `step_of` verl is told no
    steps. Raises `UsageError` where that can make none of a version, and for logprobs that `record.comparable` refuses.
    """
    return [
        [_fields(part.rollout.record, row, step_of) for row in part.rows(filler=filler)] if part.counts else []
        for part in parts(group, quorum=quorum)
    ]


def _fields(record: RolloutRecord, row: Sample, step_of: StepOf | None) -> dict[str, Any]:
    prompt, response, mask, logprobs = response_lists(row)
    low, high = (step_of and steps([row], step_of)) or (None, None)
    return {
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
            "segment_index": row.segment_index,
            "truncated": row.truncated,
            "temperature": row.temperature,
            "logprob_kind": row.logprob_kind,
        },
    }


def output_fields(rollout: Rollout, *, filler: int = 0, step_of: StepOf | None = None) -> list[dict[str, Any]]:
    """`group_fields` of one rollout, whatever became of its siblings: whether enough count is yours to see to."""
    (found,) = group_fields([rollout], filler=filler, step_of=step_of, quorum=1)
    return found


def outputs(rollout: Rollout, *, filler: int = 0, step_of: StepOf | None = None) -> list[Any]:
    """`verl.experimental.agent_loop.agent_loop.AgentLoopOutput`s of `output_fields`. Needs verl."""
    return _made(rollout, output_fields(rollout, filler=filler, step_of=step_of))


def _made(rollout: Rollout, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    verl = module("verl.experimental.agent_loop.agent_loop")
    spent = rollout.record.seconds.get("agent_done", 0.0)
    # Constructed without validation: it would copy every list once more.
    return [
        verl.AgentLoopOutput.model_construct(**fields, metrics=verl.AgentLoopMetrics(generate_sequences=spent))
        for fields in rows
    ]


RollOut: TypeAlias = Callable[[Mapping[str, Any], int], Awaitable[Sequence[Rollout]]]
"""A row of verl's and how many → that many rollouts of its task, graded or not."""


class Sessions:
    """What `AgentLoopBase.run` returns for each session of a prompt, from one group for all of them.

        sessions = verl.Sessions(roll_out)

        @register("rollwright")
        class Loop(AgentLoopBase):
            async def run(self, sampling_params, **row):
                return await sessions.outputs(row)

    verl begins the sessions of a prompt at once and in one process; `roll_out` is called once for all of them.
    """

    def __init__(
        self, roll_out: RollOut, *, filler: int = 0, step_of: StepOf | None = None, quorum: int | None = None
    ) -> None:
        """As for `group_fields`."""
        self._roll_out = roll_out
        self._filler = filler
        self._step_of = step_of
        self._quorum = quorum
        self._gathered: Gathered[list[Any]] = Gathered()

    async def outputs(self, row: Mapping[str, Any]) -> list[Any]:
        """`AgentLoopOutput`s of one session; empty where its rollout does not count. Needs verl.

        Raises `InfraError` when too few of the group count: verl then takes the prompt for failed, and draws another
        where it is told to (`sync_refill_failed_groups`, the asynchronous trainers).
        """

        async def group(count: int) -> list[list[Any]]:
            rollouts = await self._roll_out(row, count)
            made = group_fields(rollouts, filler=self._filler, step_of=self._step_of, quorum=self._quorum)
            if not any(made):
                counted = sum(map(counts, rollouts))
                raise InfraError(
                    f"{counted} of the {count} rollouts of a prompt count, which is not enough to train it"
                )
            return [_made(rollout, rows) for rollout, rows in zip(rollouts, made, strict=True)]

        return await self._gathered.one(row["uid"], group)
