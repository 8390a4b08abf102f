"""The contract of `rollwright.engines.Engine` as tests. An engine passes them by subclassing:

class TestMyEngine(EngineContract):
    @pytest.fixture
    async def engine(self):
        async with MyEngine(...) as engine:
            yield engine
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence

import anyio
import pytest

from rollwright.engines import Engine, Generation, Scorer
from rollwright.errors import EngineRejected
from rollwright.types import Sampling

__all__ = ["EngineContract", "assert_sound"]


def assert_sound(generation: Generation, sampling: Sampling, stop_ids: frozenset[int]) -> None:
    """What must hold of every reply."""
    ids, logprobs = generation.ids, generation.logprobs
    assert len(ids) == len(logprobs)
    assert len(ids) <= sampling.max_new_tokens
    assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in logprobs)
    edges = [0, *(span.end for span in generation.versions)]
    assert [span.start for span in generation.versions] == edges[:-1], "spans leave gaps"
    assert edges[-1] == len(ids), "spans do not cover the reply"
    assert all(span.version for span in generation.versions)
    assert not stop_ids.intersection(ids[:-1]), "sampled on after a stop id"
    if generation.finish == "stop":
        assert ids
        assert ids[-1] in stop_ids
    if generation.finish == "length":
        assert len(ids) == sampling.max_new_tokens


@pytest.mark.anyio
class EngineContract:
    """Subclass it, name it `Test...`, give it a fixture `engine` that yields the opened engine."""

    prompt: Sequence[int] = (1, 2, 3, 4, 5)
    stop_ids: frozenset[int] = frozenset({0})
    long_reply: int = 400
    """New tokens that keep the engine busy long enough to be told to stop."""
    honours_seed: bool = True
    scores_within: float = 1e-3
    """Between a logprob as it was sampled and as it is scored: other products round otherwise."""

    async def ask(
        self, engine: Engine, sampling: Sampling, *, prompt: Sequence[int] | None = None, session: str = "session"
    ) -> Generation:
        generation = await engine.generate(
            self.prompt if prompt is None else prompt,
            sampling,
            stop_ids=self.stop_ids,
            request_id=uuid.uuid4().hex,
            session_key=session,
        )
        assert_sound(generation, sampling, self.stop_ids)
        return generation

    async def test_it_says_what_it_is(self, engine: Engine) -> None:
        has = engine.capabilities
        assert has.name
        assert has.max_context > len(self.prompt)
        assert has.logprob_kind in ("raw", "temperature", "behaviour")

    async def test_its_own_check_passes(self, engine: Engine) -> None:
        await engine.check()

    async def test_a_reply_is_sound_and_complete(self, engine: Engine) -> None:
        generation = await self.ask(engine, Sampling(max_new_tokens=16))
        assert generation.finish in ("stop", "length")
        assert generation.ids

    async def test_a_reply_of_one_token_is_one_token(self, engine: Engine) -> None:
        generation = await self.ask(engine, Sampling(max_new_tokens=1))
        assert len(generation.ids) == 1

    async def test_it_stops_at_a_stop_id_and_returns_it(self, engine: Engine) -> None:
        first = (await self.ask(engine, Sampling(max_new_tokens=1, temperature=0.0), session="a")).ids[0]
        sampling = Sampling(max_new_tokens=8, temperature=0.0)
        generation = await engine.generate(
            self.prompt, sampling, stop_ids=frozenset({first}), request_id=uuid.uuid4().hex, session_key="b"
        )
        assert_sound(generation, sampling, frozenset({first}))
        assert (generation.ids, generation.finish) == ([first], "stop")

    async def test_many_replies_at_once_are_all_sound(self, engine: Engine) -> None:
        replies: list[Generation] = []

        async def one(number: int) -> None:
            prompt = [*self.prompt, *self.prompt[: number % 3]]
            replies.append(
                await self.ask(engine, Sampling(max_new_tokens=4 + number), prompt=prompt, session=f"s{number}")
            )

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
        assert len(replies) == 8
        assert {reply.finish for reply in replies} <= {"stop", "length"}

    async def test_what_it_sampled_it_scores_alike(self, engine: Engine) -> None:
        """At temperature 1 with nothing cut, every kind of logprob is the same number."""
        if not isinstance(engine, Scorer):
            pytest.skip("this engine does not score")
        one = await self.ask(engine, Sampling(max_new_tokens=12))
        middle = [*self.prompt, *one.ids, 3, 4]
        two = await self.ask(engine, Sampling(max_new_tokens=12), prompt=middle)
        ids = [*middle, *two.ids]
        start = len(self.prompt)
        spans = [(start, start + len(one.ids)), (len(middle), len(ids))]
        scores = await engine.score(ids, spans, Sampling(), request_id=uuid.uuid4().hex, session_key="scored")
        assert scores.logprobs == pytest.approx([*one.logprobs, *two.logprobs], abs=self.scores_within)
        assert scores.version == two.versions[-1].version

    async def test_the_same_seed_gives_the_same_reply_also_in_company(self, engine: Engine) -> None:
        if not self.honours_seed:
            pytest.skip("this engine has no seeds")
        sampling = Sampling(max_new_tokens=12, seed=7)
        alone = await self.ask(engine, sampling, session="alone")
        replies: list[Generation] = []

        async def again(session: str) -> None:
            replies.append(await self.ask(engine, sampling, session=session))

        async def other() -> None:
            await self.ask(engine, Sampling(max_new_tokens=20, seed=8), session="other")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again, "x")
            tasks.start_soon(other)
            tasks.start_soon(again, "y")
        assert [reply.ids for reply in replies] == [alone.ids, alone.ids]

    async def test_an_aborted_reply_comes_back_partial_and_can_go_on(self, engine: Engine) -> None:
        sampling, request_id = Sampling(max_new_tokens=self.long_reply), uuid.uuid4().hex
        replies: list[Generation] = []

        async def long() -> None:
            replies.append(
                await engine.generate(
                    self.prompt, sampling, stop_ids=frozenset(), request_id=request_id, session_key="abort"
                )
            )

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(long)
                while not replies:
                    await engine.abort(request_id)
                    await anyio.sleep(0.01)
        (partial,) = replies
        assert_sound(partial, sampling, frozenset())
        assert partial.finish == "abort"
        assert len(partial.ids) < self.long_reply
        rest = await self.ask(engine, Sampling(max_new_tokens=4), prompt=[*self.prompt, *partial.ids], session="abort")
        assert rest.finish in ("stop", "length")

    async def test_aborting_an_unknown_request_does_nothing(self, engine: Engine) -> None:
        await engine.abort("never-heard-of")
        await self.ask(engine, Sampling(max_new_tokens=2))

    async def test_a_cancelled_call_ends_at_once_and_the_next_is_answered(self, engine: Engine) -> None:
        with anyio.fail_after(30):
            with anyio.move_on_after(0.03) as scope:
                await engine.generate(
                    self.prompt,
                    Sampling(max_new_tokens=self.long_reply),
                    stop_ids=frozenset(),
                    request_id=uuid.uuid4().hex,
                    session_key="cancel",
                )
            assert scope.cancelled_caught
            await self.ask(engine, Sampling(max_new_tokens=3), session="cancel")

    async def test_a_prompt_that_does_not_fit_is_rejected(self, engine: Engine) -> None:
        prompt = [self.prompt[0]] * engine.capabilities.max_context
        with pytest.raises(EngineRejected, match=r"longer|exceeds"):
            await self.ask(engine, Sampling(max_new_tokens=1), prompt=prompt)
