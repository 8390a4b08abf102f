"""What is special about the Chat Completions wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollwright.dialects import Opening, Problem, Reply, Request, Usage
from rollwright.dialects.openai_chat import OpenAIChat
from rollwright.errors import MalformedRequest
from rollwright.messages import Message, ToolCall, ToolSpec

ASKED = Request(model="m", messages=(), tools=(), stream=False)
wire = OpenAIChat()


def parsed(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return wire.parse({"messages": list(messages)}).messages


def reply(message: Message, finish: Any = "stop") -> Reply:
    return Reply(
        opening=Opening(id="chatcmpl-1", model="m", created=0, prompt_tokens=10),
        message=message,
        signature="rw1",
        finish=finish,
        usage=Usage(prompt_tokens=10, sampled_tokens=3, cached_tokens=8),
    )


def test_a_developer_is_a_system() -> None:
    assert parsed({"role": "developer", "content": "be good"}, {"role": "user", "content": "x"})[0] == Message(
        role="system", content="be good"
    )


def test_content_may_be_text_parts_or_nothing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert parsed({"role": "user", "content": parts})[0].content == "a\n[image omitted]"
    assert parsed({"role": "assistant", "content": None})[0].content == ""
    assert parsed({"role": "assistant", "content": [{"type": "text", "text": " a "}]})[0].content == " a "


def test_arguments_are_parsed_when_they_are_an_object_and_kept_as_text_when_not() -> None:
    def arguments(text: Any) -> Any:
        call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": text}}
        return parsed({"role": "assistant", "tool_calls": [call]})[0].tool_calls[0].arguments

    assert arguments('{"b": 1, "a": "é"}') == {"b": 1, "a": "é"}
    assert arguments('{"command": "ls') == '{"command": "ls'
    assert arguments("[1]") == "[1]"
    assert arguments("") == ""
    assert arguments({"a": 1}) == {"a": 1}


def test_a_tool_message_knows_its_tool() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    messages = parsed(
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
        {"role": "tool", "tool_call_id": "c1__qwen_dup_2", "content": "out"},
    )
    assert messages == (
        Message(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(name="bash", arguments={}, id="c1"),),
            carriers=("c1",),
        ),
        Message(role="tool", content="out", tool_call_id="c1", tool_name="bash"),
        Message(role="tool", content="out", tool_call_id="c1__qwen_dup_2"),
    )


def test_tools_are_functions() -> None:
    said = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "bash", "description": None, "parameters": None}}
    assert wire.parse({"messages": [said], "tools": [tool]}).tools == (ToolSpec(name="bash"),)
    with pytest.raises(MalformedRequest, match=r"^tools\.0\.type: must be function$"):
        wire.parse({"messages": [said], "tools": [{"type": "custom"}]})


def test_usage_ends_a_stream_only_where_it_was_asked_for() -> None:
    def last(options: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": options}
        request = wire.parse(body)
        stream = wire.terminal(reply(Message(role="assistant", content="x")), request).split(b"\n\n")
        assert stream[-2:] == [b"data: [DONE]", b""]
        return json.loads(stream[-3].removeprefix(b"data: "))

    assert last({"include_usage": True})["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert "usage" not in last(None)
    assert "usage" not in last({"include_usage": False})


def test_every_parallel_call_is_sent() -> None:
    calls = tuple(ToolCall(name="bash", arguments={"n": n}, id=f"c{n}") for n in range(3))
    body = wire.reply(reply(Message(role="assistant", tool_calls=calls)), ASKED)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["c0", "c1", "c2"]


def test_a_turn_out_of_tokens_says_length() -> None:
    body = wire.reply(reply(Message(role="assistant", content="x"), "length"), ASKED)
    assert body["choices"][0]["finish_reason"] == "length"


def test_arguments_that_are_no_object_are_sent_as_they_were_sampled() -> None:
    call = ToolCall(name="bash", arguments='{"command": "ls', id="c1")
    body = wire.reply(reply(Message(role="assistant", tool_calls=(call,))), ASKED)
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls'


def test_an_overlong_prompt_has_the_code_clients_look_for() -> None:
    status, body = wire.error(Problem(kind="too_long", message="", tokens=9000, maximum=8000))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "8000" in body["error"]["message"]
    assert "9000" in body["error"]["message"]


def test_the_keepalive_is_an_empty_delta() -> None:
    chunk = wire.keepalive(Opening(id="chatcmpl-1", model="m", created=0, prompt_tokens=1))
    assert json.loads(chunk.removeprefix(b"data: "))["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]


def test_a_stream_without_usage_still_ends() -> None:
    request = Request(model="m", messages=(), tools=(), stream=True, include_usage=False)
    assert wire.terminal(reply(Message(role="assistant")), request).endswith(b"data: [DONE]\n\n")
