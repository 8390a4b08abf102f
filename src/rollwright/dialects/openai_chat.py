"""The OpenAI Chat Completions wire, as pi, opencode, qwen-code, mini-swe-agent and the OpenAI SDKs speak it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from rollwright.dialects import Opening, Problem, Reply, Request, settle_system
from rollwright.dialects.fields import (
    as_list,
    as_mapping,
    as_text,
    json_arguments,
    malformed,
    omitted,
    optional_text,
    recorded,
)
from rollwright.dialects.jsonio import dumps
from rollwright.dialects.openai_errors import openai_error
from rollwright.dialects.sse import DONE, frame
from rollwright.messages import Message, ToolCall, ToolSpec

__all__ = ["OpenAIChat"]

_SETTINGS = (
    "frequency_penalty",
    "logit_bias",
    "max_completion_tokens",
    "max_tokens",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "top_p",
)


class OpenAIChat:
    """Chat Completions API."""

    name = "openai_chat"
    reply_prefix = "chatcmpl-"
    call_prefix = "call_"
    opens_counted = False

    def parse(self, body: Mapping[str, Any]) -> Request:
        names: dict[str, str] = {}
        messages = [
            _message(item, f"messages.{index}", names)
            for index, item in enumerate(as_list(body.get("messages"), "messages", filled=True))
        ]
        options = body.get("stream_options")
        return Request(
            model=optional_text(body.get("model"), "model"),
            messages=settle_system(messages),
            tools=_tools(body.get("tools")),
            stream=bool(body.get("stream")),
            include_usage=isinstance(options, dict) and bool(cast("dict[str, Any]", options).get("include_usage")),
            recorded=recorded(body, _SETTINGS),
        )

    def settle(self, message: Message, opening: Opening, request: Request) -> Message:
        return message

    def reply(self, reply: Reply, request: Request) -> dict[str, Any]:
        message = reply.message
        content = message.content or (None if message.tool_calls else "")
        sent: dict[str, Any] = {"role": "assistant", "content": content}
        if message.reasoning:
            sent["reasoning_content"] = message.reasoning
        if message.tool_calls:
            sent["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
        choice = {"index": 0, "message": sent, "logprobs": None, "finish_reason": _finish_reason(reply)}
        head = _head(reply.opening, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(reply)}

    def opening(self, opening: Opening) -> bytes:
        return _chunk(opening, {"role": "assistant", "content": ""})

    def keepalive(self, opening: Opening) -> bytes:
        return _chunk(opening, {})

    def content(self, reply: Reply, request: Request) -> bytes:
        return b"".join(_chunk(reply.opening, delta) for delta in _deltas(reply.message))

    def terminal(self, reply: Reply, request: Request) -> bytes:
        events = [_chunk(reply.opening, {}, _finish_reason(reply))]
        if request.include_usage:
            head = _head(reply.opening, "chat.completion.chunk")
            events.append(frame({**head, "choices": [], "usage": _usage(reply)}))
        return b"".join([*events, DONE])

    def error(self, problem: Problem) -> tuple[int, dict[str, Any]]:
        return openai_error(problem)

    def failure(self, problem: Problem, opening: Opening) -> bytes:
        return frame(openai_error(problem)[1])


# --------------------------------------------------------------------------- requests


def _text(value: object, field: str, *, joint: str) -> str:
    """A content field: a string, null, or a list of parts. What is not text leaves a note."""
    if value is None or isinstance(value, str):
        return value or ""
    texts: list[str] = []
    for index, item in enumerate(as_list(value, field)):
        at = f"{field}.{index}"
        part = as_mapping(item, at)
        match part.get("type", "text"):
            case "text":
                texts.append(as_text(part.get("text"), f"{at}.text"))
            case "refusal":
                texts.append(as_text(part.get("refusal"), f"{at}.refusal"))
            case other:
                texts.append(omitted(other))
    return joint.join(text for text in texts if text)


def _message(item: object, field: str, names: dict[str, str]) -> Message:
    """One wire message. `names` maps call ids to tool names and grows with each call seen."""
    message = as_mapping(item, field)
    content, at = message.get("content"), f"{field}.content"
    match message.get("role"):
        case "system" | "developer":
            return Message(role="system", content=_text(content, at, joint="\n"))
        case "user":
            return Message(role="user", content=_text(content, at, joint="\n"))
        case "tool":
            call_id = as_text(message.get("tool_call_id"), f"{field}.tool_call_id")
            text = _text(content, at, joint="\n")
            return Message(role="tool", content=text, tool_call_id=call_id, tool_name=names.get(call_id, ""))
        case "assistant":
            return _assistant(message, field, names)
        case _:
            raise malformed(f"{field}.role", "must be system, developer, user, assistant or tool")


def _assistant(message: Mapping[str, Any], field: str, names: dict[str, str]) -> Message:
    calls: list[ToolCall] = []
    listed = message.get("tool_calls")
    for index, item in enumerate([] if listed is None else as_list(listed, f"{field}.tool_calls")):
        call = _call(item, f"{field}.tool_calls.{index}")
        names[call.id] = call.name
        calls.append(call)
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    return Message(
        role="assistant",
        content=_text(message.get("content"), f"{field}.content", joint=""),
        reasoning=optional_text(reasoning, f"{field}.reasoning_content") or None,
        tool_calls=tuple(calls),
        carriers=tuple(call.id for call in calls if call.id),
    )


def _call(item: object, field: str) -> ToolCall:
    call = as_mapping(item, field)
    function = as_mapping(call.get("function"), f"{field}.function")
    return ToolCall(
        name=as_text(function.get("name"), f"{field}.function.name"),
        arguments=json_arguments(function.get("arguments"), f"{field}.function.arguments"),
        id=optional_text(call.get("id"), f"{field}.id"),
    )


def _tools(value: object) -> tuple[ToolSpec, ...]:
    if value is None:
        return ()
    tools: list[ToolSpec] = []
    for index, item in enumerate(as_list(value, "tools")):
        at = f"tools.{index}.function"
        tool = as_mapping(item, f"tools.{index}")
        if tool.get("type", "function") != "function":
            raise malformed(f"tools.{index}.type", "must be function")
        function = as_mapping(tool.get("function"), at)
        parameters = function.get("parameters")
        tools.append(
            ToolSpec(
                name=as_text(function.get("name"), f"{at}.name"),
                description=optional_text(function.get("description"), f"{at}.description"),
                parameters=as_mapping({} if parameters is None else parameters, f"{at}.parameters"),
            )
        )
    return tuple(tools)


# --------------------------------------------------------------------------- replies


def _head(opening: Opening, kind: str) -> dict[str, Any]:
    return {"id": opening.id, "object": kind, "created": opening.created, "model": opening.model}


def _chunk(opening: Opening, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return frame({**_head(opening, "chat.completion.chunk"), "choices": [choice]})


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    if message.content:
        yield {"content": message.content}
    for index, call in enumerate(message.tool_calls):
        yield {"tool_calls": [{"index": index, **_wire_call(call)}]}


def _wire_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dumps(call.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _finish_reason(reply: Reply) -> str:
    if reply.finish == "length":
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
