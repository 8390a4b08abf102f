"""The vLLM engine against a real HTTP server that speaks vLLM's contract, well and badly, on both of its routes."""

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
from rollwright.engines.vllm import VllmEngine
from rollwright.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnreachable
from rollwright.testing.loopback_vllm import LoopbackVllm, VllmFault, loopback_vllm
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.types import Sampling, VersionSpan

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7, 8]
ROUTES = ["generate", "completions"]


@pytest.fixture
async def server(renderer: Renderer, model: Path) -> AsyncIterator[LoopbackVllm]:
    async with (
        LocalEngine(renderer=renderer, model=model, version="default") as local,
        loopback_vllm(local, renderer) as running,
    ):
        yield running


@asynccontextmanager
async def engine_of(server: LoopbackVllm, **options: Any) -> AsyncIterator[VllmEngine]:
    options = {"logprob_kind": "behaviour"} | options
    async with VllmEngine(renderer=server.renderer, url=server.url, **options) as engine:
        yield engine


async def ask(
    engine: VllmEngine, sampling: Sampling | None = None, *, request: str = "r1", prompt: list[int] | None = None
) -> Generation:
    return await engine.generate(
        prompt or PROMPT,
        sampling or Sampling(max_new_tokens=6, seed=1),
        stop_ids=frozenset(),
        request_id=request,
        session_key="session-7",
    )


async def test_the_token_route_is_used_where_the_server_has_it(server: LoopbackVllm) -> None:
    async with engine_of(server) as engine:
        await ask(engine, Sampling(max_new_tokens=2, temperature=0.5, top_p=0.9, top_k=7, seed=3))
    (received,) = server.received
    assert (received.path, received.session) == ("/inference/v1/generate", "session-7")
    assert (received.body["request_id"], received.body["token_ids"]) == ("r1", PROMPT)
    parameters = received.body["sampling_params"]
    assert (parameters["temperature"], parameters["top_p"], parameters["top_k"]) == (0.5, 0.9, 7)
    assert (parameters["max_tokens"], parameters["seed"], parameters["logprobs"]) == (2, 3, 0)


async def test_a_server_without_it_is_asked_for_completions_of_ids(server: LoopbackVllm) -> None:
    server.scale_out = False
    async with engine_of(server) as engine:
        await ask(engine)
    (received,) = server.received
    assert received.path == "/v1/completions"
    assert (received.body["prompt"], received.body["return_token_ids"]) == (PROMPT, True)


@pytest.mark.parametrize("route", ROUTES)
async def test_nothing_is_left_to_the_models_generation_config(server: LoopbackVllm, route: str) -> None:
    async with engine_of(server, route=route) as engine:
        await ask(engine)
    body = server.received[0].body
    parameters = body if route == "completions" else body["sampling_params"]
    assert (parameters["min_p"], parameters["repetition_penalty"], parameters["top_k"]) == (0.0, 1.0, 0)
    assert (parameters["presence_penalty"], parameters["frequency_penalty"]) == (0.0, 0.0)
    assert parameters["ignore_eos"] is True, "the eos of the model's config would end turns that the policy does not"


@pytest.mark.parametrize("route", ROUTES)
async def test_the_reply_is_the_engines_token_for_token(server: LoopbackVllm, route: str) -> None:
    async with engine_of(server, route=route) as engine:
        got = await ask(engine)
    want = await server.engine.generate(
        PROMPT, Sampling(max_new_tokens=6, seed=1), stop_ids=frozenset(), request_id="x", session_key="y"
    )
    assert (got.ids, got.logprobs, got.finish, got.versions) == (want.ids, want.logprobs, want.finish, want.versions)
    assert want.cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fault", ["null_logprob", "clamped_logprob"])
