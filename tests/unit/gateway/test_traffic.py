"""Who is asking, by the headers that real CLIs send, and by what they write where they send none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import anyio
import httpx2
import pytest

from rollwright.dialects import Request
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.traffic import TRAINED, Traffic, classify, program_of, trained_classes
from rollwright.messages import Message, ToolSpec
from rollwright.testing.loopback_gateway import loopback_gateway, scripted_engine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.types import TrafficClass

BASH = (ToolSpec(name="bash"),)


def asked(
    system: str = "You are a coding agent.", said: str = "Fix it.", tools: Any = BASH, **recorded: Any
) -> Request:
    messages = (Message(role="system", content=system), Message(role="user", content=said))
    return Request(model="m", messages=messages, tools=tools, stream=True, recorded=recorded)


@pytest.mark.parametrize(
    ("headers", "agent", "kind"),
    [
        ({"x-claude-code-request-class": "main"}, "", "main"),
        ({"x-claude-code-agent-id": "a1"}, "a1", "subagent"),
        ({"x-claude-code-agent-id": "a1", "x-claude-code-request-class": "subagent"}, "a1", "subagent"),
        ({"x-claude-code-agent-id": "a1", "x-claude-code-request-class": "compaction"}, "a1", "compaction"),
        ({"x-claude-code-request-class": "workflow"}, "", "subagent"),
        ({"x-claude-code-request-class": "auxiliary"}, "", "side"),
        ({"x-claude-code-request-class": "side_reply"}, "", "side"),
        ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, "ses_2", "subagent"),
        ({"x-claude-code-agent-id": "a" * 1000}, "a" * 200, "subagent"),
        ({"thread-id": "t1", "x-codex-turn-metadata": '{"request_kind":"turn"}'}, "", "main"),
        ({"thread-id": "t1", "x-codex-turn-metadata": '{"request_kind":"compaction"}'}, "", "compaction"),
        ({"thread-id": "t2", "x-openai-subagent": "collab_spawn"}, "t2", "subagent"),
        ({"thread-id": "t2", "x-codex-parent-thread-id": "t1"}, "t2", "subagent"),
    ],
)
def test_headers_name_the_agent_and_its_class(headers: dict[str, str], agent: str, kind: Any) -> None:
    # Whatever the text looks like.
    title = asked("Write a short title for this session.", tools=())
    assert classify(headers, title) == Traffic(agent=agent, kind=kind, told_by="headers")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-claude-code-session-id": "s"},
        {"x-claude-code-request-class": "something new"},
        {"x-session-id": "ses_1"},
        {"x-codex-turn-metadata": "{"},
    ],
)
def test_headers_that_tell_no_class_leave_an_ordinary_request_main(headers: dict[str, str]) -> None:
    assert classify(headers, asked()) == Traffic()


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (asked("You are now acting as the managed memory extraction subagent."), "side"),
        (asked("You are a general-purpose subagent. Do the task."), "subagent"),
        (asked(said="CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Summarise."), "compaction"),
        (asked(said="You are performing a CONTEXT CHECKPOINT COMPACTION. Create a summary.", tools=()), "compaction"),
        (asked(said="You are the component that summarizes a conversation when its window overflows."), "compaction"),
        (asked("You are a context summarization assistant. Your task is to read.", tools=()), "compaction"),
        (asked("You are a context summarization agent. You are given a conversation.", tools=()), "compaction"),
        (asked("You are the component that summarizes a conversation when it overflows.", tools=()), "compaction"),
        (asked("You are a title generator. You output ONLY a thread title.", tools=()), "title"),
        (asked("Generate a concise, sentence-case title for this session.", tools=()), "title"),
        (asked(said="quota", tools=(), max_tokens=1), "probe"),
    ],
)
def test_clis_without_headers_are_told_by_what_they_write(request_: Request, kind: Any) -> None:
    assert classify({}, request_) == Traffic(kind=kind, told_by="text")


@pytest.mark.parametrize(
    "request_",
    [
        asked(said="Write a title for the README, and talk to the memory extraction subagent."),
        asked("Create pull requests with a title and a body."),
        asked("You may start a subagent with the task tool."),
        asked(said="Fix it. You are the component that summarizes a conversation, says the README."),
        asked("You are a context summarization assistant, and here are your tools."),
        asked(said="You are a context summarization assistant.", tools=()),
        asked(max_tokens=32000),
        asked(max_completion_tokens=1),
    ],
)
def test_an_ordinary_request_that_speaks_of_such_things_is_main(request_: Request) -> None:
    assert classify({}, request_).kind == "main"


def test_roles_of_branches_follow_from_classes() -> None:
    roles = [Traffic(kind=kind).role for kind in get_args(TrafficClass)]
    assert roles == ["main", "subagent", "compaction", "side", "side", "side", "side"]


def test_an_unknown_class_is_refused_by_name() -> None:
    assert trained_classes(["main", "title"]) == {"main", "title"}
    with pytest.raises(ValueError, match="unknown traffic class 'tittle'"):
        trained_classes(["tittle"])


@pytest.mark.anyio
@pytest.mark.parametrize(("trained", "titles"), [(TRAINED, 0), (TRAINED | {"title"}, 1)])
async def test_each_class_is_trained_or_not_as_the_session_says(
    renderer: TemplateRenderer, trained: frozenset[TrafficClass], titles: int
) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x"), trained=trained) as loop:
        headers = {"x-api-key": loop.session.secret}
        async with httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as client:
            for system in ("You are a title generator.", "You are a coding agent."):
                messages = [{"role": "system", "content": system}, {"role": "user", "content": "Fix it."}]
                await client.post("/v1/chat/completions", json={"messages": messages})
        trajectory = await loop.session.close()
    assert [turn.meta["class"] for turn in trajectory.turns] == ["title", "main"]
    title, main = build_samples(
        trajectory, task_id="t", group_id="g", rollout_id="r", reward=1.0, trainable=True, counts_in_baseline=True
    )
    assert (title.role, title.trainable, main.trainable) == ("side", bool(titles), True)
    assert title.excluded == ({} if titles else {"class_not_trained": len(trajectory.turns[0].sampled)})


def test_a_program_is_known_by_what_it_says_of_itself_and_its_wire() -> None:
    cli = {"user-agent": "pi/1.6.0", "x-stainless-lang": "js", "x-stainless-retry-count": "0", "content-length": "1"}
    same = cli | {"x-stainless-retry-count": "2", "content-length": "2", "x-claude-code-agent-id": "a1"}
    assert program_of(cli, "openai_chat") == program_of(same, "openai_chat")
    others = [program_of(cli | {"user-agent": "curl/8"}, "openai_chat"), program_of(cli, "anthropic")]
    assert len({program_of(cli, "openai_chat"), *others}) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("one_program", [True, False])
async def test_what_another_program_asks_with_the_clis_key_is_foreign_and_not_trained(
    renderer: TemplateRenderer, tmp_path: Path, one_program: bool
) -> None:
    log = tmp_path / "turns.log"
    async with loopback_gateway(renderer, scripted_engine(renderer, "x"), log=log, one_program=one_program) as loop:
        async with httpx2.AsyncClient(base_url=loop.url, timeout=30) as client:
            for agent in ("cli/1", "python/3", "cli/1"):
                headers = {"x-api-key": loop.session.secret, "user-agent": agent}
                messages = [{"role": "user", "content": "Fix it." if agent == "cli/1" else "Say something easy."}]
                await client.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
        await loop.session.close()
        assert loop.session.foreign == one_program
    trajectory = read_turn_log(log).trajectory
    told = [(turn.meta["class"], turn.role, turn.trained) for turn in trajectory.turns]
    main = ("main", "main", True)
    assert told == [main, ("foreign", "side", False) if one_program else main, main]


@pytest.mark.anyio
async def test_another_program_never_joins_a_turn_of_the_cli(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, "x")
    async with loopback_gateway(renderer, engine, one_program=True) as loop:
        async with httpx2.AsyncClient(base_url=loop.url, timeout=30) as client, anyio.create_task_group() as group:

            async def ask(agent: str) -> None:
                headers = {"x-api-key": loop.session.secret, "user-agent": agent}
                body = {"messages": [{"role": "user", "content": "Fix it."}]}
                await client.post("/v1/chat/completions", json=body, headers=headers)

            engine.hold()
            group.start_soon(ask, "cli/1")
            await engine.called(1)
            group.start_soon(ask, "python/3")
            await engine.called(2)
            engine.release()
        assert {turn.meta["class"] for turn in (await loop.session.close()).turns} == {"main", "foreign"}
