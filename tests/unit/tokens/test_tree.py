from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from rollwright.errors import EngineProtocolError
from rollwright.messages import Message
from rollwright.tokens import Renderer
from rollwright.tokens.canonical import digests
from rollwright.tokens.render_renderers import RenderersRenderer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.tree import Trajectory
from rollwright.types import VersionSpan
from support.conversation import BASH, TOOLS, Session, assistant, call_text, system, tool, user

START = [system(), user()]


def call_of(reply: Message) -> str:
    return reply.tool_calls[0].id if reply.tool_calls else ""


# ------------------------------------------------------------------ going on


def test_the_first_request_is_a_root_rendered_in_full(renderer: Renderer) -> None:
    plan = Session(renderer).plan(START)
    assert plan.parent is None
    assert plan.delta == list(plan.prompt) == renderer.render(START, TOOLS)
    assert plan.drift is None


def test_a_request_that_goes_on_extends_the_stored_ids(renderer: Renderer) -> None:
    session = Session(renderer)
    turn, reply = session.turn(START, "</think>\n\nI look.\n" + call_text("ls"))
    plan = session.plan([*START, reply, tool("a.py", call_of(reply)), user("<reminder>")])
    assert plan.parent == turn.index
    assert list(plan.prompt) == session.trajectory.ids(0) + plan.delta
    assert [m.role for m in plan.messages] == ["tool", "user"]
    assert plan.drift is None


def test_odd_tokens_of_the_policy_stay_as_they_were_sampled(plain: TemplateRenderer) -> None:
    session = Session(plain)
    letters = [i for c in "I look." for i in plain.encode(c)]
    assert letters != plain.encode("I look.")
    _, reply = session.turn(START, [*letters, min(plain.stop_ids)])
    plan = session.plan([*START, reply, user("go on")])
    assert plan.parent == 0
    assert session.trajectory.ids(0)[-len(letters) - 1 : -1] == letters


def test_only_deltas_are_stored(plain: TemplateRenderer) -> None:
    session = Session(plain)
    messages = START
    for _ in range(30):
        turn, reply = session.turn(messages, call_text("ls"))
        messages = [*messages, reply, tool("a.py " * 20, call_of(reply))]
    stored = sum(len(t.delta) + len(t.sampled) for t in session.trajectory.turns)
    assert stored == len(session.trajectory.ids(turn.index))
    assert session.trajectory.path(turn.index) == list(range(30))
    assert session.trajectory.leaves() == [29]


@pytest.mark.parametrize("echoed", [1, 1.0, True, "1", "1 ", None, [1], {"a": 1}])
@pytest.mark.parametrize("said", [1, True, "1", [True], {"a": 1.0}])
def test_a_digest_that_is_looked_up_is_the_one_that_would_be_made(
    plain: TemplateRenderer, said: object, echoed: object
) -> None:
    session = Session(plain)
    _, reply = session.turn(START, call_text("ls"))
    turn = session.trajectory.turns[0]
    calls = [(replace(reply.tool_calls[0], arguments={"x": value}),) for value in (said, echoed)]
    kept, asked = (replace(reply, tool_calls=call) for call in calls)
    session.trajectory = Trajectory.restore(
        "r",
        [replace(turn, messages=(*START, kept), keys=digests([*START, kept]), carriers=frozenset({calls[0][0].id}))],
    )
    history = [*START, asked, tool("out", calls[0][0].id)]
    assert session.trajectory.keys_of(history) == digests(history)


# ------------------------------------------------------------------ echoes

ECHOES = {
    "verbatim": lambda m: m,
    "whitespace stripped": lambda m: replace(m, content=m.content.strip()),
    "whitespace added": lambda m: replace(m, content=f"\n{m.content}\n\n"),
    "reasoning dropped": lambda m: replace(m, reasoning=None),
    "reasoning empty": lambda m: replace(m, reasoning=""),
    "reasoning stripped": lambda m: replace(m, reasoning=(m.reasoning or "").strip()),
    "carriers dropped": lambda m: replace(m, carriers=()),
    "ids renamed": lambda m: replace(
        m, carriers=(), tool_calls=tuple(replace(c, id=c.id + "__dup_2") for c in m.tool_calls)
    ),
    "ids dropped": lambda m: replace(m, carriers=(), tool_calls=tuple(replace(c, id="") for c in m.tool_calls)),
    "arguments as text": lambda m: replace(
        m, tool_calls=tuple(replace(c, arguments=json.dumps(c.arguments)) for c in m.tool_calls)
    ),
    "arguments reordered": lambda m: replace(
        m,
        tool_calls=tuple(
            replace(c, arguments=json.dumps(dict(reversed(c.arguments.items())), indent=2)) for c in m.tool_calls
        ),
    ),
}

