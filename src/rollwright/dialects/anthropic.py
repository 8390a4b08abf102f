"""The Anthropic Messages wire, as Claude Code and the Anthropic SDKs speak it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from rollwright.dialects import Opening, Problem, ProblemKind, Reply, Request, settle_system
from rollwright.dialects.fields import (
    as_list,
    as_mapping,
    as_text,
    malformed,
    omitted,
    optional_text,
    recorded,
)
from rollwright.dialects.jsonio import dumps
from rollwright.dialects.sse import frame
from rollwright.messages import Message, ToolCall, ToolSpec

__all__ = ["Anthropic"]

_SETTINGS = (
    "max_tokens",
    "metadata",
    "model",
    "output_config",
    "service_tier",
    "stop_sequences",
    "stream",
    "temperature",
    "thinking",
    "tool_choice",
    "top_k",
    "top_p",
)

# Claude Code's first system line names its build and, in some versions, a nonce per request: it would make every
# prompt differ from its own continuation.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)

_UNPARSED = "__unparsedToolInput"
"""Key under which arguments that are no JSON object travel: the wire only takes objects. Claude Code's own form."""

_ERRORS: dict[ProblemKind, tuple[int, str]] = {
    "unauthorized": (401, "authentication_error"),
    "malformed": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "coding": (415, "invalid_request_error"),
    "closed": (400, "invalid_request_error"),
    "limit": (400, "invalid_request_error"),
    "not_found": (404, "not_found_error"),
    "unavailable": (500, "api_error"),
}


class Anthropic:
    """Messages API."""

    name = "anthropic"
    reply_prefix = "msg_"
    call_prefix = "toolu_"
    opens_counted = True

    def parse(self, body: Mapping[str, Any]) -> Request:
        names: dict[str, str] = {}
        messages = [Message(role="system", content=_system(body.get("system")))]
        for index, item in enumerate(as_list(body.get("messages"), "messages", filled=True)):
            messages += _message(item, f"messages.{index}", names)
        return Request(
            model=optional_text(body.get("model"), "model"),
            messages=settle_system(messages),
            tools=_tools(body.get("tools")),
            stream=bool(body.get("stream")),
            recorded=recorded(body, _SETTINGS),
        )

    def settle(self, message: Message, opening: Opening, request: Request) -> Message:
        return message

    def reply(self, reply: Reply, request: Request) -> dict[str, Any]:
        return {
            **_envelope(reply.opening),
            "content": [block for block, _ in _blocks(reply)],
            "stop_reason": _stop_reason(reply),
            "usage": _usage(reply.usage.prompt_tokens, reply.usage.sampled_tokens),
        }

    def opening(self, opening: Opening) -> bytes:
        message = {**_envelope(opening), "usage": _usage(opening.prompt_tokens, 0)}
        return frame({"type": "message_start", "message": message}, event="message_start")

    def keepalive(self, opening: Opening) -> bytes:
        return frame({"type": "ping"}, event="ping")

    def content(self, reply: Reply, request: Request) -> bytes:
        events: list[bytes] = []
        for index, (block, deltas) in enumerate(_blocks(reply)):
            start = {**block, **_EMPTIED[block["type"]]}
            events.append(_event("content_block_start", index=index, content_block=start))
            events += [_event("content_block_delta", index=index, delta=delta) for delta in deltas]
            events.append(_event("content_block_stop", index=index))
        return b"".join(events)

    def terminal(self, reply: Reply, request: Request) -> bytes:
        return _event(
            "message_delta",
            delta={"stop_reason": _stop_reason(reply), "stop_sequence": None},
            usage=_usage(reply.usage.prompt_tokens, reply.usage.sampled_tokens),
        ) + _event("message_stop")

    def error(self, problem: Problem) -> tuple[int, dict[str, Any]]:
        status, kind = _ERRORS[problem.kind]
        message = problem.message
        if problem.kind == "too_long":
            # Claude Code reads the two numbers out of this very sentence and compacts.
            message = f"prompt is too long: {problem.tokens} tokens > {problem.maximum} maximum"
        return status, {"type": "error", "error": {"type": kind, "message": message}}

    def failure(self, problem: Problem, opening: Opening) -> bytes:
        return frame(self.error(problem)[1], event="error")


# --------------------------------------------------------------------------- requests


def _system(value: object) -> str:
    if value is None or isinstance(value, str):
        return _BILLING.sub("", value or "")
    blocks = [_BILLING.sub("", text) for text in _texts(value, "system")]
    return "\n\n".join(text for text in blocks if text)


def _text(block: Mapping[str, Any], field: str) -> str:
    """The text of a content block; what is not text leaves a note."""
    if block.get("type", "text") == "text":
        return as_text(block.get("text"), f"{field}.text")
    return omitted(block.get("type"))


def _texts(value: object, field: str) -> list[str]:
    """The text of each content block."""
    blocks = as_list(value, field)
    return [_text(as_mapping(item, f"{field}.{i}"), f"{field}.{i}") for i, item in enumerate(blocks)]


