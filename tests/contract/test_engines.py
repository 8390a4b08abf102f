"""Every engine we ship keeps the engine contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollwright.engines import Engine
from rollwright.engines.local import LocalEngine
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.engines.sglang import SglangEngine
from rollwright.engines.vllm import VllmEngine
from rollwright.testing.engine_contract import EngineContract
from rollwright.testing.loopback_sglang import loopback_sglang
from rollwright.testing.loopback_vllm import loopback_vllm
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.testing.tiny_llama import write_random_llama
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer

REPLY = "I look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load_renderer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), kind="template")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer) -> Path:
    return write_random_llama(
        tmp_path_factory.mktemp("model"), vocab_size=renderer.vocab_size, layers=1, max_context=20_000
    )


class TestLocalNumpy(EngineContract):
    long_reply = 15_000

    @pytest.fixture
    async def engine(self, renderer: Renderer, model: Path) -> AsyncIterator[Engine]:
        async with LocalEngine(renderer=renderer, model=model) as engine:
            yield engine


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="needs the torch extra")
class TestLocalTorch(EngineContract):
    long_reply = 15_000

    @pytest.fixture
    async def engine(self, renderer: Renderer, model: Path) -> AsyncIterator[Engine]:
        async with LocalEngine(renderer=renderer, model=model, runtime="torch") as engine:
            yield engine


class TestScripted(EngineContract):
    @pytest.fixture
    async def engine(self, renderer: Renderer) -> AsyncIterator[Engine]:
        self.stop_ids = renderer.stop_ids
        script = Script(script=(Rule(replies=(REPLY,)),))
        async with ScriptedEngine(renderer=renderer, script=script, seconds_per_turn=0.1) as engine:
            yield engine


class TestSglangOverLoopback(EngineContract):
    long_reply = 15_000

    @pytest.fixture(params=["temperature", "behaviour"])
    async def engine(self, renderer: Renderer, model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        async with (
            LocalEngine(renderer=renderer, model=model) as local,
            loopback_sglang(local, renderer) as server,
            SglangEngine(renderer=renderer, url=server.url, logprob_kind=request.param) as engine,
        ):
            yield engine


class TestVllmOverLoopback(EngineContract):
    long_reply = 15_000

    @pytest.fixture(params=["generate", "completions"])
    async def engine(self, renderer: Renderer, model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        async with (
            LocalEngine(renderer=renderer, model=model) as local,
            loopback_vllm(local, renderer) as server,
            VllmEngine(renderer=renderer, url=server.url, route=request.param, logprob_kind="behaviour") as engine,
        ):
            yield engine
