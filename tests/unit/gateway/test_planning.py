"""Prompts that take long to plan and prompts that do not fit: what others wait for, and what their clients are told."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.dialects import Request
from rollwright.errors import EngineRejected, PromptTooLong
from rollwright.gateway.session import SessionLimits
from rollwright.gateway.turn import refuse_hopeless
from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway, scripted_engine
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer
from support.hard_prompts import BoastfulEngine, SlowRenderer

CHAT = "/v1/chat/completions"
WIRES = {
    "anthropic": ("/v1/messages", "messages"),
    "chat": (CHAT, "messages"),
    "responses": ("/v1/responses", "input"),
}
each_wire = pytest.mark.parametrize("wire", WIRES)


@pytest.fixture
def slow(tmp_path: Path) -> SlowRenderer:
    return SlowRenderer(tiny_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(tiny_tokenizer(tmp_path_factory.mktemp("plain")))


def client_of(loop: LoopbackGateway, *, url: str = "", key: str = "") -> httpx2.AsyncClient:
    headers = {"x-api-key": key or loop.session.secret}
    return httpx2.AsyncClient(base_url=url or loop.url, headers=headers, timeout=60)


def body(wire: str, *texts: str, stream: bool = False) -> dict[str, Any]:
    return {"model": "m", "stream": stream, WIRES[wire][1]: [{"role": "user", "content": text} for text in texts]}


# --------------------------------------------------------------------------- a session's share of the threads


@pytest.mark.anyio
@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_however_much_one_session_asks_another_gets_its_turn(slow: SlowRenderer, path: str) -> None:
    statuses: list[int] = []
    shared = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{shared.getsockname()[1]}"
    async with (
        loopback_gateway(slow, scripted_engine(slow, "said")) as loop,
        loop.gateway.listening(shared),
        client_of(loop) as greedy,
        anyio.create_task_group() as group,
    ):

        async def flood(number: int) -> None:
            response = await greedy.post(path, json=body("chat", f"slow {number}"))
            statuses.append(response.status_code)

        other = loop.gateway.open("task.2", log=None, limits=SessionLimits())
        try:
            for number in range(8):
                group.start_soon(flood, number)
            await anyio.to_thread.run_sync(slow.waiting.acquire)
            with anyio.fail_after(30):
                async with client_of(loop, url=url, key=other.secret) as modest:
                    assert (await modest.post(CHAT, json=body("chat", "hi"))).status_code == 200
            assert statuses == []
        finally:
            slow.may.set()
    assert statuses == [200] * 8


# --------------------------------------------------------------------------- prompts that are far too long


@pytest.mark.anyio
@each_wire
async def test_a_prompt_far_beyond_the_context_is_refused_at_the_cost_of_one_that_fits(
    slow: SlowRenderer, wire: str
) -> None:
    path, _ = WIRES[wire]
    engine = scripted_engine(slow, "said", max_context=1000)
    slow.counted = 0
    async with loopback_gateway(slow, engine) as loop, client_of(loop) as client:
        endless = "slow " + "all of it again and again. " * 100_000
        for asked in (path, "/v1/messages/count_tokens" if wire == "anthropic" else path):
            response = await client.post(asked, json=body(wire, endless))
            assert response.status_code == 400
            assert "999" in response.json()["error"]["message"]
        # A message is at least a token, whatever is in it.
        assert (await client.post(path, json=body(wire, *["slow"] * 1001))).status_code == 400
        assert loop.session.errors == {"PromptTooLong": 3}
        assert loop.session.last_error is None
    # Nothing was rendered (it would have waited), and of twice 2.7 million characters one piece each was counted.
    assert not slow.waiting.acquire(blocking=False)
    assert 0 < slow.counted < 200_000


LONG = "all of it again and again. " * 1000
HIDDEN = {
    "arguments": Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"x": LONG}),)),
    "arguments of arguments": Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"x": [{LONG: 1}]}),)),
    "arguments that are none": Message(role="assistant", tool_calls=(ToolCall(name="f", arguments=LONG),)),
    "parameters": ToolSpec(name="f", parameters={"properties": {"x": {"description": LONG}}}),
    "names of parameters": ToolSpec(name="f", parameters={LONG: {}}),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_a_text_is_counted_wherever_it_is(plain: TemplateRenderer, where: str) -> None:
    said = HIDDEN[where]
    messages = (Message(role="user", content="hi"), *((said,) if isinstance(said, Message) else ()))
    tools = (said,) if isinstance(said, ToolSpec) else ()
    request = Request(model="m", messages=messages, tools=tools, stream=False)
    with pytest.raises(PromptTooLong):
        refuse_hopeless(request, plain, 200)
    refuse_hopeless(request, plain, 20_000)


@given(
    texts=st.lists(st.text(alphabet="ab \n-<|>é漢", max_size=200) | st.just("a" * 300), min_size=1, max_size=20),
    maximum=st.integers(1, 60),
)
def test_nothing_that_fits_is_refused_unrendered(plain: TemplateRenderer, texts: list[str], maximum: int) -> None:
    messages = tuple(Message(role="user", content=text) for text in texts)
    refused = False
    try:
        refuse_hopeless(Request(model="m", messages=messages, tools=(), stream=False), plain, maximum)
    except PromptTooLong:
        refused = True
    assert not refused or len(plain.render(messages, ())) > maximum


# --------------------------------------------------------------------------- streams that begin before the prompt


@pytest.mark.anyio
@each_wire
async def test_a_stream_lives_while_its_prompt_is_planned(slow: SlowRenderer, wire: str) -> None:
    engine = scripted_engine(slow, "said")
    async with (
        loopback_gateway(slow, engine, keepalive_seconds=0.01) as loop,
        client_of(loop) as client,
        client.stream("POST", WIRES[wire][0], json=body(wire, "slow", stream=True)) as response,
    ):
        assert response.status_code == 200
        chunks = response.aiter_bytes()
        seen = b""
        while seen.count(b"\n\n") < 5:
            seen += await anext(chunks)
        assert engine.calls == []
        slow.may.set()
        async for chunk in chunks:
            seen += chunk
    events = [line for line in seen.split(b"\n") if line.startswith(b"data: {")]
    assert b"said" in seen
    if wire == "anthropic":
        # The first event tells the prompt's tokens and so waits for them; pings need not.
        assert events[0] == b'data: {"type":"ping"}'
        (start,) = [event for event in events if b"message_start" in event]
        assert f'"input_tokens":{len(engine.calls[0].prompt)},'.encode() in start
    else:
        first = b'"role":"assistant"' if wire == "chat" else b'"type":"response.created"'
        assert [first in event for event in events] == [True] + [False] * (len(events) - 1)


@pytest.mark.anyio
@each_wire
async def test_what_cannot_be_told_by_the_status_any_more_is_told_in_the_stream(slow: SlowRenderer, wire: str) -> None:
    engine = scripted_engine(slow, "said", max_context=10)
    async with (
        loopback_gateway(slow, engine, keepalive_seconds=0.01) as loop,
        client_of(loop) as client,
        client.stream("POST", WIRES[wire][0], json=body(wire, "slow " * 10, stream=True)) as response,
    ):
        assert response.status_code == 200
        slow.may.set()
        assert told_too_long(await response.aread(), wire)
        assert loop.session.errors == {"PromptTooLong": 1}
    assert engine.calls == []


def told_too_long(seen: bytes, wire: str) -> bool:
    """By the last event of a stream that ended as it should."""
    last = seen.rstrip().rpartition(b"\n\n")[2]
    return {
        "anthropic": b"event: error\n" in last and b"prompt is too long: " in last,
        "chat": b'data: {"error":{"message":' in last and b'"context_length_exceeded"' in last,
        "responses": b"event: response.failed\n" in last and b'"code":"context_length_exceeded"' in last,
    }[wire]


# --------------------------------------------------------------------------- an engine that takes less than it says


@pytest.mark.anyio
@each_wire
async def test_a_prompt_that_is_too_long_for_the_engine_alone_is_the_clients_to_shorten(
    plain: TemplateRenderer, wire: str
) -> None:
    engine = BoastfulEngine(scripted_engine(plain, "said"), takes=30)
    path, long = WIRES[wire][0], "all of it again and again. " * 9
    async with loopback_gateway(plain, engine) as loop, client_of(loop) as client:
        for _ in range(3):
            refused = await client.post(path, json=body(wire, long))
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert "prompt is too long" in message or refused.json()["error"]["code"] == "context_length_exceeded"
            refused = await client.post(path, json=body(wire, long))
            assert loop.session.last_error is None
            assert (await client.post(path, json=body(wire, "short"))).status_code == 200
        assert set(loop.session.errors) == {"PromptTooLong"}
        trajectory = await loop.session.close()
    assert len(trajectory.turns) == 3


@pytest.mark.anyio
@each_wire
async def test_an_engine_that_refuses_late_is_told_of_in_the_stream(plain: TemplateRenderer, wire: str) -> None:
    engine = BoastfulEngine(scripted_engine(plain, "said"), takes=3)
    engine.hold()
    async with (
        loopback_gateway(plain, engine, keepalive_seconds=0.01) as loop,
        client_of(loop) as client,
        client.stream("POST", WIRES[wire][0], json=body(wire, "hi", stream=True)) as response,
    ):
        engine.release()
        assert told_too_long(await response.aread(), wire)
        assert loop.session.last_error is None


@pytest.mark.anyio
async def test_an_engine_that_refuses_at_once_is_told_of_by_the_status_of_a_stream(plain: TemplateRenderer) -> None:
    engine = BoastfulEngine(scripted_engine(plain, "said"), takes=3)
    async with loopback_gateway(plain, engine, limits=SessionLimits(failures=None)) as loop, client_of(loop) as client:
        statuses: set[int] = set()
        while 400 not in statuses:  # a machine that is busy for a quarter of a second sends headers first
            statuses.add((await client.post(CHAT, json=body("chat", "hi", stream=True))).status_code)
            assert loop.session.errors["PromptTooLong"] < 100


@pytest.mark.anyio
async def test_an_engine_that_takes_no_prompt_however_short_is_a_failure_of_ours(plain: TemplateRenderer) -> None:
    engine = BoastfulEngine(scripted_engine(plain, "said"), takes=0)
    limits = SessionLimits(failures=2)
    async with loopback_gateway(plain, engine, limits=limits) as loop, client_of(loop) as client:
        for refusals in range(1, 6):
            assert (await client.post(CHAT, json=body("chat", "hi"))).status_code == 400
            assert isinstance(loop.session.last_error, EngineRejected) == (refusals >= 4)
            assert loop.session.limit_reason == ("failures" if refusals == 5 else None)
