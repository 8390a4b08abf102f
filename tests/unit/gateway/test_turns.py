"""One turn: aborts, budgets, seeds, limits, and engines that break their contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from rollwright.dialects.anthropic import Anthropic
from rollwright.engines import Generation
from rollwright.engines.scripted import Fault, Script, ScriptedEngine
from rollwright.engines.sglang import SglangEngine
from rollwright.errors import EngineProtocolError
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.session import SessionLimits
from rollwright.gateway.turn import read_request
from rollwright.messages import Message, ParsedTurn, ToolCall, ToolSpec
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway, scripted_engine
from rollwright.testing.loopback_sglang import Fault as SglangFault
from rollwright.testing.loopback_sglang import loopback_sglang
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.verify import prompt_digest, verify
from rollwright.types import Sampling, VersionSpan

pytestmark = pytest.mark.anyio

SAID = "I will look at the file first."


def request(text: str = "hi") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def ask(loop: LoopbackGateway, text: str = "hi") -> httpx2.Response:
    headers = {"x-api-key": loop.session.secret}
    async with httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as client:
        return await client.post("/v1/chat/completions", json=request(text))


# --------------------------------------------------------------------------- equal requests


def digest_of(*said: dict[str, Any], **headers: str) -> str:
    messages = [{"role": "user", "content": "hi"}, *said]
    return read_request(Anthropic(), json.dumps({"messages": messages}).encode(), headers).digest


def answer(thinking: str = "hm", signature: str = "rw1", text: str = "x") -> dict[str, Any]:
    thought = {"type": "thinking", "thinking": thinking, "signature": signature}
    return {"role": "assistant", "content": [thought, {"type": "text", "text": text}]}


def test_requests_are_equal_when_they_mean_the_same_and_name_the_same_turns() -> None:
    go_on = {"role": "user", "content": "go on"}
    same = digest_of(answer(), go_on)
    assert same == digest_of(answer(thinking="hm "), {"role": "user", "content": [{"type": "text", "text": "go on\n"}]})
    others = [
        digest_of(answer()),
        digest_of(answer(), {"role": "user", "content": "go off"}),
        digest_of(answer(text="y"), go_on),
        digest_of(answer(thinking="well"), go_on),
        digest_of(answer(signature="rw2"), go_on),
        digest_of(answer(), go_on, **{"x-claude-code-agent-id": "a1"}),
    ]
    assert len({same, *others}) == len(others) + 1


# --------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("fault", ["null_logprob", "clamped_logprob"])
async def test_a_token_without_a_logprob_is_masked_and_counted(renderer: TemplateRenderer, fault: SglangFault) -> None:
    async with (
        scripted_engine(renderer, SAID) as scripted,
        loopback_sglang(scripted, renderer) as server,
        loopback_gateway(renderer, SglangEngine(renderer=renderer, url=server.url, max_context=4096)) as loop,
    ):
        server.faults.append(fault)
        assert (await ask(loop)).status_code == 200
        trajectory = await loop.session.close()
    (sample,) = build_samples(
        trajectory,
        task_id="t",
        group_id="g",
        rollout_id="r",
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
    )
    (turn,) = trajectory.turns
    assert sum(sample.loss_mask) == len(turn.sampled) - 1
    assert sample.excluded == {"non_finite_logprob": 1}
    assert all(map(isfinite, sample.logprobs))
    assert not verify(trajectory, [sample], None).violations


async def test_no_request_of_the_engine_is_named_by_the_beginning_of_anothers_name(renderer: TemplateRenderer) -> None:
    """SGLang aborts all whose ids begin with the one that it is told."""
    engine = scripted_engine(renderer, *[SAID] * 12)
    async with loopback_gateway(renderer, engine) as loop:
        for number in range(12):
            await ask(loop, f"again {number}")
    names = [call.request_id for call in engine.calls]
    assert len(names) == 12
    assert [(a, b) for a in names for b in names if a is not b and b.startswith(a)] == []


# --------------------------------------------------------------------------- aborts


async def test_an_abort_is_one_slow_turn_with_a_version_for_every_token(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    faults = [
        Fault(call=1, kind="abort", after_tokens=3),
        Fault(call=2, kind="abort", after_tokens=0),
        Fault(call=3, kind="version", version="v2"),
    ]
    engine = scripted_engine(renderer, SAID, faults=faults)
    sampling = Sampling(max_new_tokens=50)
    async with loopback_gateway(renderer, engine, log=log, sampling=sampling) as loop:
        response = await ask(loop)
        (turn,) = (await loop.session.close()).turns

    assert response.json()["choices"][0]["message"]["content"] == SAID
    assert turn.finish == "stop"
    first, second, third = (call.generation for call in engine.calls)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (len(first.ids), len(second.ids)) == (3, 0)
    assert list(turn.sampled) == first.ids + third.ids
    assert list(turn.logprobs) == first.logprobs + third.logprobs
    assert turn.versions == (VersionSpan("scripted", 0, 3), VersionSpan("v2", 3, len(turn.sampled)))
    prompt = engine.calls[0].prompt
    assert [call.prompt for call in engine.calls] == [prompt, prompt + first.ids, prompt + first.ids]
    assert [call.sampling.max_new_tokens for call in engine.calls] == [50, 47, 47]
    assert len({call.request_id for call in engine.calls}) == 3
    assert len({call.session_key for call in engine.calls}) == 1

    logged = read_turn_log(log)
    assert turn.meta["intents"] == [0, 1, 2]
    for number, call in enumerate(engine.calls):
        intent = logged.intents[number]
        assert intent.prompt_digest == prompt_digest(call.prompt)
        assert intent.prompt_tokens == len(call.prompt)
        assert intent.partial_tokens == len(call.prompt) - len(prompt)


async def test_equal_versions_on_both_sides_of_an_abort_are_one_span(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, SAID, faults=[Fault(call=1, kind="abort", after_tokens=3)])
    async with loopback_gateway(renderer, engine) as loop:
        await ask(loop)
        (turn,) = (await loop.session.close()).turns
    assert turn.versions == (VersionSpan("scripted", 0, len(turn.sampled)),)


async def test_aborts_that_use_up_the_budget_end_the_turn_as_length(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, SAID, faults=[Fault(call=1, kind="abort", after_tokens=4)])
    async with loopback_gateway(renderer, engine, sampling=Sampling(max_new_tokens=4)) as loop:
        response = await ask(loop)
        (turn,) = (await loop.session.close()).turns
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert (turn.finish, len(turn.sampled), len(engine.calls)) == ("length", 4, 1)


async def test_an_abort_after_the_stop_id_is_a_whole_turn(renderer: TemplateRenderer) -> None:
    whole = len(renderer.encode(SAID)) + 1
    engine = scripted_engine(renderer, SAID, faults=[Fault(call=1, kind="abort", after_tokens=whole)])
    async with loopback_gateway(renderer, engine) as loop:
        await ask(loop)
        (turn,) = (await loop.session.close()).turns
    assert (turn.finish, len(engine.calls)) == ("stop", 1)


# --------------------------------------------------------------------------- budgets and seeds


async def test_the_reply_is_clamped_to_what_the_context_leaves(renderer: TemplateRenderer) -> None:
    prompt = len(renderer.render([_user("hi")], ()))
    engine = scripted_engine(renderer, SAID, max_context=prompt + 5)
    async with loopback_gateway(renderer, engine, sampling=Sampling(max_new_tokens=100)) as loop:
        response = await ask(loop)
        too_long = await ask(loop, "hi, and more than that")
    assert response.json()["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert too_long.status_code == 400


async def test_a_prompt_that_leaves_room_for_one_token_is_not_too_long(renderer: TemplateRenderer) -> None:
    prompt = len(renderer.render([_user("hi")], ()))
    for context, status in ((prompt + 1, 200), (prompt, 400)):
        engine = scripted_engine(renderer, SAID, max_context=context)
        async with loopback_gateway(renderer, engine) as loop:
            assert (await ask(loop)).status_code == status


async def test_seeds_differ_from_turn_to_turn_and_repeat_from_run_to_run(renderer: TemplateRenderer) -> None:
    async def seeds(seed: int | None) -> list[int | None]:
        engine = scripted_engine(renderer, SAID)
        async with loopback_gateway(renderer, engine, sampling=Sampling(seed=seed)) as loop:
            await ask(loop)
            await ask(loop)
        return [call.sampling.seed for call in engine.calls]

    first = await seeds(7)
    assert len(set(first)) == 2
    assert await seeds(7) == first
    assert await seeds(8) != first
    assert await seeds(None) == [None, None]


async def test_a_truncated_call_is_not_sent_and_a_whole_one_is(renderer: TemplateRenderer) -> None:
    call = "<tool_call>\n<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    cut = len(renderer.encode(f"{call}\n{call}")) - 6
    engine = scripted_engine(renderer, f"{call}\n{call}")
    async with loopback_gateway(renderer, engine, sampling=Sampling(max_new_tokens=cut)) as loop:
        headers = {"x-api-key": loop.session.secret}
        async with httpx2.AsyncClient(base_url=loop.url, headers=headers) as client:
            response = await client.post("/v1/chat/completions", json=request() | {"tools": tools})
        (turn,) = (await loop.session.close()).turns
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert [sent["function"]["arguments"] for sent in choice["message"]["tool_calls"]] == ['{"command":"ls -la"}']
    assert turn.ill_formed
    assert len(turn.sampled) == cut


class BrokenCallRenderer(TemplateRenderer):
    """Finds a whole and a broken call in everything, as a parser of another template may."""

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        calls = (ToolCall(name="bash", arguments={"command": "ls"}), ToolCall(name="bash", arguments='{"comm'))
        return ParsedTurn(tool_calls=calls, ill_formed="a call without its end")


@pytest.mark.parametrize(("budget", "sent"), [(3, ['{"command":"ls"}']), (500, ['{"command":"ls"}', '{"comm'])])
async def test_a_broken_call_is_sent_unless_the_tokens_ran_out_in_it(
    tmp_path: Path, budget: int, sent: list[str]
) -> None:
    renderer = BrokenCallRenderer(tiny_tokenizer(tmp_path))
    engine = scripted_engine(renderer, SAID)
    async with loopback_gateway(renderer, engine, sampling=Sampling(max_new_tokens=budget)) as loop:
        (choice,) = (await ask(loop)).json()["choices"]
        (turn,) = (await loop.session.close()).turns
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == sent
    assert turn.carriers == {call["id"] for call in calls}
    assert turn.ill_formed == "a call without its end"


# --------------------------------------------------------------------------- limits


async def test_a_request_beyond_the_last_turn_ends_the_session(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, SAID)
    async with loopback_gateway(renderer, engine, limits=SessionLimits(turns=2)) as loop:
        for _ in range(2):
            assert (await ask(loop)).status_code == 200
            assert not loop.session.limit_reached.is_set()
        refused = await ask(loop)
        assert refused.status_code == 400
        assert loop.session.limit_reached.is_set()
        assert loop.session.limit_reason == "turns"
        assert loop.session.turns == 2
        assert loop.session.errors == {"LimitError": 1}
        assert loop.session.last_error is None


async def test_a_request_after_too_many_sampled_tokens_ends_the_session(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, SAID)
    async with loopback_gateway(renderer, engine, limits=SessionLimits(sampled_tokens=3)) as loop:
        assert (await ask(loop)).status_code == 200
        assert (await ask(loop)).status_code == 400
        assert loop.session.limit_reason == "sampled_tokens"
        assert loop.session.sampled_tokens == len(renderer.encode(SAID)) + 1


async def test_a_session_out_of_time_says_so_without_being_asked(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, SAID), limits=SessionLimits(seconds=0.05)) as loop:
        with anyio.fail_after(5):
            await loop.session.limit_reached.wait()
        assert loop.session.limit_reason == "seconds"
        assert (await ask(loop)).status_code == 400


# --------------------------------------------------------------------------- engines that break their contract


class BentEngine(ScriptedEngine):
    """Bends what the script says."""

    def __init__(self, renderer: TemplateRenderer, how: str) -> None:
        script = Script.model_validate({"script": [{"replies": [SAID]}]})
        super().__init__(renderer=renderer, script=script)
        self._how = how

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, stop_ids: frozenset[int], request_id: str, session_key: str
    ) -> Generation:
        said = await super().generate(ids, sampling, stop_ids=stop_ids, request_id=request_id, session_key=session_key)
        match self._how:
            case "a logprob short":
                return replace(said, logprobs=said.logprobs[1:])
            case "more than asked":
                return replace(said, ids=said.ids * 40, logprobs=said.logprobs * 40)
            case "stopped without a stop id":
                return replace(said, ids=said.ids[:-1], logprobs=said.logprobs[:-1])
            case "nothing at all":
                return replace(said, ids=[], logprobs=[], finish="length", versions=())
            case "versions with a gap":
                return replace(said, versions=(VersionSpan("v", 0, 1),))
            case "a bug":
                raise ZeroDivisionError
            case other:
                raise AssertionError(other)


@pytest.mark.parametrize(
    "how",
    ["a logprob short", "more than asked", "stopped without a stop id", "nothing at all", "versions with a gap"],
)
async def test_an_engine_that_breaks_its_contract_makes_no_turn(renderer: TemplateRenderer, how: str) -> None:
    engine = WatchedEngine(BentEngine(renderer, how))
    async with loopback_gateway(renderer, engine, sampling=Sampling(max_new_tokens=100)) as loop:
        assert (await ask(loop)).status_code == 500
        assert isinstance(loop.session.last_error, EngineProtocolError)
        assert loop.session.limit_reason == "failures"
        assert (await loop.session.close()).turns == []


async def test_a_bug_in_an_engine_fails_its_turn_and_no_other_session(
    renderer: TemplateRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = WatchedEngine(BentEngine(renderer, "a bug"))
    async with loopback_gateway(renderer, engine) as loop:
        other = loop.gateway.open("task.2", log=None, limits=SessionLimits())
        assert (await ask(loop)).status_code == 500
        assert "ZeroDivisionError" in str(loop.session.last_error)
        assert "ZeroDivisionError" in caplog.text
        assert not other.limit_reached.is_set()
        assert (await ask(loop)).status_code == 500


def _user(text: str) -> Message:
    return Message(role="user", content=text)
