"""Trajectories in Harbor's format, ATIF: a folder with one file per rollout.

The main agent's last branch is the trajectory; every other branch (a sub-agent, the history before a compaction) is one
of its `subagent_trajectories`, and the steps it shares with a branch before it are `is_copied_context`. Token ids and
logprobs are there for every reply; the prompt of a step is the `prompt_delta_token_ids` of its `metrics.extra` after
all tokens before it, which says all of it in a hundredth of the space.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import orjson

from rollwright.export import replacing
from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.messages import Message, ToolCall
from rollwright.store import RolloutRecord, RunDir
from rollwright.tokens.tree import Turn

__all__ = ["Atif", "atif_trajectory"]

SCHEMA_VERSION = "ATIF-v1.7"


class Atif:
    name = "trajectories"
    unit = "trajectories"

    def write(self, run: RunDir, target: Path) -> int:
        config: Mapping[str, Any] = run.resolved()["config"]
        harness = config.get("harness", {}).get("kind", "unknown")
        versions: Mapping[str, str] = run.resolved().get("versions", {})
        artifacts = sorted(f"{key[9:]} {version}" for key, version in versions.items() if key.startswith("artifact:"))
        agent = {
            "name": harness,
            "version": ", ".join(artifacts) or "unknown",
            "model_name": config.get("policy", {}).get("model", "policy"),
        }
        count = 0
        with replacing(target) as folder:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for record in run.records():
                log = run.rollout(record.rollout).turns
                found = atif_trajectory(record, read_turn_log(log), agent) if log.exists() else None
                if found is not None:
                    (folder / f"{record.rollout}.json").write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
                    count += 1
            if target.is_dir():
                shutil.rmtree(target)
        return count


def atif_trajectory(record: RolloutRecord, logged: LoggedTrajectory, agent: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rollout as plain values of `harbor.models.trajectories.Trajectory`; None when its agent asked nothing."""
    turns = logged.trajectory.turns
    leaves = [turns[index] for index in logged.trajectory.leaves()]
    if not leaves:
        return None
    leaves.sort(key=lambda turn: (turn.delivered and turn.role == "main", turn.delivered, turn.index), reverse=True)
    told: set[int] = set()
    branches = [_branch(logged, leaf, told, f"{record.rollout}.{leaf.index}") for leaf in leaves]
    main, *others = [
        {"schema_version": SCHEMA_VERSION, "session_id": record.rollout, "agent": _agent(logged, leaf, agent), **branch}
        for leaf, branch in zip(leaves, branches, strict=True)
    ]
    failure = record.failure
    main["final_metrics"] = {
        "total_prompt_tokens": record.prompt_tokens,
        "total_completion_tokens": sum(len(turn.sampled) for turn in turns),
        "total_steps": len(main["steps"]),
    }
    main["extra"] = {
        "task": record.task,
        "source_id": record.source_id,
        "group": record.group,
        "attempt": record.attempt,
        "status": record.status,
        "reward": record.reward,
        "failure": None if failure is None else {"error": failure.error, "message": failure.message},
    }
    if others:
        main["subagent_trajectories"] = others
    return main


def _agent(logged: LoggedTrajectory, leaf: Turn, agent: Mapping[str, Any]) -> dict[str, Any]:
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in logged.tools.get(leaf.tools_key, ())
    ]
    return {**agent, "tool_definitions": tools, "extra": {"role": leaf.role}}


def _branch(logged: LoggedTrajectory, leaf: Turn, told: set[int], name: str) -> dict[str, Any]:
    """`told`: turns that an earlier branch has, extended by this one's."""
    steps: list[dict[str, Any]] = []
    for index in logged.trajectory.path(leaf.index):
        turn = logged.trajectory.turns[index]
        made = list(_steps(turn, len(logged.trajectory.ids(index)) - len(turn.sampled), steps[-1:]))
        if index in told:
            made = [step | {"is_copied_context": True} for step in made]
        told.add(index)
        steps += made
    return {"trajectory_id": name, "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]}


def _steps(turn: Turn, prompt_tokens: int, before: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The steps a turn adds. What tools said goes to the step `before` that called them."""
    last: dict[str, Any] | None = before[-1] if before else None
    stamp = {"timestamp": datetime.fromtimestamp(turn.meta["at"], UTC).isoformat()} if "at" in turn.meta else {}
    for message in turn.messages[:-1]:
        if message.role == "tool" and last is not None and last["source"] == "agent":
            results = last.setdefault("observation", {"results": []})["results"]
            calls = {call["tool_call_id"] for call in last.get("tool_calls", ())}
            known = message.tool_call_id in calls
            results.append(
                {"source_call_id": message.tool_call_id, "content": message.content}
                if known
                else {"content": message.content, "extra": {"call": message.tool_call_id}}
            )
            continue
        if message.role == "assistant":
            last = {**stamp, "source": "agent", "llm_call_count": 0, **_said(message, reasoning=False)}
        else:
            last = {**stamp, "source": "system" if message.role == "system" else "user", "message": message.content}
        yield last
    finite = all(isfinite(value) for value in turn.logprobs)
    metrics: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(turn.sampled),
        "cached_tokens": turn.meta.get("cached_tokens"),
        "completion_token_ids": turn.sampled.tolist(),
        "logprobs": turn.logprobs.tolist() if finite else None,
        "extra": {
            "prompt_delta_token_ids": turn.delta.tolist(),
            "weight_versions": [[span.version, span.start, span.end] for span in turn.versions],
            "logprob_kind": turn.logprob_kind,
            "temperature": turn.temperature,
            "finish": turn.finish,
        },
    }
    extra = {"turn": turn.index, "delivered": turn.delivered, "trained": turn.trained, "ill_formed": turn.ill_formed}
    reply = _said(turn.reply, reasoning=True)
    yield {**stamp, "source": "agent", "llm_call_count": 1, **reply, "metrics": metrics, "extra": extra}


def _said(message: Message, *, reasoning: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"message": message.content}
    if reasoning and message.reasoning is not None:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [_call(call, number) for number, call in enumerate(message.tool_calls)]
    return said


def _call(call: ToolCall, number: int) -> dict[str, Any]:
    """ATIF's arguments are an object; text that is none stands under `text`."""
    arguments = {"text": call.arguments} if isinstance(call.arguments, str) else dict(call.arguments)
    return {"tool_call_id": call.id or f"call_{number}", "function_name": call.name, "arguments": arguments}
