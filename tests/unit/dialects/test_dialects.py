"""What holds for every wire: replies come back as they were said, streams say what bodies say, prefixes stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.dialects import Dialect, Opening, Problem, Reply, Request, Usage
from rollwright.dialects.anthropic import Anthropic
from rollwright.dialects.openai_chat import OpenAIChat
from rollwright.dialects.openai_responses import OpenAIResponses
from rollwright.errors import MalformedRequest
from rollwright.messages import Message, ToolCall

DIALECTS: list[Dialect] = [Anthropic(), OpenAIChat(), OpenAIResponses()]
ASKED = Request(model="m", messages=(), tools=(), stream=True)
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
name = st.text("abcdefgh_", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(text, values, max_size=3)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    calls = tuple(
        ToolCall(name=draw(name), arguments=draw(arguments), id=f"id_{index}")
        for index in range(draw(st.integers(0, 3)))
    )
    reasoning = draw(st.none() | text.filter(bool))
    signature = "rw00"
    prompt, sampled = draw(st.integers(1, 10**6)), draw(st.integers(1, 10**4))
    return Reply(
        opening=Opening(id="reply_1", model="m", created=7, prompt_tokens=prompt),
        message=Message(
            role="assistant",
            content=draw(text),
            reasoning=reasoning,
            tool_calls=calls,
            carriers=(*((signature,) if reasoning else ()), *(call.id for call in calls)),
        ),
        signature=signature,
        finish=draw(st.sampled_from(["stop", "length"])),
        usage=Usage(prompt_tokens=prompt, sampled_tokens=sampled),
    )


def events(stream: bytes) -> list[dict[str, Any]]:
    """Read a stream as a client does: one `data:` line an event, `event:` equal to its type where there is one."""
    read: list[dict[str, Any]] = []
    for block in stream.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] == "[DONE]":
            continue
        data = json.loads(lines["data"])
        assert lines.get("event", data.get("type")) == data.get("type")
        read.append(data)
    return read


def echo(dialect: Dialect, body: dict[str, Any]) -> dict[str, Any]:
    """What a faithful client puts into its history."""
    match dialect.name:
        case "anthropic":
            return {"role": "assistant", "content": body["content"]}
        case "openai_chat":
            return body["choices"][0]["message"]
        case _:
            return {"items": body["output"]}


def conversation(dialect: Dialect, messages: Any) -> dict[str, Any]:
    """Where a wire has its messages; several items where one message is several."""
    if dialect.name != "openai_responses":
        return {"messages": messages}
    if not isinstance(messages, list):
        return {"input": messages}
    items: list[Any] = []
    for message in messages:
        items += message["items"] if isinstance(message, dict) and "items" in message else [message]
    return {"input": items}


def place(dialect: Dialect, field: str) -> str:
    return field.replace("messages", "input") if dialect.name == "openai_responses" else field


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@each_dialect
@given(reply=replies())
def test_an_echoed_reply_is_parsed_back_to_the_message_it_was(dialect: Dialect, reply: Reply) -> None:
    body = conversation(dialect, [user("go"), echo(dialect, dialect.reply(reply, ASKED))])
    expected = dialect.settle(reply.message, reply.opening, ASKED)
    if dialect.name == "openai_responses" and not expected.carriers:
        return  # an empty answer is no item on this wire
    parsed = dialect.parse(json.loads(json.dumps(body))).messages[-1]
    if dialect.name == "openai_chat":  # this wire has no place for a signature
        assert parsed.carriers == tuple(call.id for call in expected.tool_calls)
    else:
        assert set(parsed.carriers) == set(expected.carriers)
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == (
        expected.content,
        expected.reasoning,
        expected.tool_calls,
    )


@each_dialect
@given(reply=replies())
def test_a_stream_adds_up_to_the_body_of_the_unstreamed_reply(dialect: Dialect, reply: Reply) -> None:
    stream = (
        dialect.opening(reply.opening)
        + dialect.keepalive(reply.opening)
        + dialect.content(reply, ASKED)
        + dialect.terminal(reply, ASKED)
    )
    adders = {
        "anthropic": _added_up_anthropic,
        "openai_chat": _added_up_chat,
        "openai_responses": _added_up_responses,
    }
    assert adders[dialect.name](events(stream)) == _comparable(dialect.reply(reply, ASKED))


def _comparable(body: dict[str, Any]) -> dict[str, Any]:
    body = json.loads(json.dumps(body))
    if "choices" in body:
        choice = body["choices"][0]
        message = {key: value for key, value in choice["message"].items() if value}
        return {"id": body["id"], "message": message, "finish": choice["finish_reason"], "usage": body["usage"]}
    return body


def _added_up_anthropic(stream: list[dict[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for event in stream:
        match event["type"]:
            case "message_start":
                body = event["message"]
                assert body["usage"]["output_tokens"] == 0
            case "content_block_start":
                assert event["index"] == len(body["content"])
                body["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = body["content"][event["index"]], event["delta"]
                match delta.pop("type"):
                    case "input_json_delta":
                        block["input"] = json.loads(delta["partial_json"])
                    case kind:
                        (key,) = delta
                        assert kind == f"{key}_delta"
                        block[key] += delta[key]
            case "message_delta":
                body |= event["delta"]
                body["usage"] = event["usage"]
            case "ping" | "content_block_stop" | "message_stop":
                pass
            case other:
                raise AssertionError(other)
    assert stream[-1]["type"] == "message_stop"
    return body


def _added_up_chat(stream: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    finish = usage = None
    for chunk in stream:
        usage = chunk.get("usage")
        for choice in chunk["choices"]:
            finish = choice["finish_reason"]
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    (call,) = value
                    calls = message.setdefault(key, [])
                    assert call.pop("index") == len(calls)
                    calls.append(call)
                else:
                    message[key] = message.get(key, "") + value
    message = {key: value for key, value in message.items() if value}
    return {"id": stream[0]["id"], "message": message, "finish": finish, "usage": usage}


def _added_up_responses(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Builds the items from their deltas, and checks that each is added, told, done and the same in the end."""
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    numbers = [event["sequence_number"] for event in stream]
    assert numbers == sorted(numbers)
    for event in stream[:-1]:
        kind = event["type"]
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
            item = items[event["output_index"]]
        match kind.removeprefix("response."):
            case "created" | "in_progress":
                assert event["response"]["output"] == []
                assert event["response"]["status"] == "in_progress"
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "reasoning_summary_part.added":
                item["summary"].append(event["part"])
            case "content_part.added":
                item["content"].append(event["part"])
            case "reasoning_summary_text.delta":
                item["summary"][event["summary_index"]]["text"] += event["delta"]
            case "output_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "reasoning_summary_text.done":
                assert item["summary"][-1]["text"] == event["text"]
            case "output_text.done":
                assert item["content"][-1]["text"] == event["text"]
            case "function_call_arguments.done":
                assert item["arguments"] == event["arguments"]
            case "reasoning_summary_part.done":
                assert item["summary"][-1] == event["part"]
            case "content_part.done":
                assert item["content"][-1] == event["part"]
            case "output_item.done":
                item = items[event["output_index"]]
                if "status" in item:
                    item["status"] = "completed"
                if item["type"] == "reasoning":
                    item["encrypted_content"] = event["item"]["encrypted_content"]
                assert item == event["item"]
                done.append(item)
            case other:
                raise AssertionError(other)
    assert stream[-1]["type"] == "response.completed"
    response = stream[-1]["response"]
    assert response["output"] == items == done
    return response


