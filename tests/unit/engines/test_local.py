"""The embedded engine: logprobs that can be computed again, seeds, prefix reuse, weight swaps."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest

from rollwright.engines import Generation
from rollwright.engines.local import LocalEngine
from rollwright.engines.runtime_numpy import NumpyRuntime
from rollwright.engines.sampler import candidates
from rollwright.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnreachable
from rollwright.testing.tiny_llama import write_random_llama
from rollwright.tokens import Renderer
from rollwright.types import Sampling, VersionSpan

pytestmark = pytest.mark.anyio


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 400, count).tolist()


async def ask(
    engine: LocalEngine,
    prompt: list[int],
    sampling: Sampling,
    *,
    session: str = "s",
    request: str = "r",
    stop_ids: frozenset[int] = frozenset(),
) -> Generation:
    return await engine.generate(prompt, sampling, stop_ids=stop_ids, request_id=request, session_key=session)


def scored(folder: Path, prompt: list[int], reply: list[int], sampling: Sampling) -> list[float]:
    """Each reply token's logprob, from one uncached pass over everything before it."""
    runtime = NumpyRuntime(folder)
    logprobs = []
    for index, token in enumerate(reply):
        seen = prompt + reply[:index]
        ids, values = candidates(runtime.prefill(seen, runtime.new_cache(len(seen))), sampling)
        logprobs.append(values[ids.tolist().index(token)])
    return logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=30),
        Sampling(max_new_tokens=30, temperature=0.7, top_k=8, top_p=0.8),
        Sampling(max_new_tokens=30, temperature=0.0),
    ],
    ids=["plain", "cut", "greedy"],
)
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    renderer: Renderer, model: Path, sampling: Sampling
) -> None:
    prompt = some_ids(60)
    async with LocalEngine(renderer=renderer, model=model) as engine:
        assert engine.capabilities.logprob_kind == "behaviour"
        reply = await ask(engine, prompt, sampling)
    np.testing.assert_allclose(reply.logprobs, scored(model, prompt, reply.ids, sampling), atol=1e-4)


async def test_a_seed_decides_the_reply_to_the_last_bit_whatever_else_runs(renderer: Renderer, model: Path) -> None:
    prompt, sampling = some_ids(200), Sampling(max_new_tokens=40, seed=11)
    async with LocalEngine(renderer=renderer, model=model, prefix_mib=0) as engine:
        alone = await ask(engine, prompt, sampling)
    replies: list[Generation] = []
    async with LocalEngine(renderer=renderer, model=model, seed=5) as engine:
        await ask(engine, prompt[:77], Sampling(max_new_tokens=3), session="warms a part")

        async def again(name: str) -> None:
            replies.append(await ask(engine, prompt, sampling, session=name, request=name))

        async def other(number: int) -> None:
            length = 30 + 50 * number
            await ask(engine, some_ids(length, number), Sampling(max_new_tokens=25), request=f"o{number}")

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(other, number)
                tasks.start_soon(again, f"a{number}")
    assert len(replies) == 5
    for reply in replies:
        assert reply.ids == alone.ids
        assert reply.logprobs == alone.logprobs


async def test_replies_without_a_seed_follow_the_engines_seed_and_the_request(renderer: Renderer, model: Path) -> None:
    prompt, sampling = some_ids(20), Sampling(max_new_tokens=20)
    got = []
    for seed, request in ((1, "a"), (1, "a"), (1, "b"), (2, "a")):
        async with LocalEngine(renderer=renderer, model=model, seed=seed) as engine:
            got.append((await ask(engine, prompt, sampling, request=request)).ids)
    assert got[0] == got[1]
    assert len({tuple(ids) for ids in got}) == 3


