"""The SGLang engine against a real HTTP server that speaks SGLang's contract, well and badly."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollwright.engines import Generation
from rollwright.engines.local import LocalEngine
from rollwright.engines.sglang import SglangEngine
from rollwright.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnreachable
from rollwright.testing.loopback_sglang import Fault, LoopbackSglang, loopback_sglang
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.types import Sampling, VersionSpan

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7, 8]


@pytest.fixture
async def server(renderer: Renderer, model: Path) -> AsyncIterator[LoopbackSglang]:
    async with (
        LocalEngine(renderer=renderer, model=model, version="default") as local,
        loopback_sglang(local, renderer) as running,
    ):
        yield running


@asynccontextmanager
async def engine_of(server: LoopbackSglang, **options: Any) -> AsyncIterator[SglangEngine]:
    async with SglangEngine(renderer=server.renderer, url=server.url, **options) as engine:
        yield engine


async def ask(
    engine: SglangEngine, sampling: Sampling | None = None, *, request: str = "r1", prompt: list[int] | None = None
) -> Generation:
    return await engine.generate(
        prompt or PROMPT,
        sampling or Sampling(max_new_tokens=6, seed=1),
        stop_ids=frozenset(),
        request_id=request,
        session_key="session-7",
    )


async def test_it_sends_ids_the_request_id_and_the_routing_key(server: LoopbackSglang) -> None:
    async with engine_of(server) as engine:
        await ask(engine, Sampling(max_new_tokens=2, temperature=0.5, top_p=0.9, top_k=7, seed=3))
        await ask(engine, Sampling(max_new_tokens=2))
    first, second = server.received
    assert first.routing_key == "session-7"
    assert first.body["rid"] == "r1"
    assert first.body["input_ids"] == PROMPT
    assert first.body["return_logprob"] is True
    parameters = first.body["sampling_params"]
    assert parameters["temperature"] == 0.5
    assert (parameters["top_p"], parameters["top_k"], parameters["sampling_seed"]) == (0.9, 7, 3)
    assert second.body["sampling_params"]["top_k"] == -1, "SGLang's own way to say off"
    assert "sampling_seed" not in second.body["sampling_params"]


async def test_the_reply_is_the_engines_token_for_token(server: LoopbackSglang) -> None:
    async with engine_of(server) as engine:
        got = await ask(engine)
    want = await server.engine.generate(
        PROMPT, Sampling(max_new_tokens=6, seed=1), stop_ids=frozenset(), request_id="x", session_key="y"
    )
    assert (got.ids, got.logprobs, got.finish, got.versions) == (want.ids, want.logprobs, want.finish, want.versions)
    assert want.cached_tokens == len(PROMPT) - 1


async def test_a_seed_is_kept_from_a_server_that_would_die_of_it(server: LoopbackSglang) -> None:
    server.server_info["enable_deterministic_inference"] = False
    async with engine_of(server) as engine:
        await ask(engine, Sampling(max_new_tokens=2, seed=3))
    assert "sampling_seed" not in server.received[0].body["sampling_params"]


async def test_behaviour_logprobs_are_asked_for_by_name(server: LoopbackSglang) -> None:
    async with engine_of(server, logprob_kind="behaviour") as engine:
        assert engine.capabilities.logprob_kind == "behaviour"
        await ask(engine, Sampling(max_new_tokens=2, top_k=7))
        await ask(engine, Sampling(max_new_tokens=2, temperature=0.7))
        with pytest.raises(EngineRejected, match="finite 1 < top_k"):
            await ask(engine, Sampling(max_new_tokens=2, top_p=0.9))
    cut, whole, _ = (received.body for received in server.received)
    assert (cut["return_sampling_mask"], cut["sampling_logprobs_mode"]) == (True, "selected")
    assert "return_sampling_mask" not in whole, "nothing is cut, so the two are the same numbers"


@pytest.mark.parametrize(
    ("told", "option", "want"),
    [
        ({}, None, 8192),
        ({"context_length": None, "max_req_input_len": 500}, None, 500),
        ({"max_req_input_len": 500}, None, 500),
        ({}, 100, 100),
        ({"context_length": None, "max_req_input_len": None}, 300, 300),
    ],
)
async def test_the_context_is_the_smallest_limit_told(
    server: LoopbackSglang, told: dict, option: int | None, want: int
) -> None:
    server.server_info.update(told)
    async with engine_of(server, max_context=option) as engine:
        assert engine.capabilities.max_context == want


async def test_a_router_that_tells_nothing_is_served_with_what_the_options_say(server: LoopbackSglang) -> None:
    server.tells = False
    async with engine_of(server, max_context=300, version="v7") as engine:
        assert engine.capabilities.max_context == 300
        assert await ask(engine)
    with pytest.raises(ConfigError, match=r"set engine\.sglang\.max_context"):
        async with engine_of(server):
            pass


async def test_a_server_that_tells_no_context_needs_the_option(server: LoopbackSglang) -> None:
    server.server_info.update({"context_length": None, "max_req_input_len": None})
    with pytest.raises(ConfigError, match=r"set engine\.sglang\.max_context"):
        async with engine_of(server):
            pass


@pytest.mark.parametrize("fault", ["null_logprob", "clamped_logprob"])
async def test_a_logprob_that_the_engine_does_not_have_is_not_a_number(server: LoopbackSglang, fault: Fault) -> None:
    async with engine_of(server) as engine:
        whole = await ask(engine)
        server.faults.append(fault)
        got = await ask(engine, request="r2")
    assert (got.ids, got.logprobs[:-1]) == (whole.ids, whole.logprobs[:-1])
    assert math.isnan(got.logprobs[-1])


async def test_one_token_without_a_logprob_is_no_engine_that_gives_none(server: LoopbackSglang) -> None:
    server.faults.append("null_logprobs")
    async with engine_of(server) as engine:
        (logprob,) = (await ask(engine, Sampling(max_new_tokens=1, seed=1))).logprobs
    assert math.isnan(logprob)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("drop", EngineUnreachable, "127.0.0.1"),
        ("truncated_json", EngineProtocolError, "not JSON"),
        ("not_an_object", EngineProtocolError, "not an object"),
        ("no_logprobs", EngineProtocolError, "output_token_logprobs is missing"),
        ("null_logprobs", EngineProtocolError, "no logprob of any token"),
        ("short_logprobs", EngineProtocolError, "output_ids \\(6\\) are not the ids of the logprobs \\(5\\)"),
        ("other_ids", EngineProtocolError, "are not the ids"),
        ("no_id", EngineProtocolError, "something else than ids"),
        ("versions_with_gap", EngineProtocolError, "do not cover 6 tokens"),
        ("foreign_stop", EngineProtocolError, "ends no turn"),
    ],
)
async def test_a_reply_that_breaks_the_contract_is_an_error_never_a_turn(
    server: LoopbackSglang, fault: Fault, error: type[Exception], says: str
) -> None:
    server.faults.append(fault)
    async with engine_of(server) as engine:
        with pytest.raises(error, match=says):
            await ask(engine)
        assert (await ask(engine, request="r2")).finish == "length", "the next call is served again"


async def test_an_error_status_shows_its_body_but_not_all_of_it(server: LoopbackSglang) -> None:
    server.faults.append("error_500")
    async with engine_of(server) as engine:
        with pytest.raises(EngineRejected, match=r"answered 500: .*illegal memory access") as caught:
            await ask(engine)
    assert caught.value.details["status"] == 500
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("prompt", [[5] * 8192, [5] * 8190], ids=["prompt", "prompt and reply"])
async def test_a_prompt_too_long_is_rejected_by_that_name(server: LoopbackSglang, prompt: list[int]) -> None:
    async with engine_of(server) as engine:
        with pytest.raises(EngineRejected, match="does not fit the engine's context") as caught:
            await ask(engine, prompt=prompt)
    assert caught.value.details["too_long"] is True
    assert caught.value.details["status"] == 400


@pytest.mark.parametrize(("fault", "kept"), [("abort", 1), ("abort_in_queue", 0)])
async def test_an_abort_at_the_server_comes_back_as_what_was_sampled(
    server: LoopbackSglang, fault: Fault, kept: int
) -> None:
    server.faults.append(fault)
    async with engine_of(server) as engine:
        reply = await ask(engine)
    assert (reply.finish, len(reply.ids), len(reply.logprobs)) == ("abort", kept, kept)


async def test_spans_show_new_weights_and_old_servers_have_one_span(server: LoopbackSglang) -> None:
    async with engine_of(server) as engine:
        server.faults.extend(["version_change", "one_version"])
        assert (await ask(engine)).versions == (VersionSpan("default", 0, 1), VersionSpan("changed", 1, 6))
        assert (await ask(engine)).versions == (VersionSpan("changed", 0, 6),)


async def test_a_server_that_tells_no_version_gives_the_one_of_the_start_or_the_option(server: LoopbackSglang) -> None:
    async with engine_of(server) as engine:
        server.faults.append("no_version")
        assert (await ask(engine)).versions == (VersionSpan("default", 0, 6),)
    async with engine_of(server, version="mine") as engine:
        server.faults.append("no_version")
        assert (await ask(engine)).versions == (VersionSpan("mine", 0, 6),)


async def test_cancelling_a_call_aborts_it_at_the_server(server: LoopbackSglang) -> None:
    async with engine_of(server) as engine:
        with anyio.move_on_after(0.1) as scope:
            await ask(engine, Sampling(max_new_tokens=8000), request="given-up")
        assert scope.cancelled_caught
        assert server.aborted == ["given-up"]
        # The server is free again: the same session gets an answer.
        with anyio.fail_after(5):
            assert (await ask(engine)).finish == "length"


async def test_a_tokenizer_other_than_the_servers_is_named_before_anything_runs(
    server: LoopbackSglang, tmp_path: Path
) -> None:
    async with engine_of(server) as engine:
        await engine.check()
    folder = tiny_tokenizer(tmp_path)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["d"], vocabulary["z"] = vocabulary["z"], vocabulary["d"]
    file.write_text(json.dumps(described))
    other = load_renderer(folder, kind="template")
    async with SglangEngine(renderer=other, url=server.url) as engine:
        with pytest.raises(ConfigError, match=r"tokenizer loopback/.* policy\.path's"):
            await engine.check()


async def test_a_server_without_tokenize_is_checked_by_one_token(server: LoopbackSglang) -> None:
    server.tokenize = False
    async with engine_of(server) as engine:
        await engine.check()
    assert server.received[0].body["sampling_params"]["max_new_tokens"] == 1


async def test_a_server_that_is_not_there_is_unreachable(renderer: Renderer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(EngineUnreachable, match=url):
        async with SglangEngine(renderer=renderer, url=url):
            pass


async def test_an_endless_reply_is_cut_off(renderer: Renderer) -> None:
    async def flood(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
            try:
                while True:
                    await stream.send(b" " * (1 << 20))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, flood)
        with anyio.fail_after(20), pytest.raises(EngineProtocolError, match="more than 67108864 bytes"):
            async with SglangEngine(renderer=renderer, url=f"http://127.0.0.1:{port}"):
                pass
        tasks.cancel_scope.cancel()
    await listener.aclose()


def test_a_url_that_is_none_is_a_config_error(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match=r"engine\.sglang\.url"):
        SglangEngine(renderer=renderer, url="localhost:30000")
