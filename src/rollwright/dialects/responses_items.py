"""Replies on the Responses wire: the output items of a turn, and the events that say them in a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollwright.dialects import Opening, Reply, WireTool
from rollwright.dialects.jsonio import dumps
from rollwright.dialects.sse import frame
from rollwright.messages import Message, ToolCall

__all__ = ["INPUT", "failed_event", "item_ids", "reply_body", "reply_events", "response_event"]

INPUT = "input"
"""The one argument under which a freeform tool's text travels."""

Json = dict[str, Any]


def item_ids(message: Message, reply_id: str) -> tuple[str, ...]:
    """The ids of the reply's output items. Derived, so that a stream, its body and a replay agree."""
    stem = reply_id.removeprefix("resp_")
    return (
        *((f"rs_{stem}",) if message.reasoning else ()),
        *((f"msg_{stem}",) if message.content else ()),
        *(_call_item_id(call) for call in message.tool_calls),
    )


def reply_body(reply: Reply, tools: Mapping[str, WireTool]) -> Json:
    """The whole response object."""
    # Also for a reply that ran out of tokens: Codex fails the whole run on any other end.
    usage = reply.usage
    return {
        **_head(reply.opening),
        "status": "completed",
        "output": [item for item, _ in _items(reply, tools)],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        },
    }


def response_event(kind: str, opening: Opening, number: int) -> bytes:
    """An event that tells of the response and nothing of the turn."""
    return _event(kind, number, response={**_head(opening), "status": "in_progress", "output": [], "usage": None})


def failed_event(opening: Opening, code: str, message: str) -> bytes:
    """What ends a stream without a turn, after the events of the opening."""
    error = {"code": code, "message": message}
    response: Json = {**_head(opening), "status": "failed", "error": error, "output": [], "usage": None}
    return _event("response.failed", 2, response=response)


def reply_events(reply: Reply, tools: Mapping[str, WireTool]) -> list[bytes]:
    """The events of a whole turn after those of the opening (numbers 0 and 1); the last one ends the stream."""
    told: list[tuple[str, Json]] = []
    for index, (item, parts) in enumerate(_items(reply, tools)):
        told.append(("response.output_item.added", {"output_index": index, "item": item | _EMPTIED[item["type"]]}))
        for kind, data in parts:
            told.append((kind, {"item_id": item["id"], "output_index": index, **data}))
        told.append(("response.output_item.done", {"output_index": index, "item": item}))
    told.append(("response.completed", {"response": reply_body(reply, tools)}))
    return [_event(kind, number, **data) for number, (kind, data) in enumerate(told, start=2)]


def _event(kind: str, number: int, **data: Any) -> bytes:
    return frame({"type": kind, "sequence_number": number, **data}, event=kind)


def _head(opening: Opening) -> Json:
    return {
        "id": opening.id,
        "object": "response",
        "created_at": opening.created,
        "model": opening.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


_EMPTIED: Mapping[str, Json] = {
    "reasoning": {"summary": [], "encrypted_content": None},
    "message": {"content": [], "status": "in_progress"},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": "", "status": "in_progress"},
}
"""What an item's first event leaves to the later ones."""


def _items(reply: Reply, tools: Mapping[str, WireTool]) -> Iterator[tuple[Json, list[tuple[str, Json]]]]:
    """Each output item with the events that build it in a stream."""
    message = reply.message
    stem = reply.opening.id.removeprefix("resp_")
    if message.reasoning:
        yield (
            {
                "type": "reasoning",
                "id": f"rs_{stem}",
                # Not as `content`: clients that read summaries only would lose it.
                "summary": [{"type": "summary_text", "text": message.reasoning}],
                "encrypted_content": reply.signature,
            },
            _text_events("reasoning_summary", "summary_index", "summary_text", {}, message.reasoning),
        )
    if message.content:
        extra: Json = {"annotations": [], "logprobs": []}
        yield (
            {
                "type": "message",
                "id": f"msg_{stem}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": message.content, **extra}],
            },
            _text_events("output", "content_index", "output_text", extra, message.content),
        )
    for call in message.tool_calls:
        yield _call(call, tools.get(call.name))


def _text_events(kind: str, index: str, part: str, extra: Json, text: str) -> list[tuple[str, Json]]:
    """One text part: added, its text at once, done."""
    at: Json = {index: 0}
    about = f"response.{'content' if part == 'output_text' else kind}_part"
    logprobs: Json = {"logprobs": []} if part == "output_text" else {}
    return [
        (f"{about}.added", {**at, "part": {"type": part, "text": "", **extra}}),
        (f"response.{kind}_text.delta", {**at, "delta": text, **logprobs}),
        (f"response.{kind}_text.done", {**at, "text": text, **logprobs}),
        (f"{about}.done", {**at, "part": {"type": part, "text": text, **extra}}),
    ]


def _call_item_id(call: ToolCall) -> str:
    return f"fc_{call.id.removeprefix('call_')}"


def _call(call: ToolCall, tool: WireTool | None) -> tuple[Json, list[tuple[str, Json]]]:
    tool = tool or WireTool(name=call.name)
    arguments = call.arguments
    text: str
    if tool.freeform and not isinstance(arguments, str):
        kind, key, stem = "custom_tool_call", "input", "custom_tool_call_input"
        text = arguments[INPUT]
    else:
        kind, key, stem = "function_call", "arguments", "function_call_arguments"
        text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
    item: Json = {
        "type": kind,
        "id": _call_item_id(call),
        "call_id": call.id,
        "name": tool.name,
        **({"namespace": tool.namespace} if tool.namespace else {}),
        key: text,
        "status": "completed",
    }
    return item, [(f"response.{stem}.delta", {"delta": text}), (f"response.{stem}.done", {key: text})]
