"""The official SDKs against a gateway on loopback: what they send is understood, what they get is what was sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anthropic
import anyio
import httpx2
import openai
import pytest

from rollwright.engines.scripted import Fault
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.session import SessionLimits
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway, scripted_engine
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.tree import Trajectory
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio


def calls(*commands: str) -> str:
    return "\n".join(
        f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"
        for command in commands
    )


SCRIPT = (
    f"Two things to look at.\n</think>\n\nLet me look.\n{calls('ls -la', 'cat file.py')}",
    f"Now fix.\n</think>\n\n{calls('sed -i s/a/b/ file.py')}",
    "Done.\n</think>\n\nThe fix is done.",
)
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), thinking=True))


class Client:
    """One conversation by one SDK, as an agent's loop has it: ask, run the calls, ask again."""

    errors: Any
    bad_request: type[Exception]

    def __init__(self, url: str, key: str) -> None:
        self.messages: list[Any] = [{"role": "user", "content": "Fix the bug."}]

    async def ask(self, *, stream: bool) -> dict[str, Any]:
        """The next reply, added to the conversation with a result for each of its calls."""
        raise NotImplementedError


class AnthropicClient(Client):
    errors = anthropic

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.sdk = anthropic.AsyncAnthropic(base_url=url, auth_token=key, api_key=None, max_retries=0)

    async def ask(self, *, stream: bool) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": "m",
            "max_tokens": 32000,
            "extra_body": {"temperature": 0.1},
            "system": [{"type": "text", "text": "You are a coding agent."}],
            "tools": [{"name": "bash", "description": "Run it.", "input_schema": PARAMETERS}],
            "messages": self.messages,
        }
        if stream:
            async with self.sdk.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await self.sdk.messages.create(**asked, timeout=60)
        content = [block.model_dump(exclude_none=True) for block in message.content]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
            for block in content
            if block["type"] == "tool_use"
        ]
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results or "Thanks."}]
        said = {block["type"]: block for block in content}
        return {
            "reasoning": said.get("thinking", {}).get("thinking"),
            "content": said.get("text", {}).get("text", ""),
            "calls": [block["input"] for block in content if block["type"] == "tool_use"],
            "ids": [block["id"] for block in content if block["type"] == "tool_use"],
            "finish": {"tool_use": "calls", "end_turn": "stop", "max_tokens": "length"}[message.stop_reason or ""],
            "usage": (message.usage.input_tokens, message.usage.output_tokens),
        }


class OpenAIClient(Client):
    errors = openai

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.messages.insert(0, {"role": "developer", "content": "You are a coding agent."})
        self.sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    async def ask(self, *, stream: bool) -> dict[str, Any]:
        function = {"name": "bash", "description": "Run it.", "parameters": PARAMETERS}
        asked: dict[str, Any] = {
            "model": "m",
            "max_completion_tokens": 32000,
            "temperature": 0.1,
            "tools": [{"type": "function", "function": function}],
            "messages": self.messages,
        }
        if stream:
            options: Any = {"include_usage": True}
            async with self.sdk.chat.completions.stream(**asked, stream_options=options) as events:
                completion: Any = await events.get_final_completion()
        else:
            completion = await self.sdk.chat.completions.create(**asked)
        (choice,) = completion.choices
        message = cast(dict[str, Any], choice.message.model_dump(exclude_none=True))
        sent = message.get("tool_calls", [])
        for call in sent:
            call["function"].pop("parsed_arguments", None)
        results: Sequence[Any] = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in sent]
        self.messages += [message, *(results or [{"role": "user", "content": "Thanks."}])]
        return {
            "reasoning": message.get("reasoning_content"),
            "content": message.get("content", ""),
            "calls": [json.loads(call["function"]["arguments"]) for call in sent],
            "ids": [call["id"] for call in sent],
            "finish": choice.finish_reason.replace("tool_calls", "calls"),
            "usage": (completion.usage.prompt_tokens, completion.usage.completion_tokens),
        }