async def test_the_next_turn_computes_only_what_is_new(renderer: Renderer, model: Path) -> None:
    first, sampling = some_ids(150), Sampling(max_new_tokens=10, seed=1)
    async with LocalEngine(renderer=renderer, model=model) as engine:
        turn = await ask(engine, first, sampling)
        assert turn.cached_tokens == 0
        longer = first + turn.ids + some_ids(30, 9)
        warm = await ask(engine, longer, sampling)
        assert warm.cached_tokens == len(first)
        # Another attempt at the same task shares the beginning, and a repeat shares all but the last token.
        assert (await ask(engine, [*first[:100], 3, 3], sampling, session="other")).cached_tokens == 100
        assert (await ask(engine, longer, sampling)).cached_tokens == len(longer) - 1
    async with LocalEngine(renderer=renderer, model=model, prefix_mib=0) as cold:
        reply = await ask(cold, longer, sampling)
    assert reply.cached_tokens == 0
    assert (reply.ids, reply.logprobs) == (warm.ids, warm.logprobs)


async def test_an_aborted_reply_goes_on_under_its_seed_as_if_nothing_had_been(renderer: Renderer, model: Path) -> None:
    prompt = some_ids(40)
    async with LocalEngine(renderer=renderer, model=model) as engine:
        whole = await ask(engine, prompt, Sampling(max_new_tokens=60, seed=3))
        partial = whole.ids[:25]
        rest = await ask(engine, prompt + partial, Sampling(max_new_tokens=35, seed=3))
    assert partial + rest.ids == whole.ids


async def test_weights_swap_between_tokens_and_each_token_is_of_its_version(
    renderer: Renderer, model: Path, other_model: Path
) -> None:
    prompt, sampling = some_ids(60), Sampling(max_new_tokens=8000)
    replies: list[Generation] = []
    async with LocalEngine(renderer=renderer, model=model, version="v1") as engine:
        assert engine.capabilities.updates_weights

        async def long() -> None:
            replies.append(await ask(engine, prompt, sampling, request="long"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long)
            await anyio.sleep(0.05)
            await engine.load_weights(other_model, "v2")
            short = await ask(engine, prompt, Sampling(max_new_tokens=4), request="short")
            await engine.abort("long")
    assert short.versions == (VersionSpan("v2", 0, 4),)
    np.testing.assert_allclose(short.logprobs, scored(other_model, prompt, short.ids, Sampling()), atol=1e-4)
    (reply,) = replies
    assert reply.finish == "abort"
    first, second = reply.versions
    assert (first.version, first.start, second.version) == ("v1", 0, "v2")
    assert first.end == second.start
    assert second.end == len(reply.ids)
    # A few tokens on both sides of the swap, computed again from their own version alone.
    edge = first.end
    start = max(edge - 4, 0)
    for folder, begin, end in ((model, start, edge), (other_model, edge, edge + 4)):
        want = scored(folder, prompt + reply.ids[:begin], reply.ids[begin:end], Sampling())
        assert want
        np.testing.assert_allclose(reply.logprobs[begin:end], want, atol=1e-4)


async def test_closing_ends_what_runs_as_aborted(renderer: Renderer, model: Path) -> None:
    replies: list[Generation] = []
    async with (
        anyio.create_task_group() as tasks,
        LocalEngine(renderer=renderer, model=model, max_concurrent=1) as engine,
    ):

        async def long(name: str) -> None:
            replies.append(await ask(engine, some_ids(10), Sampling(max_new_tokens=8000), request=name))

        tasks.start_soon(long, "a")
        tasks.start_soon(long, "waits for a")
        await anyio.sleep(0.05)
    assert [reply.finish for reply in replies] == ["abort", "abort"]
    with pytest.raises(EngineUnreachable, match="not open"):
        await ask(engine, [1], Sampling())


async def test_a_waiting_request_is_aborted_before_its_turn(renderer: Renderer, model: Path) -> None:
    replies: dict[str, Generation] = {}
    second_ended = anyio.Event()
    async with LocalEngine(renderer=renderer, model=model, max_concurrent=1) as engine:

        async def long(name: str) -> None:
            replies[name] = await ask(engine, some_ids(10), Sampling(max_new_tokens=8000), request=name)
            if name == "second":
                second_ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long, "first")
            await anyio.sleep(0.02)
            tasks.start_soon(long, "second")
            await anyio.sleep(0.02)
            await engine.abort("second")
            with anyio.fail_after(5):
                await second_ended.wait()
            assert "first" not in replies
            await engine.abort("first")
    assert replies["second"] == Generation(ids=[], logprobs=[], finish="abort", versions=())
    assert replies["first"].ids


