"""prime-rl and verifiers: samples as `TrainingSample`s, or a rollout as a verifiers v1 `Trace`.

All arrays have full length; a branch is a sample. Rollouts that do not count are left out of the samples. Their trace
has `ok = False` and its error, and verifiers drops such traces before it makes a baseline.
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
from rollwright.integrations.record import Part, Rollout, comparable, counts, parts
from rollwright.messages import Message, ToolSpec
from rollwright.types import Sample

__all__ = ["trace", "traces", "training_samples"]


def training_samples(
    group: Sequence[Rollout],
    advantages: GroupAdvantages,
    *,
    env_name: str,
    each: Literal["token", "rollout"] = "token",
) -> Iterator[dict[str, Any]]:
    """The arguments of each `prime_rl.transport.TrainingSample`, by name.

    `each`: what counts once in the loss. With `rollout`, `rl_weights` gives every trained token the weight 1 / (trained
    tokens of its rollout), times the mean of that number, so that the weights of a group add up to its tokens. Raises
    `UsageError` for logprobs that `record.comparable` refuses.
    """
    samples = [sample for rollout in group for sample in comparable(rollout) if advantages.of(sample) is not None]
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


def traces(
    group: Sequence[Rollout], logs: Iterable[LoggedTrajectory], *, protocol: str = "", quorum: int | None = None
) -> list[dict[str, Any]]:
    """A verifiers v1 `Trace` of each rollout of a group as plain values: the message graph, the reward or the error.

    `logs`: their turn logs. What does not count, alone or for its group's quorum (`record.parts`), has an error. What
    is trained is what the samples train: any other sampled token has no mask and no logprob here. The tokens of a
    turn's new messages stand at its reply, before what was sampled: the log does not say which of them belong to which
    message. Raises `UsageError` for logprobs that `record.comparable` refuses.
    """
    return [_trace(part, logged, protocol) for part, logged in zip(parts(group, quorum=quorum), logs, strict=True)]


def trace(rollout: Rollout, logged: LoggedTrajectory, *, protocol: str = "") -> dict[str, Any]:
    """`traces` of one rollout, whatever became of its siblings: whether enough count is yours to see to."""
    (found,) = traces([rollout], [logged], protocol=protocol, quorum=1)
    return found


def _trace(part: Part, logged: LoggedTrajectory, protocol: str) -> dict[str, Any]:
    record = part.rollout.record
    return {
        "id": record.rollout,
        "task": {"type": protocol or "rollwright", "data": {"idx": 0, "name": record.task}, "key": record.task_id},
        "agent": {"config": {}, "name": "agent"},
        "nodes": list(_nodes(logged, _trained_of(logged, part.samples))),
        "rewards": {"rollwright": {"score": record.reward, "weight": 1.0} if part.counts else None},
        "info": {
            "group": record.group,
            "attempt": record.attempt,
            "status": record.status,
            "sampled_as": sorted({(sample.logprob_kind, sample.temperature) for sample in part.samples}),
        },
        "is_completed": True,
        "ok": part.counts,
        "stop_condition": record.stop_reason or None,
        "errors": [] if part.counts else [_error(part)],
    }


def _error(part: Part) -> dict[str, str]:
    failure = part.rollout.record.failure
    if failure is not None:
        return {"type": failure.error, "message": failure.message}
    if counts(part.rollout):
        return {"type": "BelowQuorum", "message": "too few rollouts of its group count"}
    return {"type": "DoesNotCount", "message": "its reward may not enter a baseline"}


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