async def test_a_logprob_that_the_engine_does_not_have_is_not_a_number(
    server: LoopbackVllm, route: str, fault: VllmFault
) -> None:
    async with engine_of(server, route=route) as engine:
        whole = await ask(engine)
        server.faults.append(fault)
        got = await ask(engine, request="r2")
    assert (got.ids, got.logprobs[:-1]) == (whole.ids, whole.logprobs[:-1])
    assert math.isnan(got.logprobs[-1])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("drop", EngineUnreachable, "127.0.0.1"),
        ("truncated_json", EngineProtocolError, "not JSON"),
        ("not_an_object", EngineProtocolError, "not an object"),
        ("no_choices", EngineProtocolError, "0 choices"),
        ("no_logprobs", EngineProtocolError, "logprobs is not an object"),
        ("null_logprobs", EngineProtocolError, "no logprob of any token"),
        ("short_logprobs", EngineProtocolError, r"6\b.*\b5\b"),
        ("foreign_stop", EngineProtocolError, "ends no turn"),
        ("cut_short", EngineProtocolError, "sampled 5 tokens where 6 were asked for"),
    ],
)
async def test_a_reply_that_breaks_the_contract_is_an_error_never_a_turn(
    server: LoopbackVllm, route: str, fault: VllmFault, error: type[Exception], says: str
) -> None:
    server.faults.append(fault)
    async with engine_of(server, route=route) as engine:
        with pytest.raises(error, match=says):
            await ask(engine)
        assert (await ask(engine, request="r2")).finish == "length", "the next call is served again"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("other_ids", "are not the ids of the logprobs"),
        ("versions_with_gap", "do not cover 6 tokens"),
        ("no_versions", "does not say which weights"),
    ],
)
async def test_the_token_route_is_held_to_what_only_it_tells(server: LoopbackVllm, fault: VllmFault, says: str) -> None:
    server.faults.append(fault)
    async with engine_of(server, route="generate") as engine:
        with pytest.raises(EngineProtocolError, match=says):
            await ask(engine)


async def test_completions_of_another_prompt_are_noticed(server: LoopbackVllm) -> None:
    server.faults.append("other_prompt")
    async with engine_of(server, route="completions") as engine:
        with pytest.raises(EngineProtocolError, match="is not the one sent"):
            await ask(engine)


@pytest.mark.parametrize("route", ROUTES)
async def test_an_error_status_shows_its_body_but_not_all_of_it(server: LoopbackVllm, route: str) -> None:
    server.faults.append("error_500")
    async with engine_of(server, route=route) as engine:
        with pytest.raises(EngineRejected, match=r"answered 500: .*EngineCore") as caught:
            await ask(engine)
    assert caught.value.details["status"] == 500
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("prompt", [[5] * 8192, [5] * 8190], ids=["prompt", "prompt and reply"])
async def test_what_vllm_would_cut_silently_is_rejected_before_it_is_asked(
    server: LoopbackVllm, prompt: list[int]
) -> None:
    async with engine_of(server) as engine:
        with pytest.raises(EngineRejected, match="longer than the context") as caught:
            await ask(engine, prompt=prompt)
    assert caught.value.details["too_long"] is True
    assert server.received == []


async def test_spans_show_new_weights(server: LoopbackVllm) -> None:
    server.faults.append("version_change")
    async with engine_of(server) as engine:
        assert (await ask(engine)).versions == (VersionSpan("default", 0, 1), VersionSpan("changed", 1, 6))


async def test_completions_are_of_the_weights_the_server_names_before_and_after(server: LoopbackVllm) -> None:
    async with engine_of(server, route="completions") as engine:
        assert (await ask(engine)).versions == (VersionSpan("default", 0, 6),)
        server.faults.append("version_change")
        torn = await ask(engine)
        assert (torn.finish, torn.ids) == ("abort", []), "no token's version is known, so none is kept"
        assert (await ask(engine)).versions == (VersionSpan("changed", 0, 6),)


async def test_a_server_that_tells_no_version_needs_the_option(server: LoopbackVllm) -> None:
    server.scale_out = server.development = False
    with pytest.raises(ConfigError, match=r"--enable-scale-out, or set engine\.vllm\.version"):
        async with engine_of(server):
            pass
    async with engine_of(server, version="v7") as engine:
        assert (await ask(engine)).versions == (VersionSpan("v7", 0, 6),)