def _joined(value: object, field: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(text for text in _texts(value, field) if text)


def _message(item: object, field: str, names: dict[str, str]) -> Iterator[Message]:
    """One wire message as canonical ones. `names` maps call ids to tool names and grows with each call seen."""
    message = as_mapping(item, field)
    content = message.get("content")
    match message.get("role"):
        case "user":
            yield from _user(content, f"{field}.content", names)
        case "assistant":
            yield _assistant(content, f"{field}.content", names)
        case "system":
            yield Message(role="system", content=_joined(content, f"{field}.content"))
        case _:
            raise malformed(f"{field}.role", "must be user, assistant or system")


def _user(content: object, field: str, names: Mapping[str, str]) -> Iterator[Message]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts: list[str] = []
    for index, item in enumerate(as_list(content, field)):
        block = as_mapping(item, f"{field}.{index}")
        if block.get("type") != "tool_result":
            text = _text(block, f"{field}.{index}")
            texts += [text] if text else []
            continue
        if texts:
            yield Message(role="user", content="\n".join(texts))
            texts = []
        yield _tool_result(block, f"{field}.{index}", names)
    if texts:
        yield Message(role="user", content="\n".join(texts))


def _tool_result(block: Mapping[str, Any], field: str, names: Mapping[str, str]) -> Message:
    call_id = as_text(block.get("tool_use_id"), f"{field}.tool_use_id")
    text = _joined(block.get("content"), f"{field}.content")
    if block.get("is_error"):
        # No chat template has a place for the flag, and an empty failure must not look like an empty success.
        text = f"[error] {text}".rstrip()
    return Message(role="tool", content=text, tool_call_id=call_id, tool_name=names.get(call_id, ""))


def _assistant(content: object, field: str, names: dict[str, str]) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    carriers: list[str] = []
    for index, item in enumerate(as_list(content, field)):
        at = f"{field}.{index}"
        block = as_mapping(item, at)
        match block.get("type"):
            case "text":
                texts.append(as_text(block.get("text"), f"{at}.text"))
            case "thinking":
                thoughts.append(optional_text(block.get("thinking"), f"{at}.thinking"))
                carriers.append(optional_text(block.get("signature"), f"{at}.signature"))
            case "redacted_thinking":
                carriers.append(optional_text(block.get("data"), f"{at}.data"))
            case "tool_use":
                call = _call(block, at)
                calls.append(call)
                carriers.append(call.id)
                names[call.id] = call.name
            case other:
                texts.append(omitted(other))
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
        carriers=tuple(carrier for carrier in carriers if carrier),
    )


def _call(block: Mapping[str, Any], field: str) -> ToolCall:
    arguments: dict[str, Any] | str = as_mapping(block.get("input", {}), f"{field}.input")
    unparsed = arguments.get(_UNPARSED)
    raw = cast("dict[str, Any]", unparsed).get("raw") if isinstance(unparsed, dict) else None
    if isinstance(raw, str) and len(arguments) == 1:
        arguments = raw
    return ToolCall(
        name=as_text(block.get("name"), f"{field}.name"),
        arguments=arguments,
        id=optional_text(block.get("id"), f"{field}.id"),
    )


def _tools(value: object) -> tuple[ToolSpec, ...]:
    if value is None:
        return ()
    tools: list[ToolSpec] = []
    for index, item in enumerate(as_list(value, "tools")):
        at = f"tools.{index}"
        tool = as_mapping(item, at)
        if "input_schema" not in tool and tool.get("type") not in (None, "custom"):
            continue  # a tool of the vendor's servers, which this policy cannot call
        tools.append(
            ToolSpec(
                name=as_text(tool.get("name"), f"{at}.name"),
                description=optional_text(tool.get("description"), f"{at}.description"),
                parameters=as_mapping(tool.get("input_schema", {}), f"{at}.input_schema"),
            )
        )
    return tuple(tools)


# --------------------------------------------------------------------------- replies

_EMPTIED: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""What a block's start event leaves to its deltas."""


def _event(kind: str, **data: Any) -> bytes:
    return frame({"type": kind, **data}, event=kind)


def _envelope(opening: Opening) -> dict[str, Any]:
    return {
        "id": opening.id,
        "type": "message",
        "role": "assistant",
        "model": opening.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    # The whole prompt counts as input, cached or not: Claude Code compacts by this number.
    return {
        "input_tokens": prompt,
        "output_tokens": sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _stop_reason(reply: Reply) -> str:
    if reply.finish == "length":
        return "max_tokens"
    return "tool_use" if reply.message.tool_calls else "end_turn"


def _blocks(reply: Reply) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each content block with the deltas that build it in a stream."""
    message = reply.message
    if message.reasoning:
        yield (
            {"type": "thinking", "thinking": message.reasoning, "signature": reply.signature},
            [
                {"type": "thinking_delta", "thinking": message.reasoning},
                {"type": "signature_delta", "signature": reply.signature},
            ],
        )
    if message.content:
        yield (
            {"type": "text", "text": message.content},
            [{"type": "text_delta", "text": message.content}],
        )
    for call in message.tool_calls:
        arguments = call.arguments
        if isinstance(arguments, str):
            arguments = {_UNPARSED: {"raw": arguments, "len": len(arguments)}}
        yield (
            {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments},
            [{"type": "input_json_delta", "partial_json": dumps(arguments).decode()}],
        )
