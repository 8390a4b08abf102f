"""What is special about the Anthropic wire."""

from __future__ import annotations

import json
from typing import Any

from rollwright.dialects import Opening, Problem, Reply, Request, Usage
from rollwright.dialects.anthropic import Anthropic
from rollwright.messages import Message, ToolCall, ToolSpec

ASKED = Request(model="m", messages=(), tools=(), stream=False)
wire = Anthropic()


def parsed(*messages: dict[str, Any], **body: Any) -> tuple[Message, ...]:
    return wire.parse({"messages": list(messages), **body}).messages


def reply(message: Message, finish: Any = "stop") -> Reply:
    return Reply(
        opening=Opening(id="msg_1", model="m", created=0, prompt_tokens=10),
        message=message,
        signature="rw1",
        finish=finish,
        usage=Usage(prompt_tokens=10, sampled_tokens=3),
    )


def test_the_system_prompt_may_be_text_or_blocks() -> None:
    said = {"role": "user", "content": "x"}
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert parsed(said, system="a")[0] == Message(role="system", content="a")
    assert parsed(said, system=blocks)[0] == Message(role="system", content="a\n\nb")


def test_the_billing_header_is_no_part_of_the_prompt() -> None:
    said = {"role": "user", "content": "x"}
    billing = "x-anthropic-billing-header: cc_version=2.1.332.a1b; cch=00f3;"
    for system in (
        [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent."}],
        f"{billing}\nYou are an agent.",
    ):
        assert parsed(said, system=system)[0].content == "You are an agent."
    assert parsed(said, system=[{"type": "text", "text": billing}])[0].role == "user"


def test_a_moving_cache_mark_and_text_as_a_block_change_nothing() -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert parsed({"role": "user", "content": [block]}) == parsed({"role": "user", "content": "hi"})


def test_empty_text_blocks_leave_nothing() -> None:
    empty = {"type": "text", "text": ""}
    assert parsed({"role": "user", "content": "hi"}, {"role": "user", "content": [empty]}) == (
        Message(role="user", content="hi"),
    )


def test_tool_results_come_in_order_and_know_their_tool() -> None:
    messages = parsed(
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "t2", "name": "read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a\n"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [
                        {"type": "text", "text": "one"},
                        {"type": "image", "source": {}},
                        {"type": "text", "text": "two"},
                    ],
                },
                {"type": "text", "text": "<system-reminder>be quick</system-reminder>"},
                {"type": "text", "text": "go on"},
            ],
        },
    )
    assert messages[2:] == (
        Message(role="tool", content="a\n", tool_call_id="t1", tool_name="bash"),
        Message(role="tool", content="one\n[image omitted]\ntwo", tool_call_id="t2", tool_name="read"),
        Message(role="user", content="<system-reminder>be quick</system-reminder>\ngo on"),
    )


def test_a_failed_tool_says_so_even_when_it_says_nothing_else() -> None:
    def result(content: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
        return parsed({"role": "user", "content": [block]})[0].content

    assert result("no such file") == "[error] no such file"
    assert result(None) == "[error]"


def test_thinking_carries_the_signature_we_gave() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "rw77"},
        {"type": "text", "text": " well "},
        {"type": "tool_use", "id": "t1", "name": "bash", "input": {}},
    ]
    (message,) = parsed({"role": "assistant", "content": content})
    assert message.reasoning == "hm"
    assert message.content == " well "
    assert message.carriers == ("rw77", "t1")


def test_arguments_that_are_no_object_travel_as_claude_code_writes_them_and_come_back() -> None:
    call = ToolCall(name="bash", arguments='{"command": "ls', id="t1")
    body = wire.reply(reply(Message(role="assistant", tool_calls=(call,))), ASKED)
    (block,) = body["content"]
    assert block["input"] == {"__unparsedToolInput": {"raw": '{"command": "ls', "len": 15}}
    assert parsed({"role": "assistant", "content": body["content"]})[0].tool_calls == (call,)


def test_the_vendors_own_tools_are_left_out() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "bash", "description": "run", "input_schema": {"type": "object"}},
        {"type": "custom", "name": "bare"},
    ]
    request = wire.parse({"messages": [{"role": "user", "content": "x"}], "tools": tools})
    assert request.tools == (
        ToolSpec(name="bash", description="run", parameters={"type": "object"}),
        ToolSpec(name="bare"),
    )


def test_stop_reasons() -> None:
    call = ToolCall(name="bash", arguments={}, id="t1")
    assert wire.reply(reply(Message(role="assistant", content="x")), ASKED)["stop_reason"] == "end_turn"
    assert wire.reply(reply(Message(role="assistant", tool_calls=(call,))), ASKED)["stop_reason"] == "tool_use"
    assert wire.reply(reply(Message(role="assistant", content="x"), "length"), ASKED)["stop_reason"] == "max_tokens"


def test_an_overlong_prompt_is_told_in_the_sentence_claude_code_reads() -> None:
    status, body = wire.error(Problem(kind="too_long", message="", tokens=210_000, maximum=200_000))
    assert status == 400
    assert body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: 210000 tokens > 200000 maximum",
        },
    }


def test_the_keepalive_is_a_ping() -> None:
    opening = Opening(id="msg_1", model="m", created=0, prompt_tokens=1)
    assert wire.keepalive(opening) == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert json.loads(wire.opening(opening).split(b"data: ")[1])["message"]["usage"]["input_tokens"] == 1
