"""Who is asking, by the headers that real CLIs send, and by what they write where they send none."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from rollwright.dialects import Request
from rollwright.gateway.traffic import TRAINED, Traffic, classify, trained_classes
from rollwright.types import TrafficClass
from rollwright.messages import Message, ToolSpec
from rollwright.testing.loopback_gateway import loopback_gateway, scripted_engine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples

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
        asked(max_tokens=32000),
        asked(max_completion_tokens=1),
    ],
)
def test_an_ordinary_request_that_speaks_of_such_things_is_main(request_: Request) -> None:
    assert classify({}, request_).kind == "main"


def test_roles_of_branches_follow_from_classes() -> None:
    roles = {kind: Traffic(kind=kind).role for kind in ("main", "subagent", "compaction", "title", "probe", "side")}
    assert [*roles.values()] == ["main", "subagent", "compaction", "side", "side", "side"]


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
