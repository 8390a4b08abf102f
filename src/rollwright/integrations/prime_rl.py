"""prime-rl and verifiers: samples as `TrainingSample`s, or a rollout as a verifiers v1 `Trace`.

All arrays have full length; a branch is a sample. Rollouts that were not graded are left out of the samples. Their
trace has `ok = False` and its error, and verifiers drops such traces before it makes a baseline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orjson

from rollwright.gateway.log import LoggedTrajectory
from rollwright.groups import GroupAdvantages, rollout_weights
from rollwright.integrations.arrays import Array, logprob_list, spread, views
from rollwright.integrations.record import Rollout, trained
from rollwright.messages import Message, ToolSpec
from rollwright.types import Sample

__all__ = ["trace", "training_samples"]


def training_samples(
    group: Sequence[Rollout],
    advantages: GroupAdvantages,
    *,
    env_name: str,
    each: Literal["token", "rollout"] = "token",
) -> Iterator[dict[str, Any]]:
    """The arguments of each `prime_rl.transport.TrainingSample`, by name.

    `each`: what counts once in the loss. With `rollout`, `rl_weights` gives every trained token the weight 1 / (trained
    tokens of its rollout), times the mean of that number, so that the weights of a group add up to its tokens.
    """
    samples = [sample for rollout in group for sample in trained(rollout) if advantages.of(sample) is not None]
    counts = [sample.loss_mask.tobytes().count(1) for sample in samples]
    rollouts = len({sample.rollout_id for sample in samples})
    for sample, count, weight in zip(samples, counts, rollout_weights(samples), strict=True):
        advantage = advantages.of(sample) or 0.0
        fields: dict[str, Any] = {
            "token_ids": sample.tokens.tolist(),
            "mask": spread(sample, lambda start, end: [True] * (end - start), False),
            "logprobs": logprob_list(sample),
            "temperatures": [sample.temperature] * len(sample.tokens),
            "env_name": env_name,
            "advantages": _constant(sample, advantage),
            "reward": sample.reward,
        }
        if each == "rollout":
            fields["rl_weights"] = _constant(sample, weight / count * sum(counts) / rollouts)
        yield fields


def _constant(sample: Sample, value: float) -> list[float]:
    """`value` where the sample trains, 0.0 elsewhere."""
    return spread(sample, lambda start, end: [value] * (end - start), 0.0)


def trace(rollout: Rollout, logged: LoggedTrajectory, *, protocol: str = "") -> dict[str, Any]:
    """A verifiers v1 `Trace` as plain values: the message graph, the reward or the error.

    The tokens of a turn's new messages stand at its reply, before what was sampled: the log does not say which of them
    belong to which message. A sampled token that no sample trains has no mask and no logprob here.
    """
    record = rollout.record
    failure = record.failure
    return {
        "id": record.rollout,
        "task": {"type": protocol or "rollwright", "data": {"idx": 0, "name": record.task}, "key": record.task_id},
        "agent": {"config": {}, "name": "agent"},
        "nodes": list(_nodes(logged, _trained_of(logged, rollout.samples))),
        "rewards": {"rollwright": None if record.reward is None else {"score": record.reward, "weight": 1.0}},
        "info": {"group": record.group, "attempt": record.attempt, "status": record.status},
        "is_completed": True,
        "ok": failure is None,
        "stop_condition": record.stop_reason or None,
        "errors": [] if failure is None else [{"type": failure.error, "message": failure.message}],
    }


def _trained_of(logged: LoggedTrajectory, samples: Iterable[Sample]) -> dict[int, Array]:
    """Turn → which of its sampled tokens are trained."""
    turns = logged.trajectory.turns
    found: dict[int, Array] = {turn.index: np.zeros(len(turn.sampled), np.bool_) for turn in turns}
    for sample in samples:
        mask = views(sample).mask
        start = 0
        for index in sample.turns:
            start += len(turns[index].delta)
            part = mask[start : start + len(turns[index].sampled)]
            found[index][: len(part)] |= part != 0
            start += len(turns[index].sampled)
    return found


def _nodes(logged: LoggedTrajectory, masks: Mapping[int, Array]) -> Iterator[dict[str, Any]]:
    replies: dict[int, int] = {}
    """Turn → node of its reply."""
    numbers = itertools.count()
    for turn in logged.trajectory.turns:
        parent = None if turn.parent is None else replies[turn.parent]
        for position, message in enumerate(turn.messages[:-1]):
            node: dict[str, Any] = {"parent": parent, "message": _message(message)}
            if parent is None and position == 0:
                node["tools"] = [_tool(tool) for tool in logged.tools.get(turn.tools_key, ())]
            parent = next(numbers)
            yield node
        mask = masks[turn.index]
        replies[turn.index] = next(numbers)
        yield {
            "parent": parent,
            "message": _message(turn.reply),
            "sampled": True,
            "token_ids": turn.delta.tolist() + turn.sampled.tolist(),
            "mask": [False] * len(turn.delta) + mask.tolist(),
            "logprobs": np.asarray(turn.logprobs)[mask].tolist(),
        }


def _message(message: Message) -> dict[str, Any]:
    match message.role:
        case "assistant":
            calls = [
                {
                    "id": call.id or f"call_{number}",
                    "name": call.name,
                    "arguments": orjson.dumps(call.arguments).decode(),
                }
                for number, call in enumerate(message.tool_calls)
            ]
            return {
                "role": "assistant",
                "content": message.content,
                "reasoning_content": message.reasoning,
                "tool_calls": calls or None,
            }
        case "tool":
            return {
                "role": "tool",
                "tool_call_id": message.tool_call_id or "",
                "content": message.content,
                "name": message.tool_name,
            }
        case role:
            return {"role": "system" if role == "system" else "user", "content": message.content}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
