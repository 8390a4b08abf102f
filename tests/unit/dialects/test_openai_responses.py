"""What is special about the Responses wire."""

from __future__ import annotations

from typing import Any

import pytest

from rollwright.dialects import Opening, Problem, Reply, Request, Usage
from rollwright.dialects.openai_responses import OpenAIResponses
from rollwright.errors import MalformedRequest
from rollwright.messages import Message, ToolCall

wire = OpenAIResponses()
OPENING = Opening(id="resp_1", model="m", created=0, prompt_tokens=10)

TOOLS: list[Any] = [
    {"type": "function", "name": "shell", "description": "Run.", "parameters": {"type": "object"}, "strict": False},
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Agents.",
        "tools": [{"type": "function", "name": "spawn_agent", "description": "Start.", "parameters": {}}],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"},
    },
    {"type": "web_search"},
    {"type": "local_shell"},
]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def parsed(*items: dict[str, Any], **more: Any) -> tuple[Message, ...]:
    return wire.parse({"input": list(items), **more}).messages


def asked(**more: Any) -> Request:
    return wire.parse({"input": [user("go")], "tools": TOOLS, **more})


def said(request: Request, *calls: ToolCall, content: str = "", reasoning: str | None = None) -> Reply:
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    return Reply(
        opening=OPENING,
        message=wire.settle(message, OPENING, request),
        signature="rw1",
        finish="stop",
        usage=Usage(prompt_tokens=10, sampled_tokens=3, cached_tokens=8),
    )


def call(name: str, arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id="call_7")


def test_namespaced_tools_are_flat_for_the_policy_and_built_in_ones_are_left_out() -> None:
    tools = {tool.name: tool for tool in asked().tools}
    assert list(tools) == ["shell", "multi_agent_v1__spawn_agent", "apply_patch"]
    assert list(tools["apply_patch"].parameters["properties"]) == ["input"]
    assert "start: begin" in tools["apply_patch"].description


def test_a_call_gets_its_namespace_back_and_comes_back_flat() -> None:
    request = asked()
    reply = said(request, call("multi_agent_v1__spawn_agent", {"x": 1}))
    (item,) = wire.reply(reply, request)["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "spawn_agent", "multi_agent_v1")
    assert parsed(user("go"), item)[-1].tool_calls == reply.message.tool_calls


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": "*** Begin Patch"}, "*** Begin Patch"),
        ({"patch": "x"}, '{"patch":"x"}'),
        ({"input": "a", "more": 1}, '{"input":"a","more":1}'),
        ("not json", "not json"),
    ],
)
def test_a_freeform_call_carries_text_and_the_turn_is_known_again_by_it(arguments: Any, text: str) -> None:
    request = asked()
    reply = said(request, call("apply_patch", arguments))
    (item,) = wire.reply(reply, request)["output"]
    assert (item["type"], item["input"], item["call_id"]) == ("custom_tool_call", text, "call_7")
    (echoed,) = parsed(user("go"), item)[-1].tool_calls
    assert (echoed,) == reply.message.tool_calls
    assert b"response.custom_tool_call_input.done" in wire.content(reply, request)


def test_the_items_of_one_answer_are_one_message_and_those_of_two_are_two() -> None:
    request = asked()
    items = wire.reply(said(request, call("shell", {}), content="Look.", reasoning="Hm."), request)["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    first = parsed(user("go"), *items)
    assert [message.role for message in first] == ["user", "assistant"]
    assert set(first[1].carriers) == {"rw1", "rs_1", "msg_1", "call_7", "fc_7"}
    assert [m.role for m in parsed(user("go"), *items, *items)] == ["user", "assistant", "assistant"]


def test_results_of_both_kinds_name_the_tool_they_come_from() -> None:
    items = [
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "call_1"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "p", "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "done"}]},
    ]
    *_, first, second = parsed(user("go"), *items)
    assert (first.role, first.content, first.tool_name) == ("tool", "ok", "shell")
    assert (second.role, second.content, second.tool_name) == ("tool", "done", "apply_patch")


def test_instructions_and_a_leading_developer_are_the_system_message() -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be quick."}]}
    assert parsed(developer, user("go"), instructions="Be good.") == (
        Message(role="system", content="Be good.\n\nBe quick."),
        Message(role="user", content="go"),
    )


def test_input_may_be_plain_text() -> None:
    assert wire.parse({"input": "go"}).messages == (Message(role="user", content="go"),)


def test_broken_arguments_are_sent_and_taken_as_they_are() -> None:
    request = asked()
    reply = said(request, call("shell", '{"cmd": ["ls"'))
    (item,) = wire.reply(reply, request)["output"]
    assert item["arguments"] == '{"cmd": ["ls"'
    assert parsed(user("go"), item)[-1].tool_calls == reply.message.tool_calls


def test_a_reply_that_ran_out_of_tokens_is_completed_because_codex_fails_on_anything_else() -> None:
    request = asked()
    reply = said(request, content="half")
    cut = Reply(
        opening=OPENING,
        message=reply.message,
        signature="",
        finish="length",
        usage=Usage(prompt_tokens=1, sampled_tokens=1),
    )
    assert wire.reply(cut, request)["status"] == "completed"
    assert wire.terminal(cut, request).startswith(b"event: response.completed\n")


def test_usage_is_true() -> None:
    request = asked()
    assert wire.reply(said(request, content="x"), request)["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_what_is_not_text_leaves_a_note() -> None:
    image = {"type": "input_image", "image_url": "data:"}
    assert parsed({"role": "user", "content": [image]})[0].content == "[image omitted]"
    assert parsed(user("go"), {"type": "web_search_call", "id": "ws_1"})[1].content == "[web_search_call omitted]"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, "tools.0.name"),
    ],
)
def test_what_needs_a_memory_of_ours_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(MalformedRequest) as caught:
        wire.parse(body)
    assert caught.value.details == {"field": field}


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for() -> None:
    status, body = wire.error(Problem(kind="too_long", message="", tokens=9, maximum=8))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