class ResponsesClient(Client):
    errors = openai

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.messages.insert(0, {"role": "developer", "content": "You are a coding agent."})
        self.sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    async def ask(self, *, stream: bool) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": "m",
            "max_output_tokens": 32000,
            "temperature": 0.1,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": [{"type": "function", "name": "bash", "description": "Run it.", "parameters": PARAMETERS}],
            "input": self.messages,
        }
        if stream:
            done: list[dict[str, Any]] = []
            async with self.sdk.responses.stream(**asked) as events:
                async for event in events:
                    if event.type == "response.output_item.done":
                        done.append(event.item.model_dump(exclude_none=True))
                response: Any = await events.get_final_response()
            final = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            for item in final:
                for part in item.get("content", ()):
                    part.pop("parsed", None)
            assert done == final
        else:
            response = await self.sdk.responses.create(**asked)
            final = [item.model_dump(exclude_none=True) for item in response.output]
        sent = [item for item in final if item["type"] == "function_call"]
        results: Sequence[Any] = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in sent
        ]
        self.messages += [*final, *(results or [{"role": "user", "content": "Thanks."}])]
        said = {item["type"]: item for item in final}
        return {
            "reasoning": said["reasoning"]["summary"][0]["text"] if "reasoning" in said else None,
            "content": said["message"]["content"][0]["text"] if "message" in said else "",
            "calls": [json.loads(call["arguments"]) for call in sent],
            "ids": [call["call_id"] for call in sent],
            "finish": "calls" if sent else "stop",
            "usage": (response.usage.input_tokens, response.usage.output_tokens),
        }


@asynccontextmanager
async def talking(
    kind: type[AnthropicClient] | type[OpenAIClient] | type[ResponsesClient],
    loop: LoopbackGateway,
    key: str | None = None,
) -> AsyncGenerator[AnthropicClient | OpenAIClient | ResponsesClient]:
    client = kind(loop.url, loop.session.secret if key is None else key)
    async with client.sdk:
        yield client


each_wire = pytest.mark.parametrize("kind", [AnthropicClient, OpenAIClient, ResponsesClient])
streamed_or_not = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@each_wire
@streamed_or_not
async def test_a_conversation_is_one_branch_of_exactly_what_was_sampled(
    renderer: TemplateRenderer, tmp_path: Path, kind: Any, stream: bool
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, *SCRIPT)
    async with loopback_gateway(renderer, engine, log=log) as loop, talking(kind, loop) as client:
        replies = [await client.ask(stream=stream) for _ in range(3)]
        trajectory = await loop.session.close()

    first, second, third = replies
    assert first["reasoning"] == "Two things to look at."
    assert first["content"] == "Let me look."
    assert first["calls"] == [{"command": "ls -la"}, {"command": "cat file.py"}]
    assert second["calls"] == [{"command": "sed -i s/a/b/ file.py"}]
    assert (third["content"], third["calls"]) == ("The fix is done.", [])
    assert [reply["finish"] for reply in replies] == ["calls", "calls", "stop"]
    ids = [identity for reply in replies for identity in reply["ids"]]
    assert len(set(ids)) == 3

    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert all(turn.delivered and turn.drift is None for turn in trajectory.turns)
    for turn, call, reply in zip(trajectory.turns, loop.engine.calls, replies, strict=True):
        assert call.generation is not None
        assert list(turn.sampled) == call.generation.ids
        assert list(turn.logprobs) == call.generation.logprobs
        assert trajectory.ids(turn.index) == call.prompt + call.generation.ids
        assert reply["usage"] == (len(call.prompt), len(call.generation.ids))
    logged = read_turn_log(log)
    assert logged.sealed
    assert logged.trajectory.turns == trajectory.turns


@each_wire
async def test_the_trainers_sampling_is_used_and_the_clients_is_recorded(renderer: TemplateRenderer, kind: Any) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    pinned = Sampling(temperature=0.8, top_p=0.95, top_k=50, max_new_tokens=500)
    async with loopback_gateway(renderer, engine, sampling=pinned) as loop, talking(kind, loop) as client:
        await client.ask(stream=True)
        trajectory = await loop.session.close()
    assert [call.sampling for call in engine.calls] == [pinned]
    (turn,) = trajectory.turns
    assert turn.temperature == 0.8
    assert turn.meta["asked"]["temperature"] == 0.1
    assert 32000 in turn.meta["asked"].values()


@each_wire
@streamed_or_not
async def test_an_unknown_key_is_an_authentication_error(renderer: TemplateRenderer, kind: Any, stream: bool) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    async with loopback_gateway(renderer, engine) as loop:
        for key in ("nobody", loop.session.rollout_id):
            async with talking(kind, loop, key) as client:
                with pytest.raises(client.errors.AuthenticationError):
                    await client.ask(stream=stream)
                with pytest.raises(client.errors.AuthenticationError):
                    await client.sdk.models.list()
    assert engine.calls == []


