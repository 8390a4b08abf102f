"""Whatever a client does to its history: the prompt sent is the training prefix, each sampled token trains once."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.errors import UsageError
from rollwright.messages import Message
from rollwright.tokens import Renderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.verify import prompt_digest, verify
from support.conversation import BASH, TOOLS, Session, assistant, call_text, system, tool, user

SAYINGS = [
    "Done.",
    "</think>\n\nDone.",
    "thinking\n</think>\n\n" + call_text("ls"),
    "<think>\nhm\n</think>\n\nI look.\n" + call_text("ls") + "\n" + call_text("pwd"),
    '</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 1.0}}\n</tool_call>',
    call_text("  echo '\n\n'  "),
    "<tool_call>\n<function=bash>\n<parameter=command>\nls",
    "",
    " \n ",
]
ACTS = [
    *("on", "on", "on", "on", "retry", "resample", "rewind", "edit", "rewrite", "compact"),
    *("agent", "drop", "tools", "parallel"),
]
WORDS = st.sampled_from(["a.py", "b\n", "  c", "", "error: <|im_end|> in the text", "世界"])


class Story:
    """A client with several conversations at once, each of them free to do what clients do."""

    def __init__(self, data: st.DataObject, renderer: Renderer) -> None:
        self.data = data
        self.session = Session(renderer)
        self.histories: list[list[Message]] = [[system(), user()]]

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def reply(self, history: list[Message], tools: Any = TOOLS) -> Message | None:
        """One request, or None where the template does not allow the conversation."""
        renderer = self.session.renderer
        says: Any = self.draw(
            st.sampled_from(SAYINGS)
            | st.lists(
                st.integers(0, renderer.vocab_size - 1).filter(lambda i: i not in renderer.stop_ids), max_size=12
            )
        )
        finish = self.draw(st.sampled_from(["stop", "stop", "stop", "length"]))
        ids = renderer.encode(says) if isinstance(says, str) else list(says)
        ids = [i for i in ids if i not in renderer.stop_ids]
        if finish == "stop":
            ids.append(self.draw(st.sampled_from(sorted(renderer.stop_ids))))
        count = len(self.session.trajectory.turns)
        logprobs = [-0.5 - count - n / 1000 for n in range(len(ids))]
        for odd in self.draw(st.lists(st.integers(0, 30), max_size=2)):
            if odd < len(logprobs) and self.draw(st.booleans()):
                logprobs[odd] = self.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        role = self.draw(st.sampled_from(["main", "main", "subagent", "compaction", "side"]))
        try:
            _, reply = self.session.turn(
                history, ids, tools=tools, finish=finish, role=role, version=str(count // 3), logprobs=logprobs
            )
        except UsageError:
            return None
        return reply

    def echo(self, reply: Message) -> Message:
        kind = self.draw(st.sampled_from(["same", "same", "strip", "no reasoning", "no ids", "text", "cut"]))
        match kind:
            case "strip":
                return replace(reply, content=reply.content.strip(), reasoning=(reply.reasoning or "").strip())
            case "no reasoning":
                return replace(reply, reasoning=None)
            case "no ids":
                return replace(reply, carriers=(), tool_calls=tuple(replace(c, id="") for c in reply.tool_calls))
            case "text":
                calls = tuple(
                    replace(c, arguments=c.arguments if isinstance(c.arguments, str) else json.dumps(c.arguments))
                    for c in reply.tool_calls
                )
                return replace(reply, tool_calls=calls)
            case "cut":
                return replace(reply, content=reply.content[: len(reply.content) // 2], tool_calls=reply.tool_calls[:1])
            case _:
                return reply

    def after(self, reply: Message) -> list[Message]:
        results = [tool(self.draw(WORDS), call.id) for call in reply.tool_calls]
        if not results or self.draw(st.booleans()):
            results.append(user(self.draw(WORDS)))
        return results

    def step(self) -> None:
        number = self.draw(st.integers(0, len(self.histories) - 1))
        history = self.histories[number]
        act = self.draw(st.sampled_from(ACTS))
        match act:
            case "on":
                reply = self.reply(history)
                if reply is not None:
                    echoed = self.echo(reply)
                    self.histories[number] = [*history, echoed, *self.after(echoed)]
            case "retry":
                if self.reply(history) is not None:
                    self.session.trajectory.mark_undelivered(len(self.session.trajectory.turns) - 1)
            case "resample":
                first, second = self.reply(history), self.reply(history)
                kept = self.draw(st.sampled_from([first, second]))
                if kept is not None:
                    self.histories[number] = [*history, kept, *self.after(kept)]
            case "rewind":
                ends = [n for n in range(1, len(history) + 1) if history[n - 1].role in ("user", "tool")]
                self.histories.append(history[: self.draw(st.sampled_from(ends))])
            case "edit":
                at = self.draw(st.integers(0, len(history) - 1))
                if history[at].role != "assistant":
                    edited = replace(history[at], content=history[at].content + " [edited]")
                    self.histories[number] = [*history[:at], edited, *history[at + 1 :]]
            case "rewrite":
                at = self.draw(st.integers(0, len(history) - 1))
                if history[at].role == "assistant":
                    edited = replace(history[at], content="Rewritten.")
                    self.histories[number] = [*history[:at], edited, *history[at + 1 :]]
            case "compact":
                kept_from = self.draw(st.integers(1, len(history)))
                rest = history[kept_from:] if self.draw(st.booleans()) else []
                while rest and rest[0].role == "tool":
                    rest = rest[1:]
                self.histories[number] = [history[0], user("A summary."), *rest]
            case "agent":
                self.histories.append([system("You are a sub-agent."), user(self.draw(WORDS) + "?")])
            case "drop":
                answers = [n for n, message in enumerate(history) if message.role == "assistant"]
                if answers:
                    at = self.draw(st.sampled_from(answers))
                    end = at + 1
                    while end < len(history) and history[end].role == "tool":
                        end += 1
                    self.histories[number] = [*history[:at], *history[end:], user("Again.")]
            case "tools":
                tools = self.draw(st.sampled_from([(), (BASH, replace(BASH, name="sh"))]))
                reply = self.reply(history, tools)
                if reply is not None:
                    self.histories.append([*history, reply, *self.after(reply)])
            case "parallel":
                others = [h for h in self.histories if h is not history][:2]
                for other in [history, *others]:
                    self.reply(other)
        if not any(message.role == "user" for message in self.histories[number]):
            self.histories[number].insert(1, user())


def check(story: Story, limit: int | None) -> None:
    session = story.session
    turns = session.trajectory.turns
    samples = build_samples(
        session.trajectory,
        task_id="t",
        group_id="g",
        rollout_id="r",
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
        max_sample_tokens=limit,
    )
    trained: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        length = len(sample.tokens)
        assert len(sample.loss_mask) == len(sample.logprobs) == length
        assert limit is None or length <= limit
        assert sample.trainable == any(sample.loss_mask)
        where: dict[int, tuple[int, int]] = {}
        for index in sample.turns:
            start = len(session.sent[index])
            # What the engine was given is what stands before the reply in training.
            assert sample.tokens[:start].tolist() == session.sent[index][:length]
            for offset, token in enumerate(turns[index].sampled):
                if start + offset < length:
                    where[start + offset] = (index, offset)
                    assert sample.tokens[start + offset] == token
        versions = {n: span.version for span in sample.versions for n in range(span.start, span.end)}
        for position, mask in enumerate(sample.loss_mask):
            if mask:
                index, offset = where[position]
                trained[index, offset] += 1
                assert turns[index].delivered
                assert sample.logprobs[position] == turns[index].logprobs[offset]
                assert math.isfinite(sample.logprobs[position])
                assert versions[position] == next(s.version for s in turns[index].versions if s.start <= offset < s.end)
            else:
                assert sample.logprobs[position] == 0.0
    assert all(count == 1 for count in trained.values())
    parents = {turn.parent for turn in turns if turn.delivered}
    superseded = {
        turn.index
        for turn in turns
        if turn.index not in parents
        and any(
            twin.index in parents
            and (twin.parent, twin.role) == (turn.parent, turn.role)
            and session.sent[twin.index] == session.sent[turn.index]
            for twin in turns
            if twin.delivered
        )
    }
    owed = {
        (turn.index, offset)
        for turn in turns
        if turn.delivered and turn.index not in superseded
        for offset, logprob in enumerate(turn.logprobs)
        if math.isfinite(logprob)
    }
    assert set(trained) <= owed
    if limit is None:
        assert set(trained) == owed
    if samples:
        assert math.isclose(sum(sample.weight for sample in samples), 1)

    report = verify(session.trajectory, samples, {index: prompt_digest(ids) for index, ids in session.sent.items()})
    assert report.violations == ()
    assert report.trained == len(trained)
    assert report.sampled == sum(len(turn.sampled) for turn in turns)
    assert report.trained + sum(report.excluded.values()) == report.sampled


@pytest.mark.parametrize("name", ["plain", "thinking", "qwen3", "qwen35"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_whatever_the_history_does_tokens_stay_true(
    name: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    story = Story(data, request.getfixturevalue(name))
    story.session.trajectory.history = data.draw(st.sampled_from(["exact", "append_only"]))
    for _ in range(data.draw(st.integers(1, 14))):
        story.step()
    check(story, None)
    check(story, data.draw(st.integers(1, 2000)))


def test_three_sub_agents_in_parallel_and_a_compaction_lose_nothing(renderer: Renderer) -> None:
    session = Session(renderer)
    main = [system(), user()]
    agents = [[system(f"You are sub-agent {n}."), user("Look around.")] for n in range(3)]
    for step in range(3):
        for history, role in [(main, "main"), *((agent, "subagent") for agent in agents)]:
            _, reply = session.turn(history, f"</think>\n\nStep {step}.\n{call_text('ls')}", role=role)  # pyright: ignore[reportArgumentType]
            history += [reply, *(tool("a.py", call.id) for call in reply.tool_calls), user("<reminder>")]
    session.turn([*main, user("Summarise.")], "</think>\n\nA summary.", role="compaction")
    fresh = [system(), user("A summary.")]
    _, reply = session.turn(fresh, "</think>\n\nGo on.")
    session.turn([*fresh, reply, user("next")], "</think>\n\nDone.")
    samples = build_samples(
        session.trajectory,
        task_id="t",
        group_id="g",
        rollout_id="r",
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
    )
    assert [(s.role, s.turns) for s in samples] == [
        ("main", [0, 4, 8, 12]),
        ("subagent", [1, 5, 9]),
        ("subagent", [2, 6, 10]),
        ("subagent", [3, 7, 11]),
        ("main", [13, 14]),
    ]
    report = verify(session.trajectory, samples, {i: prompt_digest(ids) for i, ids in session.sent.items()})
    assert report.violations == ()
    assert report.trained == report.sampled
    assert not any(turn.drift for turn in session.trajectory.turns)


def test_an_answer_that_is_no_message_of_ours_never_trains(plain: Renderer) -> None:
    session = Session(plain)
    session.turn([system(), user("a"), assistant("Given as an example."), user("b")], "Mine.")
    samples = build_samples(
        session.trajectory,
        task_id="t",
        group_id="g",
        rollout_id="r",
        reward=None,
        trainable=True,
        counts_in_baseline=False,
    )
    assert sum(samples[0].loss_mask) == len(session.trajectory.turns[0].sampled)
