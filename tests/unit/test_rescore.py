"""Scoring a stored run again: nothing differs on the engine that sampled it, and what differs is found."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rollwright.engines.local import LocalEngine
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.engines.sglang import SglangEngine
from rollwright.engines.vllm import VllmEngine
from rollwright.errors import ConfigError
from rollwright.rescore import Rescored, rescore_run
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.testing.loopback_gateway import loopback_gateway
from rollwright.testing.loopback_sglang import loopback_sglang
from rollwright.testing.loopback_vllm import loopback_vllm
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.testing.tiny_llama import write_random_llama
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio

PLAIN = Sampling(max_new_tokens=12, seed=7)
CUT = Sampling(max_new_tokens=12, temperature=0.7, top_p=0.8, seed=7)


@pytest.fixture
def renderer(tmp_path: Path) -> TemplateRenderer:
    return TemplateRenderer(tiny_tokenizer(tmp_path / "policy"))


def engine_of(renderer: TemplateRenderer, folder: Path, *, seed: int = 0, version: str = "0") -> LocalEngine:
    model = write_random_llama(folder, vocab_size=renderer.vocab_size, max_context=2048, seed=seed)
    return LocalEngine(renderer=renderer, model=model, version=version)


async def stored_run(renderer: TemplateRenderer, tmp_path: Path, sampling: Sampling = PLAIN) -> RunDir:
    """One rollout of four turns: a line of two, a fork of it, and another conversation."""
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={"config": {}})
    folder = writer.begin("a.1")
    engine = WatchedEngine(engine_of(renderer, tmp_path / "model"))
    async with loopback_gateway(renderer, engine, log=folder.turns, sampling=sampling) as loop:
        headers = {"x-api-key": loop.session.secret}
        async with httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as client:

            async def ask(*messages: Any) -> Any:
                reply = await client.post("/v1/chat/completions", json={"messages": list(messages)})
                return reply.json()["choices"][0]["message"]

            first = {"role": "user", "content": "Fix it."}
            answer = await ask(first)
            await ask(first, answer, {"role": "user", "content": "Go on."})
            await ask(first, answer, {"role": "user", "content": "Stop."})
            await ask({"role": "user", "content": "Something else."})
        turns = (await loop.session.close()).turns
    assert [turn.parent for turn in turns] == [None, 0, 0, None]
    record = RolloutRecord(
        rollout="a.1", task="a", task_id="t", attempt=1, status="resolved", reward=1.0, trainable=True,
        counts_in_baseline=True, sampled_tokens=sum(len(turn.sampled) for turn in turns),
    )  # fmt: skip
    writer.store(record, folder, [])
    writer.close()
    return writer.run


def sampled(run: RunDir) -> int:
    (record,) = run.records()
    return record.sampled_tokens


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
async def test_the_engine_that_sampled_a_run_gives_every_number_again(
    renderer: TemplateRenderer, tmp_path: Path, sampling: Sampling
) -> None:
    run = await stored_run(renderer, tmp_path, sampling)
    async with engine_of(renderer, tmp_path / "model") as engine:
        again = await rescore_run(run, engine)
    assert (again.compared, again.max, again.mean, again.skipped) == (sampled(run), 0.0, 0.0, {})


async def test_other_weights_of_the_same_name_are_found_and_the_worst_token_is_named(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    run = await stored_run(renderer, tmp_path)
    async with engine_of(renderer, tmp_path / "other", seed=1) as engine:
        again = await rescore_run(run, engine)
    assert again.max > 0.1
    assert 0 < again.mean < again.max
    worst = again.worst[0]
    assert (worst.rollout, worst.size) == ("a.1", abs(worst.stored - worst.scored))
    assert [each.size for each in again.worst] == sorted((each.size for each in again.worst), reverse=True)


async def test_tokens_of_weights_that_are_gone_are_not_compared(renderer: TemplateRenderer, tmp_path: Path) -> None:
    run = await stored_run(renderer, tmp_path)
    async with engine_of(renderer, tmp_path / "other", seed=1, version="1") as engine:
        again = await rescore_run(run, engine)
    assert (again.compared, again.max, again.skipped) == (0, 0.0, {"other_version": sampled(run)})


async def over_http(
    run: RunDir, renderer: TemplateRenderer, tmp_path: Path, server: str, **options: Any
) -> tuple[Rescored, int]:
    """Scored by a server with the same weights; and how often it was asked."""
    async with AsyncExitStack() as stack:
        local = await stack.enter_async_context(engine_of(renderer, tmp_path / "model"))
        engine: Any
        if server == "sglang":
            loop: Any = await stack.enter_async_context(loopback_sglang(local, renderer))
            engine = SglangEngine(renderer=renderer, url=loop.url)
        else:
            loop = await stack.enter_async_context(loopback_vllm(local, renderer))
            loop.logprobs_mode = "raw_logprobs"
            engine = VllmEngine(renderer=renderer, url=loop.url, **options)
        again = await rescore_run(run, await stack.enter_async_context(engine))
        return again, len(loop.received)


@pytest.mark.parametrize(
    ("server", "options"),
    [("sglang", {}), ("vllm", {"route": "generate"}), ("vllm", {"route": "completions", "version": "0"})],
)
async def test_a_server_scores_each_branch_at_once(
    renderer: TemplateRenderer, tmp_path: Path, server: str, options: dict[str, Any]
) -> None:
    run = await stored_run(renderer, tmp_path)
    again, asked = await over_http(run, renderer, tmp_path, server, **options)
    assert (again.compared, again.skipped) == (sampled(run), {})
    assert again.max < 1e-3
    assert asked == 3, "one request a branch"


async def test_numbers_that_mean_something_else_are_not_compared(renderer: TemplateRenderer, tmp_path: Path) -> None:
    """What the local engine stores under top-p is of what was left; a server gives logprobs over all tokens."""
    run = await stored_run(renderer, tmp_path, CUT)
    again, _ = await over_http(run, renderer, tmp_path, "sglang")
    assert (again.compared, again.skipped) == (0, {"other_kind": sampled(run)})


async def test_a_branch_that_the_engine_refuses_is_told(renderer: TemplateRenderer, tmp_path: Path) -> None:
    run = await stored_run(renderer, tmp_path)
    model = write_random_llama(tmp_path / "model", vocab_size=renderer.vocab_size, max_context=2048)
    async with LocalEngine(renderer=renderer, model=model, max_context=8) as engine:
        again = await rescore_run(run, engine)
    assert (again.compared, again.skipped) == (0, {"refused": sampled(run)})


async def test_an_engine_that_cannot_score_is_refused(renderer: TemplateRenderer, tmp_path: Path) -> None:
    run = await stored_run(renderer, tmp_path)
    script = Script(script=(Rule(replies=("x",)),))
    async with ScriptedEngine(renderer=renderer, script=script) as engine:
        with pytest.raises(ConfigError, match="engine scripted cannot score"):
            await rescore_run(run, engine)