async def test_short_replies_are_not_held_up_by_a_long_one(renderer: Renderer, model: Path) -> None:
    ended: list[str] = []
    async with LocalEngine(renderer=renderer, model=model) as engine:

        async def one(name: str, prompt: int, new: int) -> None:
            await ask(engine, some_ids(prompt), Sampling(max_new_tokens=new), request=name, session=name)
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "long", 100, 8000)
            await anyio.sleep(0.02)
            with anyio.fail_after(10):
                async with anyio.create_task_group() as short:
                    for number in range(3):
                        short.start_soon(one, f"short {number}", 100, 5)
            await engine.abort("long")
    assert len(ended) == 4
    assert ended[-1] == "long"


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([], Sampling(), "empty"),
        ([1] * 8000, Sampling(max_new_tokens=193), r"longer than the context \(8192 tokens\)"),
        ([1, 100_000], Sampling(), "ids outside"),
        ([1, -1], Sampling(), "ids outside"),
        ([1], Sampling(temperature=-1.0), "temperature is -1.0"),
        ([1], Sampling(top_p=0.0), "top_p is 0.0"),
        ([1], Sampling(top_k=-1), "top_k is -1"),
    ],
)
async def test_a_request_it_cannot_serve_is_rejected_and_says_why(
    renderer: Renderer, model: Path, prompt: list[int], sampling: Sampling, says: str
) -> None:
    async with LocalEngine(renderer=renderer, model=model) as engine:
        with pytest.raises(EngineRejected, match=says):
            await ask(engine, prompt, sampling)


async def test_no_new_tokens_is_an_empty_reply(renderer: Renderer, model: Path) -> None:
    async with LocalEngine(renderer=renderer, model=model) as engine:
        reply = await ask(engine, [1, 2], Sampling(max_new_tokens=0))
    assert reply == Generation(ids=[], logprobs=[], finish="length", versions=())


async def test_broken_weights_fail_their_requests_and_nothing_hangs(
    renderer: Renderer, model: Path, tmp_path: Path
) -> None:
    broken = write_random_llama(
        tmp_path, vocab_size=renderer.vocab_size, layers=1, max_context=8192, sharpness=float("nan")
    )
    async with LocalEngine(renderer=renderer, model=model) as engine:
        await engine.load_weights(broken, "broken")
        for request in ("a", "b"):
            with pytest.raises(EngineProtocolError, match="not finite"):
                await ask(engine, [1, 2], Sampling(), request=request)
        await engine.load_weights(model, "mended")
        assert (await ask(engine, [1, 2], Sampling(max_new_tokens=2))).finish == "length"


async def test_a_model_of_another_tokenizer_is_refused_by_check(renderer: Renderer, tmp_path: Path) -> None:
    small = write_random_llama(tmp_path, vocab_size=100)
    async with LocalEngine(renderer=renderer, model=small) as engine:
        with pytest.raises(ConfigError, match=f"knows 100 ids, the tokenizer .* has {renderer.vocab_size}"):
            await engine.check()


async def test_weights_of_another_model_are_refused_and_the_engine_goes_on(
    renderer: Renderer, model: Path, tmp_path: Path
) -> None:
    async with LocalEngine(renderer=renderer, model=model) as engine:
        with pytest.raises(ConfigError, match="have 100 ids"):
            await engine.load_weights(write_random_llama(tmp_path, vocab_size=100), "x")
        assert (await ask(engine, [1], Sampling(max_new_tokens=1))).versions == (VersionSpan("0", 0, 1),)


async def test_settings_that_cannot_be_right_name_their_field(renderer: Renderer, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.local\.model: .*absent is not a folder"):
        LocalEngine(renderer=renderer, model=Path("/absent"))
    with pytest.raises(ConfigError, match=r"engine\.local\.threads must be at least 1"):
        LocalEngine(renderer=renderer, model=model, threads=0)
    with pytest.raises(ConfigError, match=r"engine\.local\.max_context is 9000, the model's own is 8192"):
        async with LocalEngine(renderer=renderer, model=model, max_context=9000):
            pass
    async with LocalEngine(renderer=renderer, model=model, max_context=100) as engine:
        assert engine.capabilities.max_context == 100