def _wire_messages(dialect: Dialect) -> st.SearchStrategy[dict[str, Any]]:
    said = st.builds(user, text)
    aside = st.builds(lambda content: {"role": "system", "content": content}, text)
    answer = replies().map(lambda reply: echo(dialect, dialect.reply(reply, ASKED)))
    if dialect.name == "anthropic":
        result = st.builds(
            lambda content, failed, words: {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "id_0", "content": content, "is_error": failed},
                    {"type": "text", "text": words},
                ],
            },
            text,
            st.booleans(),
            text,
        )
    elif dialect.name == "openai_chat":
        result = st.builds(lambda content: {"role": "tool", "tool_call_id": "id_0", "content": content}, text)
    else:
        result = st.builds(lambda content: {"type": "function_call_output", "call_id": "id_0", "output": content}, text)
    return said | aside | answer | result


@each_dialect
@given(data=st.data())
def test_a_longer_history_begins_with_the_translation_of_the_shorter_one(dialect: Dialect, data: st.DataObject) -> None:
    messages = data.draw(st.lists(_wire_messages(dialect), min_size=2, max_size=6))
    messages = [user("first"), *messages]
    cut = data.draw(st.integers(1, len(messages) - 1))
    if dialect.name == "openai_responses" and "items" in messages[cut - 1]:
        return  # no client asks right after an answer, whose items might go on
    short = dialect.parse(conversation(dialect, messages[:cut])).messages
    assert dialect.parse(conversation(dialect, messages)).messages[: len(short)] == short


_odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "messages",
                    "tools",
                    "name",
                    "input",
                    "function",
                    "tool_calls",
                    "id",
                ]
            ),
            inner
            | st.sampled_from(
                ["user", "assistant", "tool_use", "text", "tool", "function", "reasoning", "function_call", "namespace"]
            ),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@each_dialect
@given(body=st.fixed_dictionaries({}, optional={"messages": _odd, "input": _odd, "tools": _odd, "system": _odd}))
def test_any_json_is_a_request_or_an_error_that_names_a_field(dialect: Dialect, body: dict[str, Any]) -> None:
    refused: MalformedRequest | None = None
    try:
        dialect.parse(body)
    except MalformedRequest as error:
        refused = error
    if refused is not None:
        assert refused.details["field"]
        assert refused.message.startswith(refused.details["field"])


@each_dialect
def test_unknown_fields_are_tolerated_and_settings_are_recorded_as_sent(dialect: Dialect) -> None:
    request = dialect.parse(
        {
            "model": "their-model",
            **conversation(dialect, [user("hi") | {"cache_control": {"type": "ephemeral"}, "vendor": 1}]),
            "temperature": 0.2,
            "top_p": 0.9,
            "max_tokens": 32000,
            "context_management": {"edits": []},
            "stream": True,
        }
    )
    assert request.messages == (Message(role="user", content="hi"),)
    assert request.stream
    assert request.model == "their-model"
    assert request.recorded == {
        "model": "their-model",
        "temperature": 0.2,
        "top_p": 0.9,
        "max_tokens": 32000,
        "stream": True,
    }


@each_dialect
def test_a_setting_too_large_to_be_one_is_not_recorded(dialect: Dialect) -> None:
    body = conversation(dialect, [user("hi")]) | {"tool_choice": {"name": "x" * 5000}, "temperature": 1}
    assert dialect.parse(body).recorded == {"temperature": 1}


@each_dialect
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [user("x"), {"role": "user", "content": 3}]}, "messages.1.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [user("x")], "tools": {}}, "tools"),
        ({"messages": [user("x")], "model": 5}, "model"),
    ],
)
def test_a_malformed_request_names_the_field(dialect: Dialect, body: dict[str, Any], field: str) -> None:
    if "messages" in body:
        body = body | conversation(dialect, body["messages"])
    with pytest.raises(MalformedRequest) as caught:
        dialect.parse(body)
    assert caught.value.details == {"field": place(dialect, field)}


@each_dialect
@pytest.mark.parametrize(
    ("kind", "status"),
    [("unauthorized", 401), ("malformed", 400), ("too_long", 400), ("closed", 400), ("limit", 400), ("not_found", 404)],
)
def test_no_problem_but_ours_has_a_status_that_clients_retry(dialect: Dialect, kind: Any, status: int) -> None:
    got, body = dialect.error(Problem(kind=kind, message="why", tokens=9, maximum=8))
    assert got == status
    assert body["error"]["message"]


@each_dialect
def test_system_text_in_mid_list_becomes_a_user_message_of_its_own(dialect: Dialect) -> None:
    messages = [
        {"role": "system", "content": "be good"},
        {"role": "system", "content": "be quick"},
        user("hi"),
        {"role": "system", "content": [{"type": "text", "text": "it is late"}]},
        {"role": "system", "content": ""},
    ]
    request = dialect.parse(conversation(dialect, messages))
    assert request.messages == (
        Message(role="system", content="be good\n\nbe quick"),
        Message(role="user", content="hi"),
        Message(role="user", content="<system-reminder>\nit is late\n</system-reminder>"),
    )
