"""The scripted engine: which reply comes when, and faults on the call they are set for."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from rollwright.engines import Generation
from rollwright.engines.scripted import Fault, Rule, Script, ScriptedEngine
from rollwright.errors import (
    ConfigError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
    RollwrightError,
)
from rollwright.messages import Message
from rollwright.tokens import Renderer
from rollwright.types import Sampling, VersionSpan

pytestmark = pytest.mark.anyio


def script(*replies: str, faults: tuple[Fault, ...] = ()) -> Script:
    return Script(script=(Rule(replies=replies or ("Done.",)),), fault=faults)


async def ask(
    engine: ScriptedEngine,
    renderer: Renderer,
    prompt: list[int] | str = "Fix the bug.",
    *,
    session: str = "s",
    request: str = "r",
    max_new_tokens: int = 500,
) -> Generation:
    ids = renderer.encode(prompt) if isinstance(prompt, str) else prompt
    return await engine.generate(
        ids,
        Sampling(max_new_tokens=max_new_tokens),
        stop_ids=renderer.stop_ids,
        request_id=request,
        session_key=session,
    )


async def test_a_session_gets_the_replies_in_order_and_the_last_again(renderer: Renderer) -> None:
    async with ScriptedEngine(renderer=renderer, script=script("one", "two")) as engine:
        got = [renderer.decode((await ask(engine, renderer)).ids) for _ in range(3)]
        other = renderer.decode((await ask(engine, renderer, session="other")).ids)
    assert got == ["one<|im_end|>", "two<|im_end|>", "two<|im_end|>"]
    assert other == "one<|im_end|>"


async def test_a_reply_is_the_turn_the_template_would_show(renderer: Renderer) -> None:
    text = "Look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    async with ScriptedEngine(renderer=renderer, script=script(text)) as engine:
        prompt = renderer.render([Message(role="user", content="a")], ())
        reply = await ask(engine, renderer, prompt)
    turn = renderer.parse(reply.ids, ())
    assert reply.finish == "stop"
    assert [call.name for call in turn.tool_calls] == ["bash"]
    assert turn.ill_formed is None
    longer = renderer.render(
        [
            Message(role="user", content="a"),
            Message(role="assistant", content=turn.content, tool_calls=turn.tool_calls),
        ],
        (),
    )
    assert longer[: len(prompt) + len(reply.ids)] == prompt + reply.ids


async def test_the_first_rule_whose_text_is_in_the_prompt_answers(renderer: Renderer, tmp_path: Path) -> None:
    file = tmp_path / "script.toml"
    file.write_text(
        """
        [[script]]
        match = "title"
        replies = ["A title"]
        logprob = -2.5

        [[script]]
        replies = ["first", "second"]
        """
    )
    async with ScriptedEngine(renderer=renderer, script=file, version="w7") as engine:
        first = await ask(engine, renderer)
        title = await ask(engine, renderer, "Give it a title.")
        second = await ask(engine, renderer)
    texts = [renderer.decode(reply.ids[:-1]) for reply in (first, title, second)]
    assert texts == ["first", "A title", "second"]
    assert set(title.logprobs) == {-2.5}
    assert set(first.logprobs) == {-0.1}
    assert first.versions == (VersionSpan("w7", 0, len(first.ids)),)


async def test_a_prompt_no_rule_matches_is_rejected(renderer: Renderer) -> None:
    only = Script(script=(Rule(match="never said", replies=("x",)),))
    async with ScriptedEngine(renderer=renderer, script=only) as engine:
        with pytest.raises(EngineRejected, match="no \\[\\[script\\]\\] matches"):
            await ask(engine, renderer)


async def test_a_reply_longer_than_allowed_is_cut_with_finish_length(renderer: Renderer) -> None:
    async with ScriptedEngine(renderer=renderer, script=script("one two three four five")) as engine:
        reply = await ask(engine, renderer, max_new_tokens=3)
    assert (len(reply.ids), reply.finish) == (3, "length")


async def test_an_aborted_reply_goes_on_from_its_partial_and_starts_again_without(renderer: Renderer) -> None:
    faults = (Fault(call=1, kind="abort", after_tokens=2), Fault(call=2, kind="abort", after_tokens=1))
    engine = ScriptedEngine(renderer=renderer, script=script("first reply of all", "second", faults=faults))
    prompt = renderer.encode("Fix the bug.")
    async with engine:
        partial = await ask(engine, renderer, prompt)
        more = await ask(engine, renderer, prompt + partial.ids)
        again = await ask(engine, renderer, prompt)
        second = await ask(engine, renderer, prompt)
    assert (partial.finish, len(partial.ids), more.finish, len(more.ids)) == ("abort", 2, "abort", 1)
    assert renderer.decode(again.ids) == "first reply of all<|im_end|>"
    assert again.ids[:3] == partial.ids + more.ids
    assert renderer.decode(second.ids) == "second<|im_end|>"


async def test_a_resumed_reply_is_whole(renderer: Renderer) -> None:
    faults = (Fault(call=1, kind="abort", after_tokens=2),)
    prompt = renderer.encode("Fix the bug.")
    async with ScriptedEngine(renderer=renderer, script=script("first reply of all", faults=faults)) as engine:
        partial = await ask(engine, renderer, prompt)
        rest = await ask(engine, renderer, prompt + partial.ids)
    assert renderer.decode(partial.ids + rest.ids) == "first reply of all<|im_end|>"
    assert rest.finish == "stop"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("unreachable", EngineUnreachable),
        ("rejected", EngineRejected),
        ("missing_logprobs", EngineProtocolError),
    ],
)
async def test_a_failing_call_costs_no_reply(renderer: Renderer, kind: str, error: type[RollwrightError]) -> None:
    failing = script("one", "two", faults=(Fault(call=2, kind=kind),))
    async with ScriptedEngine(renderer=renderer, script=failing) as engine:
        await ask(engine, renderer)
        with pytest.raises(error):
            await ask(engine, renderer)
        assert renderer.decode((await ask(engine, renderer)).ids) == "two<|im_end|>"


async def test_weights_change_inside_a_reply_and_stay_changed(renderer: Renderer) -> None:
    changing = script("one two three", faults=(Fault(call=1, kind="version", after_tokens=2, version="new"),))
    async with ScriptedEngine(renderer=renderer, script=changing, version="old") as engine:
        first, second = await ask(engine, renderer), await ask(engine, renderer)
    assert first.versions == (VersionSpan("old", 0, 2), VersionSpan("new", 2, len(first.ids)))
    assert second.versions == (VersionSpan("new", 0, len(second.ids)),)


async def test_a_delay_is_kept_and_can_be_aborted(renderer: Renderer) -> None:
    delayed = script("one two three four", faults=(Fault(call=2, kind="delay", seconds=60),))
    replies: list[Generation] = []
    async with ScriptedEngine(renderer=renderer, script=delayed, seconds_per_turn=0.05) as engine:
        started = anyio.current_time()
        await ask(engine, renderer)
        assert anyio.current_time() - started >= 0.05

        async def long() -> None:
            replies.append(await ask(engine, renderer, request="long"))

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(long)
                await anyio.sleep(0.02)
                await engine.abort("long")
    assert (replies[0].finish, replies[0].ids) == ("abort", [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "script: Field required"),
        ("[[script]]\nreplies = []", "script.0.replies"),
        ('[[script]]\nreplies = ["a"]\nlogprob = 0.5', "script.0.logprob"),
        ('[[script]]\nreply = ["a"]', "script.0.replies: Field required"),
        ('[[script]]\nreplies = ["a"]\n[[fault]]\ncall = 0\nkind = "abort"', "fault.0.call"),
        ("[[script", "is not TOML"),
    ],
)
async def test_a_wrong_script_names_the_file_and_the_field(
    text: str, says: str, renderer: Renderer, tmp_path: Path
) -> None:
    file = tmp_path / "script.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ScriptedEngine(renderer=renderer, script=file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


async def test_a_missing_script_is_a_config_error(renderer: Renderer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ScriptedEngine(renderer=renderer, script=tmp_path / "absent.toml")
