"""One branch as a conversation: what was said, which tools were called, and what each of them gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from rollwright.messages import Message, ToolCall
from rollwright.tokens.tree import Trajectory, Turn
from rollwright.viewer.text import clean, clip

__all__ = ["Call", "Said", "Step", "best_leaf", "conversation"]

_LINES = 600
_COLUMNS = 4000


@dataclass(slots=True)
class Call:
    """A tool call of the policy, with its answer once there is one."""

    name: str
    fields: list[tuple[str, str]]
    """Argument → text."""
    id: str
    result: str | None = None
    result_lines: int = 0


@dataclass(slots=True)
class Said:
    """A message that somebody else than the policy put in, or an answer no turn gave."""

    role: str
    text: str
    lines: int
    calls: list[Call] = field(default_factory=list[Call])


@dataclass(slots=True)
class Step:
    """One turn: what was new, then what the policy said."""

    turn: Turn
    before: list[Said]
    reasoning: str
    content: str
    calls: list[Call]
    prompt_tokens: int
    seconds: float | None


def best_leaf(trajectory: Trajectory) -> int | None:
    """Where the work ended: the last leaf of the main role, else the last leaf."""
    leaves = trajectory.leaves()
    main = [leaf for leaf in leaves if trajectory.turns[leaf].role == "main" and trajectory.turns[leaf].delivered]
    return max(main or leaves, default=None)


def conversation(trajectory: Trajectory, leaf: int) -> list[Step]:
    """The steps from the root to a leaf."""
    steps: list[Step] = []
    waiting: dict[str, Call] = {}
    tokens = 0
    for index in trajectory.path(leaf):
        turn = trajectory.turns[index]
        tokens += len(turn.delta)
        calls = [_call(call) for call in turn.reply.tool_calls]
        steps.append(
            Step(
                turn=turn,
                before=_others(turn.messages[:-1], waiting),
                reasoning=_shown(turn.reply.reasoning or ""),
                content=_shown(turn.reply.content),
                calls=calls,
                prompt_tokens=tokens,
                seconds=_seconds(turn),
            )
        )
        waiting.update((call.id, call) for call in calls if call.id)
        tokens += len(turn.sampled)
    return steps


def _others(messages: Sequence[Message], waiting: dict[str, Call]) -> list[Said]:
    said: list[Said] = []
    for message in messages:
        call = waiting.get(message.tool_call_id) if message.role == "tool" else None
        if call is not None and call.result is None:
            call.result = _shown(message.content)
            call.result_lines = message.content.count("\n") + 1
            continue
        calls = [_call(call) for call in message.tool_calls]
        waiting.update((call.id, call) for call in calls if call.id)
        lines = message.content.count("\n") + 1 + len(message.content) // 120
        said.append(Said(role=message.role, text=_shown(message.content), lines=lines, calls=calls))
    return said


def _call(call: ToolCall) -> Call:
    if isinstance(call.arguments, str):
        fields = [("arguments that are no JSON", _shown(call.arguments))]
    else:
        fields = [(clean(str(name)), _shown(_text(value))) for name, value in call.arguments.items()]
    return Call(name=call.name, fields=fields, id=call.id)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except TypeError:
        return str(value)


def _shown(text: str) -> str:
    return clip(clean(text[: _LINES * _COLUMNS]), columns=_COLUMNS, lines=_LINES)


def _seconds(turn: Turn) -> float | None:
    told: Any = turn.meta.get("seconds")
    values = list(cast("dict[str, Any]", told).values()) if isinstance(told, dict) else []
    return float(sum(values)) if values and all(isinstance(value, int | float) for value in values) else None