SAYS = (
    "I look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
    "<parameter=timeout>\n3\n</parameter>\n"
    "<parameter=quiet>\nTRUE\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=bash>\n"
    "<parameter=command>\n\n\n  pwd \n\n</parameter>\n</function>\n</tool_call>\n"
)


@pytest.mark.parametrize("name", ECHOES)
def test_an_echo_that_keeps_the_meaning_is_our_turn(name: str, thinking: TemplateRenderer) -> None:
    session = Session(thinking)
    messages = START
    for step in range(4):
        _, reply = session.turn(messages, f" step {step} \n</think>\n\n{SAYS}")
        assert len(reply.tool_calls) == 2
        results = [tool("a.py", call.id) for call in reply.tool_calls]
        messages = [*messages, ECHOES[name](reply), *results]
    plan = session.plan(messages)
    assert (plan.parent, plan.drift) == (3, None)
    assert [turn.parent for turn in session.trajectory.turns] == [None, 0, 1, 2]


def test_text_around_calls_of_others_may_be_trimmed_too(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, reply = session.turn([system("s\n"), user("do it\n")], call_text("ls"))
    plan = session.plan([system("s"), user("do it"), reply, tool("x")])
    assert plan.parent == 0


# ------------------------------------------------------------------ forks and drift


def test_a_changed_meaning_is_a_fork_with_a_drift(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, reply = session.turn(START, "I look.\n" + call_text("ls"))
    changed = replace(reply, tool_calls=(replace(reply.tool_calls[0], arguments={"command": "pwd"}),))
    plan = session.plan([*START, changed, tool("a.py", call_of(reply))])
    assert plan.parent is None
    assert list(plan.prompt) == plain.render([*START, changed, tool("a.py", call_of(reply))], TOOLS)
    assert plan.drift is not None
    assert (plan.drift.cause, plan.drift.turn) == ("assistant_rewritten", 0)
    stored = session.trajectory.ids(0)
    at = plan.drift.token_index
    assert stored[:at] == list(plan.prompt[:at])
    assert stored[at] != plan.prompt[at]
    assert plan.drift.stored_text.startswith("ls")
    assert plan.drift.new_text.startswith("pwd")


def test_a_changed_reasoning_is_a_fork_with_a_drift(thinking: TemplateRenderer) -> None:
    session = Session(thinking)
    _, reply = session.turn(START, "hm\n</think>\n\nI look.")
    plan = session.plan([*START, replace(reply, reasoning="other"), user("next")])
    assert plan.parent is None
    assert plan.drift is not None
    assert plan.drift.cause == "assistant_rewritten"


def test_a_changed_reasoning_far_back_is_a_fork_there(thinking: TemplateRenderer) -> None:
    session = Session(thinking)
    messages = START
    for step in range(4):
        _, reply = session.turn(messages, f"thought {step}\n</think>\n\n" + call_text("ls"))
        messages = [*messages, reply, tool("a.py", call_of(reply)), user("<reminder>")]
    assert session.plan(messages).parent == 3
    changed = [replace(m, reasoning="other") if m.reasoning == "thought 1" else m for m in messages]
    plan = session.plan(changed)
    assert plan.parent == 0
    assert plan.drift is not None
    assert plan.drift.cause == "assistant_rewritten"


def test_a_rewritten_turn_forks_where_it_stands_and_keeps_the_turns_before_it(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, first = session.turn(START, "One.\n" + call_text("ls"))
    _, second = session.turn([*START, first, tool("a.py", call_of(first))], "Two.")
    history = [*START, first, tool("a.py", call_of(first)), replace(second, content="Two, but shorter."), user("next")]
    plan = session.plan(history)
    assert plan.parent == 0
    assert plan.drift is not None
    assert (plan.drift.cause, plan.drift.turn) == ("assistant_rewritten", 1)
    assert "Two, but shorter." in plain.decode(plan.delta)


def test_where_the_template_cannot_say_a_foreign_answer_the_prompt_is_rendered_in_full(
    qwen3: RenderersRenderer,
) -> None:
    session = Session(qwen3)
    _, first = session.turn(START, "One.")
    _, second = session.turn([*START, first, user("go on")], "Two.")
    history = [*START, first, user("go on"), replace(second, content="Two!", carriers=()), user("next")]
    plan = session.plan(history)
    assert plan.parent is None
    assert list(plan.prompt) == qwen3.render(history, TOOLS)
    assert plan.drift is not None
    assert plan.drift.cause == "assistant_rewritten"


def test_an_edited_history_keeps_our_answers_as_they_were_sampled(plain: TemplateRenderer) -> None:
    session = Session(plain)
    letters = [i for c in "One.\n" for i in plain.encode(c)]
    ids = [*letters, *plain.encode(call_text("ls")), min(plain.stop_ids)]
    turn, reply = session.turn(START, ids)
    plan = session.plan([system("Other."), user(), reply, tool("a.py", call_of(reply))])
    assert plan.parent is None
    assert plan.drift is not None
    assert (plan.drift.cause, plan.drift.turn) == ("history_edited", 0)
    head = plain.render([system("Other."), user()], TOOLS)
    assert plan.delta[: len(head) + len(ids)] == head + turn.sampled.tolist()


def test_a_cleared_tool_result_forks_at_the_turn_before_it(plain: TemplateRenderer) -> None:
    session = Session(plain)
    messages = START
    turns = []
    for _ in range(3):
        turn, reply = session.turn(messages, call_text("ls"))
        turns.append(turn)
        messages = [*messages, reply, tool("a.py", call_of(reply))]
    cleared = [*messages[:5], tool("[cleared]"), *messages[6:]]
    assert messages[5].role == "tool"
    plan = session.plan(cleared)
    assert plan.parent == 1
    assert plan.drift is not None
    assert (plan.drift.cause, plan.drift.turn) == ("history_edited", 2)
    sampled = turns[2].sampled.tolist()
    assert any(plan.delta[i : i + len(sampled)] == sampled for i in range(len(plan.delta)))


def test_other_tools_are_another_prompt(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, reply = session.turn(START, "One.")
    plan = session.plan([*START, reply, user("next")], (BASH, replace(BASH, name="sh")))
    assert plan.parent is None
    assert plan.drift is not None
    assert (plan.drift.cause, plan.drift.turn) == ("tools_changed", 0)


def test_an_answer_nobody_gave_is_context_and_told(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, reply = session.turn(START, "One.")
    plan = session.plan([*START, reply, user("a"), assistant("Invented."), user("b")])
    assert plan.parent == 0
    assert plan.drift is not None
    assert plan.drift.cause == "foreign_assistant"
    assert plan.delta == plain.encode(
        "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nInvented.<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_refused_bridge_is_a_full_render_with_a_drift(plain: TemplateRenderer) -> None:
    class NoBridge:
        def __getattr__(self, name: str) -> object:
            return getattr(plain, name)

        def bridge(self, *_: object) -> None:
            return None

    session = Session(NoBridge())  # pyright: ignore[reportArgumentType]
    _, reply = session.turn(START, "One.")
    history = [*START, reply, user("next")]
    plan = session.plan(history)
    assert plan.parent is None
    assert list(plan.prompt) == plain.render(history, TOOLS)
    assert plan.drift is not None
    assert (plan.drift.cause, plan.drift.turn) == ("bridge_refused", 0)
    assert plan.messages == tuple(history)


def test_a_new_conversation_is_a_root_without_drift(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, reply = session.turn(START, "One.")
    session.turn([*START, reply, user("next")], "Two.")
    for fresh in (
        [system(), user("a summary of it all")],
        [system("You name chats."), user()],
        [assistant("x"), user()],
    ):
        plan = session.plan(fresh)
        assert (plan.parent, plan.drift) == (None, None)


def test_an_answer_the_client_left_out_is_told(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, first = session.turn(START, "One.\n" + call_text("ls"))
    asked = [*START, first, tool("a.py", call_of(first))]
    session.turn(asked, "")
    plan = session.plan([*asked, user("You said nothing.")])
    assert (plan.parent, plan.drift and (plan.drift.cause, plan.drift.turn)) == (0, ("answer_dropped", 1))
    # The same again is a sibling, another question a branch, and at the root it is just so.
    assert session.plan(asked).drift is None
    assert session.plan([*START, first, tool("b.py", call_of(first)), user("And?")]).drift is None
    again = session.plan([*START, user("Hello?")])
    assert (again.parent, again.drift and (again.drift.cause, again.drift.turn)) == (None, ("answer_dropped", 0))


def test_a_history_that_goes_on_has_no_dropped_answer(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, first = session.turn(START, "One.")
    _, second = session.turn([*START, first, user("a")], "Two.")
    _, other = session.turn([*START, first, user("b")], "Three.")
    for last, said in ((second, "a"), (other, "b")):
        assert session.plan([*START, first, user(said), last, user("more")]).drift is None


# ------------------------------------------------------------------ siblings, retries


def test_the_same_prompt_again_is_a_sibling_with_the_same_ids(renderer: Renderer) -> None:
    session = Session(renderer)
    _, reply = session.turn(START, "</think>\n\nOne.")
    more = [*START, reply, user("go on")]
    first, _ = session.turn(more, "Two.")
    second, _ = session.turn(more, "Three.")
    assert (first.parent, second.parent) == (0, 0)
    assert session.sent[first.index] == session.sent[second.index]
    assert second.delta is first.delta
    assert session.trajectory.leaves() == [first.index, second.index]
    assert session.trajectory.children(0) == [first.index, second.index]


def test_ids_tell_apart_siblings_that_said_the_same(plain: TemplateRenderer) -> None:
    session = Session(plain)
    a, reply_a = session.turn(START, [*plain.encode("Same."), min(plain.stop_ids)])
    b, reply_b = session.turn(START, [*[i for c in "Same." for i in plain.encode(c)], min(plain.stop_ids)])
    assert session.plan([*START, reply_a, user("x")]).parent == a.index
    assert session.plan([*START, reply_b, user("x")]).parent == b.index
    assert session.plan([*START, replace(reply_a, carriers=()), user("x")]).parent == b.index


def test_ids_far_back_tell_apart_branches_that_said_the_same(plain: TemplateRenderer) -> None:
    session = Session(plain)
    spelled = [[*plain.encode("Same."), min(plain.stop_ids)], [*[i for c in "Same." for i in plain.encode(c)]]]
    ends = []
    for ids in spelled:
        turn, reply = session.turn(START, ids, finish="length")
        more = [*START, reply, user("x")]
        deeper, second = session.turn(more, "And.")
        assert deeper.parent == turn.index
        ends.append((deeper.index, [*more, replace(second, carriers=()), user("y")]))
    for index, request in ends:
        assert session.plan(request).parent == index


def test_a_sibling_that_differs_only_in_thought_or_tools_is_no_drift(thinking: TemplateRenderer) -> None:
    session = Session(thinking)
    session.turn(START, "one\n</think>\n\nSame.")
    other, reply = session.turn(START, "two\n</think>\n\nSame.")
    session.turn(START, "two\n</think>\n\nSame.", tools=())
    for echo in (reply, replace(reply, carriers=())):
        plan = session.plan([*START, echo, user("next")])
        assert (plan.parent, plan.drift) == (other.index, None)


def test_the_same_request_after_another_spelling_gets_its_own_ids(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, whole = session.turn(START, [*plain.encode("Same."), min(plain.stop_ids)])
    _, cut = session.turn(START, plain.encode("Same."), finish="length")
    first, _ = session.turn([*START, whole, user("x")], "And.")
    plan = session.plan([*START, cut, user("x")])
    assert plan.parent == 1
    assert plan.delta == [min(plain.stop_ids), *first.delta]


def test_the_deepest_match_wins_over_the_first(plain: TemplateRenderer) -> None:
    session = Session(plain)
    messages = START
    for _ in range(5):
        _, reply = session.turn(messages, "Same.")
        messages = [*messages, replace(reply, carriers=()), user("again")]
    assert session.plan(messages).parent == 4
    assert session.plan(messages[:-2]).parent == 3


def test_a_retry_has_the_digest_of_the_request_it_repeats(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, reply = session.turn(START, "One.\n" + call_text("ls"))
    request = [*START, reply, tool("a.py", call_of(reply))]
    turn, _ = session.turn(request, "Two.")
    echoed = [*START, replace(reply, content="One.\n\n", carriers=()), tool("a.py\n")]
    key = Trajectory.digest_request(echoed, TOOLS)
    assert key == session.plan(request).request_key
    assert session.trajectory.answers_to(key) == [turn.index]
    assert session.trajectory.answers_to(Trajectory.digest_request(echoed, ())) == []
    assert session.trajectory.answers_to(Trajectory.digest_request([*echoed, user()], TOOLS)) == []


def test_a_turn_that_is_continued_was_delivered(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, reply = session.turn(START, "One.")
    session.trajectory.mark_undelivered(0)
    assert not session.trajectory.turns[0].delivered
    session.turn([*START, reply, user("go on")], "Two.")
    assert session.trajectory.turns[0].delivered
    session.trajectory.mark_undelivered(0)
    assert session.trajectory.turns[0].delivered
    session.trajectory.mark_undelivered(1)
    session.trajectory.mark_delivered(1)
    assert session.trajectory.turns[1].delivered


# ------------------------------------------------------------------ what an engine may not do


@pytest.mark.parametrize(
    ("logprobs", "versions"),
    [
        ([-0.1], [VersionSpan("1", 0, 2)]),
        ([-0.1, None], [VersionSpan("1", 0, 2)]),
        ([-0.1, -0.2], []),
        ([-0.1, -0.2], [VersionSpan("1", 0, 1)]),
        ([-0.1, -0.2], [VersionSpan("1", 0, 3)]),
        ([-0.1, -0.2], [VersionSpan("1", 1, 2)]),
        ([-0.1, -0.2], [VersionSpan("1", 0, 1), VersionSpan("2", 0, 2)]),
        ([-0.1, -0.2], [VersionSpan("1", 0, 2), VersionSpan("2", 2, 2)]),
        ([-0.1, -0.2], [VersionSpan("2", 1, 2), VersionSpan("1", 0, 1)]),
    ],
)
def test_a_turn_that_does_not_add_up_is_refused(
    plain: TemplateRenderer, logprobs: list[float], versions: list[VersionSpan]
) -> None:
    trajectory = Trajectory("r")
    plan = trajectory.plan(START, TOOLS, plain)
    with pytest.raises(EngineProtocolError):
        trajectory.commit(
            plan, sampled=[1, 2], logprobs=logprobs, finish="stop", versions=versions, reply=assistant("x")
        )
    assert trajectory.turns == []


def test_an_empty_reply_and_a_logprob_that_is_no_number_are_kept(plain: TemplateRenderer) -> None:
    session = Session(plain)
    turn, _ = session.turn(START, [], finish="length")
    assert len(turn.sampled) == 0
    turn, _ = session.turn(START, [5, 6], finish="length", logprobs=[math.nan, -math.inf])
    assert not math.isfinite(sum(turn.logprobs))


# ------------------------------------------------------------------ stored and read back


def test_a_restored_tree_goes_on_as_the_first_one(plain: TemplateRenderer) -> None:
    session = Session(plain)
    _, first = session.turn(START, "One.\n" + call_text("ls"))
    more = [*START, first, tool("a.py", call_of(first))]
    session.turn(more, "Two.")
    _, third = session.turn(more, "Three.")
    session.trajectory.mark_undelivered(1)
    again = Trajectory.restore("rollout", session.trajectory.turns)
    assert again.turns == session.trajectory.turns
    for request in (more, [*more, third, user("go on")], [system("x"), user(), first, user()]):
        assert again.plan(request, TOOLS, plain) == session.plan(request)


# ------------------------------------------------------------------ cost


def test_two_hundred_turns_cost_milliseconds_each(plain: TemplateRenderer) -> None:
    session = Session(plain)
    messages = START
    for _ in range(200):
        _, reply = session.turn(messages, call_text("ls"))
        messages = [*messages, reply, tool("a.py " * 50, call_of(reply))]
    times = []
    for _ in range(5):
        started = time.perf_counter()
        session.plan(messages)
        times.append(time.perf_counter() - started)
    # Some 3 ms here; a full render of these tokens takes 50 times that.
    assert min(times) < 0.03