@each_wire
@streamed_or_not
async def test_a_closed_session_is_a_bad_request_not_a_thing_to_retry(
    renderer: TemplateRenderer, kind: Any, stream: bool
) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, *SCRIPT)) as loop, talking(kind, loop) as client:
        await client.ask(stream=stream)
        await loop.session.close()
        with pytest.raises(client.errors.BadRequestError, match="this session is closed"):
            await client.ask(stream=stream)


@each_wire
@streamed_or_not
async def test_an_overlong_prompt_is_told_in_the_wires_own_words(
    renderer: TemplateRenderer, kind: Any, stream: bool
) -> None:
    engine = scripted_engine(renderer, *SCRIPT, max_context=100)
    words = {
        AnthropicClient: r"prompt is too long: \d+ tokens > 99 maximum",
        OpenAIClient: r"maximum context length is 99 tokens",
        ResponsesClient: r"maximum context length is 99 tokens",
    }[kind]
    async with loopback_gateway(renderer, engine) as loop, talking(kind, loop) as client:
        with pytest.raises(client.errors.BadRequestError, match=words) as caught:
            await client.ask(stream=stream)
        if kind is not AnthropicClient:
            assert caught.value.code == "context_length_exceeded"
        assert loop.session.errors == {"PromptTooLong": 1}
        assert loop.session.last_error is None
        assert (await loop.session.close()).turns == []
    assert engine.calls == []


@each_wire
async def test_a_malformed_request_names_the_field(renderer: TemplateRenderer, kind: Any) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, *SCRIPT)) as loop, talking(kind, loop) as client:
        client.messages.append({"role": "wizard", "content": "x"})
        position = len(client.messages) - 1
        with pytest.raises(client.errors.BadRequestError, match=rf"(messages|input)\.{position}\.role"):
            await client.ask(stream=True)


@each_wire
async def test_the_one_model_is_listed_and_found(renderer: TemplateRenderer, kind: Any) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, *SCRIPT)) as loop, talking(kind, loop) as client:
        assert [model.id async for model in client.sdk.models.list()] == ["policy"]
        assert (await client.sdk.models.retrieve("policy")).id == "policy"
        with pytest.raises(client.errors.NotFoundError, match="only 'policy'"):
            await client.sdk.models.retrieve("gpt-9")


