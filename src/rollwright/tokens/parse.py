"""Sampled text → what it means: reasoning, text and tool calls, in the two formats open models are trained on.

A call that is cut, ambiguous or broken is never executed: it stays in the text and the turn is `ill_formed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import orjson

from rollwright.messages import ParsedTurn, ToolCall, ToolSpec

__all__ = ["REASONING_PARSERS", "TOOL_PARSERS", "ReasoningParser", "ToolParser", "parse_turn"]

ToolParser = Literal["qwen3_coder", "hermes"]
ReasoningParser = Literal["qwen3"]
TOOL_PARSERS: tuple[ToolParser, ...] = ("qwen3_coder", "hermes")
REASONING_PARSERS: tuple[ReasoningParser, ...] = ("qwen3",)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"


def parse_turn(
    text: str,
    tools: Sequence[ToolSpec],
    *,
    tool_parser: ToolParser | None,
    reasoning_parser: ReasoningParser | None,
    thinking_open: bool = False,
) -> ParsedTurn:
    """Read one reply. `text` has no stop tokens; `thinking_open`: the prompt ended inside `<think>`. Never raises."""
    reasoning, body, problem = None, text, None
    if reasoning_parser is not None:
        reasoning, body, problem = _split_reasoning(text, thinking_open)
    if tool_parser is None:
        return ParsedTurn(content=body, reasoning=reasoning, ill_formed=problem)
    texts, calls, broken = _split_calls(body, _CALL_READERS[tool_parser], tools)
    if calls or broken:
        body = "\n".join(kept for piece in texts if (kept := piece.strip("\n")).strip())
    if broken is None and _CLOSE in body:
        broken = f"{_CLOSE} without {_OPEN}"
    return ParsedTurn(content=body, reasoning=reasoning, tool_calls=tuple(calls), ill_formed=problem or broken)


def thinking_is_open(text: str, *, thinking_open: bool) -> bool:
    """Whether a reply ends inside its reasoning block."""
    opened = thinking_open or text.lstrip().startswith(_THINK)
    return opened and _THINK_END not in text


def _split_reasoning(text: str, thinking_open: bool) -> tuple[str | None, str, str | None]:
    """(reasoning, the rest, what is wrong)."""
    start = text.lstrip()
    if start.startswith(_THINK):
        inner = start[len(_THINK) :]
    elif thinking_open:
        inner = text
    else:
        return None, text, None
    thoughts, closed, rest = inner.partition(_THINK_END)
    if closed:
        return thoughts.strip("\n"), rest.lstrip("\n"), None
    # A call ends a block the model forgot to close, as the engines' own parsers have it.
    call = inner.find(_OPEN)
    if call >= 0:
        return inner[:call].strip("\n"), inner[call:], None
    return inner.strip("\n"), "", f"{_THINK} is not closed"


# --------------------------------------------------------------------------- calls


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: Mapping[str, Any]
    end: int
    """Index after the closing tag."""


@dataclass(frozen=True, slots=True)
class _Broken:
    reason: str
    last: bool = False
    """Nothing after it can be a whole call."""


_CallReader: TypeAlias = Callable[[str, int, Sequence[ToolSpec]], "_Call | _Broken"]
"""Text, index after the opening tag, tools."""


def _split_calls(
    text: str, read: _CallReader, tools: Sequence[ToolSpec]
) -> tuple[list[str], list[ToolCall], str | None]:
    texts: list[str] = []
    calls: list[ToolCall] = []
    problem: str | None = None
    kept = 0
    opener = text.find(_OPEN)
    while opener >= 0:
        inside = opener + len(_OPEN)
        call = read(text, inside, tools)
        if isinstance(call, _Call):
            texts.append(text[kept:opener])
            calls.append(ToolCall(name=call.name, arguments=call.arguments))
            kept = inside = call.end
        else:
            problem = problem or call.reason
            if call.last:
                break
        opener = text.find(_OPEN, inside)
    texts.append(text[kept:])
    return texts, calls, problem


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_FUNCTION_END = re.compile(r"</function>\s*</tool_call>")
_NEXT_CALL = re.compile(r"<tool_call>\s*<function=")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=[^<>\n]+>|\Z))")


def _read_qwen3_coder(text: str, start: int, tools: Sequence[ToolSpec]) -> _Call | _Broken:
    head = _FUNCTION.match(text, start)
    if head is None:
        return _Broken("a call without <function=...>")
    # Where another call begins before this one's end, which text belongs to which is a guess: neither is run.
    inner = _NEXT_CALL.search(text, head.end())
    end = _FUNCTION_END.search(text, head.end(), inner.start() if inner else len(text))
    if end is None:
        return _Broken("a call inside a call") if inner else _Broken("a call that is not closed", last=True)
    name = head[1].strip()
    schema = _parameters(tools, name)
    body = text[head.end() : end.start()]
    arguments: dict[str, Any] = {}
    position = 0
    while opened := _PARAMETER.match(body, position):
        closed = _PARAMETER_END.search(body, opened.end())
        if closed is None:
            return _Broken("a parameter that is not closed")
        key = opened[1].strip()
        value = body[opened.end() : closed.start()].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, schema.get(key))
        position = closed.end()
    if not name or body[position:].strip():
        return _Broken("text between the parameters of a call")
    return _Call(name=name, arguments=arguments, end=end.end())


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
_HERMES_END = re.compile(r"\s*</tool_call>")
_SPACE = re.compile(r"\s*")


def _read_hermes(text: str, start: int, tools: Sequence[ToolSpec]) -> _Call | _Broken:
    begin = cast("re.Match[str]", _SPACE.match(text, start)).end()
    try:
        # The standard decoder finds where the object ends; orjson then refuses what is not strict JSON.
        _, stop = _JSON.raw_decode(text, begin)
        value: Any = orjson.loads(text[begin:stop])
    except (ValueError, RecursionError):
        return _Broken("a call that is not JSON")
    end = _HERMES_END.match(text, stop)
    if end is None:
        return _Broken("a call that is not closed")
    if not isinstance(value, dict):
        return _Broken("a call that is not an object")
    call = cast("dict[str, Any]", value)
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json_or_text(arguments)
    if not isinstance(name, str) or not name.strip():
        return _Broken("a call without a name")
    if not isinstance(arguments, dict):
        return _Broken("a call whose arguments are not an object")
    return _Call(name=name.strip(), arguments=cast("dict[str, Any]", arguments), end=end.end())


_CALL_READERS: Mapping[ToolParser, _CallReader] = {"qwen3_coder": _read_qwen3_coder, "hermes": _read_hermes}


# --------------------------------------------------------------------------- typed values


def _parameters(tools: Sequence[ToolSpec], name: str) -> Mapping[str, Any]:
    """JSON schema of each parameter of a tool; empty for an unknown tool or a schema of another shape."""
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            return cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {}
    return {}


def _types(schema: Any) -> set[str]:
    """The JSON types a schema names, through `anyOf` and `oneOf`; empty when it names none."""
    if not isinstance(schema, Mapping):
        return set()
    known = cast("Mapping[str, Any]", schema)
    found: set[str] = set()
    kind = known.get("type")
    if isinstance(kind, str):
        found.add(kind)
    elif isinstance(kind, list):
        found.update(name for name in cast("list[Any]", kind) if isinstance(name, str))
    for word in ("anyOf", "oneOf"):
        options = known.get(word)
        if isinstance(options, list):
            for option in cast("list[Any]", options):
                found |= _types(option) if not _nested(option) else set()
    return found


def _nested(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("anyOf" in schema or "oneOf" in schema)


def _typed(text: str, schema: Any) -> Any:
    """The value the schema's type makes of a parameter's text; the text itself where it fits no named type."""
    types = _types(schema)
    if not types or "string" in types:
        return text
    word = text.strip()
    if word.lower() in ("true", "false") and "boolean" in types:
        return word.lower() == "true"
    if word.lower() in ("null", "none") and "null" in types:
        return None
    value = _json_or_text(word)
    for kind in types:
        if _is_a(value, kind):
            return value
    return text


def _json_or_text(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def _is_a(value: Any, kind: str) -> bool:
    match kind:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case _:
            return False