@pytest.mark.parametrize(
    ("scale_out", "development", "route", "named"),
    [
        (True, False, "generate", "generate-tokens-slow"),
        (False, True, "completions", "cmpl-slow-0"),
        (False, False, "completions", None),
    ],
)
async def test_an_abort_names_the_request_as_the_server_does_or_leaves_it(
    server: LoopbackVllm, scale_out: bool, development: bool, route: str, named: str | None
) -> None:
    server.scale_out, server.development = scale_out, development
    replies: list[Generation] = []
    async with engine_of(server, route=route, version="v0") as engine:

        async def slow() -> None:
            replies.append(await ask(engine, Sampling(max_new_tokens=8000), request="slow"))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(slow)
                while not replies:
                    await engine.abort("slow")
                    await anyio.sleep(0.01)
            assert replies[0].finish == "abort"
            assert (await ask(engine)).finish == "length", "the server is free again"
    assert set(server.aborted) == ({named} if named else set())
    assert server.disconnected == ([] if named else ["cmpl-slow-0"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fault", "kept"), [("abort", 1), ("abort_in_queue", 0)])
async def test_an_abort_at_the_server_comes_back_as_what_was_sampled(
    server: LoopbackVllm, route: str, fault: VllmFault, kept: int
) -> None:
    server.faults.append(fault)
    async with engine_of(server, route=route) as engine:
        reply = await ask(engine)
    assert (reply.finish, len(reply.ids), len(reply.logprobs)) == ("abort", kept, kept)


async def test_leaving_a_call_ends_it_at_the_server(server: LoopbackVllm) -> None:
    async with engine_of(server) as engine:
        with anyio.move_on_after(0.1) as scope:
            await ask(engine, Sampling(max_new_tokens=8000), request="given-up")
        assert scope.cancelled_caught
        with anyio.fail_after(10):
            while not server.disconnected:  # noqa: ASYNC110 - the server's list is no event
                await anyio.sleep(0.01)
            assert (await ask(engine)).finish == "length"
    assert server.disconnected == ["generate-tokens-given-up"]


async def test_a_paused_server_keeps_the_call_waiting(server: LoopbackVllm) -> None:
    import httpx2

    async with engine_of(server) as engine, httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
        (await client.post("/pause?mode=keep")).raise_for_status()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                done = anyio.Event()

                async def waiting() -> None:
                    await ask(engine)
                    done.set()

                tasks.start_soon(waiting)
                while not server.received:  # noqa: ASYNC110 - the server's list is no event
                    await anyio.sleep(0.01)
                assert not done.is_set()
                (await client.post("/resume")).raise_for_status()
                await done.wait()


async def test_a_model_the_server_does_not_have_is_named_with_those_it_has(server: LoopbackVllm) -> None:
    with pytest.raises(ConfigError, match="serves loopback, not 'qwen'"):
        async with engine_of(server, model="qwen"):
            pass


@pytest.mark.parametrize(("option", "want"), [(None, 8192), (100, 100)])
async def test_the_context_is_the_servers_or_less(server: LoopbackVllm, option: int | None, want: int) -> None:
    async with engine_of(server, max_context=option) as engine:
        assert engine.capabilities.max_context == want


async def test_a_server_in_another_logprob_mode_is_named_before_anything_runs(server: LoopbackVllm) -> None:
    server.logprobs_mode = "raw_logprobs"
    async with engine_of(server) as engine:
        with pytest.raises(ConfigError, match="--logprobs-mode raw_logprobs"):
            await engine.check()
    async with engine_of(server, logprob_kind="raw") as engine:
        await engine.check()


async def test_a_tokenizer_other_than_the_servers_is_named_before_anything_runs(
    server: LoopbackVllm, tmp_path: Path
) -> None:
    folder = tiny_tokenizer(tmp_path)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["d"], vocabulary["z"] = vocabulary["z"], vocabulary["d"]
    file.write_text(json.dumps(described))
    async with VllmEngine(renderer=load_renderer(folder, kind="template"), url=server.url) as engine:
        with pytest.raises(ConfigError, match=r"policy\.path's .*not of one policy"):
            await engine.check()
    assert server.received == []


async def test_a_server_that_is_not_there_is_unreachable(renderer: Renderer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(EngineUnreachable, match=url):
        async with VllmEngine(renderer=renderer, url=url):
            pass