async def test_count_tokens_is_the_number_the_engine_would_be_given(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    async with loopback_gateway(renderer, engine) as loop, talking(AnthropicClient, loop) as client:
        assert isinstance(client, AnthropicClient)
        await client.ask(stream=True)
        tools: Any = [{"name": "bash", "description": "Run it.", "input_schema": PARAMETERS}]
        counted = await client.sdk.messages.count_tokens(
            model="m", messages=client.messages, system="You are a coding agent.", tools=tools
        )
        await client.ask(stream=True)
        assert counted.input_tokens == len(engine.calls[1].prompt)
        assert loop.session.turns == 2


PING = {
    AnthropicClient: b'data: {"type":"ping"}',
    OpenAIClient: b'"delta":{},"finish_reason":null',
    ResponsesClient: b"event: response.in_progress",
}
END = {
    AnthropicClient: b"message_stop",
    OpenAIClient: b"data: [DONE]",
    ResponsesClient: b"event: response.completed",
}
PATH = {
    AnthropicClient: "/v1/messages?beta=true",
    OpenAIClient: "/v1/chat/completions",
    ResponsesClient: "/v1/responses",
}


@asynccontextmanager
async def streaming(kind: Any, loop: LoopbackGateway, text: str = "hi") -> AsyncGenerator[httpx2.Response]:
    """The same request, byte by byte."""
    where = "input" if kind is ResponsesClient else "messages"
    body = {"model": "m", "stream": True, where: [{"role": "user", "content": text}]}
    headers = {"x-api-key": loop.session.secret}
    async with (
        httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as client,
        client.stream("POST", PATH[kind], json=body) as response,
    ):
        yield response


@each_wire
async def test_a_slow_generation_is_kept_alive_by_events_and_shows_nothing_early(
    renderer: TemplateRenderer, kind: Any
) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    engine.hold()
    async with loopback_gateway(renderer, engine, keepalive_seconds=0.02) as loop, streaming(kind, loop) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        seen = b""
        chunks = response.aiter_bytes()
        while seen.count(PING[kind]) < 3:
            seen += await anext(chunks)
        assert b"look" not in seen
        engine.release()
        async for chunk in chunks:
            seen += chunk
        assert b"Let me look." in seen
        assert END[kind] in seen


@each_wire
async def test_a_client_that_leaves_takes_its_generation_with_it(renderer: TemplateRenderer, kind: Any) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    engine.hold()
    async with loopback_gateway(renderer, engine) as loop:
        async with streaming(kind, loop):
            await engine.called(1)
        with anyio.fail_after(5):
            await engine.settled()
        assert [call.outcome for call in engine.calls] == ["cancelled"]
        assert loop.session.errors == {"ClientGone": 1}
        assert (await loop.session.close()).turns == []


@each_wire
async def test_a_client_that_leaves_and_asks_again_gets_the_turn_it_left(renderer: TemplateRenderer, kind: Any) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    engine.hold()
    async with loopback_gateway(renderer, engine) as loop:
        async with streaming(kind, loop):
            await engine.called(1)
        async with streaming(kind, loop) as response:
            engine.release()
            assert END[kind] in await response.aread()
        trajectory = await loop.session.close()
    assert [call.outcome for call in engine.calls] == ["done"]
    assert [turn.delivered for turn in trajectory.turns] == [True]


@each_wire
async def test_equal_requests_at_once_are_one_turn(renderer: TemplateRenderer, kind: Any) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    engine.hold()
    begun: list[int] = []
    bodies: list[bytes] = []
    async with loopback_gateway(renderer, engine) as loop:

        async def one() -> None:
            async with streaming(kind, loop) as response:
                begun.append(response.status_code)
                if len(begun) == 5:  # one that comes after the reply would be another sample
                    engine.release()
                bodies.append(await response.aread())

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(one)
        assert begun == [200] * 5
        assert len(set(bodies)) == 1
        assert loop.session.turns == len(engine.calls) == 1


@each_wire
async def test_an_equal_request_after_a_delivered_reply_is_another_sample(
    renderer: TemplateRenderer, kind: Any
) -> None:
    engine = scripted_engine(renderer, *SCRIPT)
    async with loopback_gateway(renderer, engine) as loop:
        for _ in range(2):
            async with streaming(kind, loop) as response:
                await response.aread()
        trajectory: Trajectory = await loop.session.close()
    assert engine.calls[0].prompt == engine.calls[1].prompt
    assert [(turn.parent, turn.delivered) for turn in trajectory.turns] == [(None, True), (None, True)]


@each_wire
async def test_an_engine_that_fails_closes_the_stream_and_the_retry_gets_the_turn(
    renderer: TemplateRenderer, kind: Any
) -> None:
    engine = scripted_engine(renderer, *SCRIPT, faults=[Fault(call=1, kind="unreachable")])
    async with loopback_gateway(renderer, engine) as loop:
        with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
            async with streaming(kind, loop) as response:
                await response.aread()
        assert loop.session.errors == {"EngineUnreachable": 1}
        assert type(loop.session.last_error).__name__ == "EngineUnreachable"
        async with streaming(kind, loop) as response:
            assert END[kind] in await response.aread()
        assert loop.session.last_error is None
        assert loop.session.turns == 1


@each_wire
async def test_an_engine_that_fails_an_unstreamed_request_is_a_server_error_that_sdks_retry(
    renderer: TemplateRenderer, kind: Any
) -> None:
    faults = [Fault(call=n, kind="rejected") for n in range(1, 4)]
    engine = scripted_engine(renderer, *SCRIPT, faults=faults)
    limits = SessionLimits(failures=3)
    async with loopback_gateway(renderer, engine, limits=limits) as loop, talking(kind, loop) as client:
        for _ in range(2):
            with pytest.raises(client.errors.InternalServerError):
                await client.ask(stream=False)
            assert not loop.session.limit_reached.is_set()
        with pytest.raises(client.errors.InternalServerError):
            await client.ask(stream=False)
        assert loop.session.limit_reached.is_set()
        assert loop.session.limit_reason == "failures"
