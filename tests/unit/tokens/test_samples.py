from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from rollwright.errors import UsageError
from rollwright.messages import Message
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples, within_lag
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import verify
from rollwright.types import Sample, VersionSpan
from support.conversation import Session, call_text, system, tool, user

START = [system(), user()]


def sealed(
    trajectory: Trajectory,
    limit: int | None = None,
    *,
    trainable: bool = True,
    accepted: Collection[str] | None = None,
) -> list[Sample]:
    samples = build_samples(
        trajectory,
        task_id="task",
        group_id="group",
        rollout_id="rollout",
        reward=0.5,
        trainable=trainable,
        counts_in_baseline=True,
        max_sample_tokens=limit,
        accepted_versions=accepted,
    )
    assert verify(trajectory, samples, None).violations == ()
    return samples


def line(session: Session, count: int) -> list[Message]:
    """`count` turns that follow each other; the history that a next request has."""
    messages = list(START)
    for step in range(count):
        _, reply = session.turn(messages, f"Step {step}.\n{call_text('ls')}", version=str(step))
        messages += [reply, *(tool("a.py", call.id) for call in reply.tool_calls)]
    return messages


def ends(trajectory: Trajectory) -> list[int]:
    return [len(trajectory.ids(turn.index)) for turn in trajectory.turns]


def test_one_line_is_one_sample_that_says_what_happened(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 3)
    turns = session.trajectory.turns
    (sample,) = sealed(session.trajectory)
    assert sample.tokens.tolist() == session.trajectory.ids(2)
    assert sample.turns == [0, 1, 2]
    assert (sample.segment_index, sample.n_segments, sample.weight, sample.role) == (0, 1, 1.0, "main")
    assert (sample.task_id, sample.group_id, sample.rollout_id, sample.reward) == ("task", "group", "rollout", 0.5)
    assert sample.prompt_length == len(turns[0].delta)
    assert [m for m, t in zip(sample.loss_mask, sample.tokens, strict=True)] == [
        m for turn in turns for m in [0] * len(turn.delta) + [1] * len(turn.sampled)
    ]
    assert [lp for lp in sample.logprobs if lp] == [lp for turn in turns for lp in turn.logprobs]
    assert [(s.version, s.end - s.start) for s in sample.versions] == [
        (str(n), len(turns[n].sampled)) for n in range(3)
    ]
    assert (sample.truncated, sample.ill_formed, sample.excluded) == (False, False, {})
    assert sample.trainable
    assert sample.counts_in_baseline


def test_neighbouring_spans_of_one_version_are_one_span(plain: TemplateRenderer) -> None:
    trajectory = Trajectory("r")
    plan = trajectory.plan(START, [], plain)
    spans = [VersionSpan("1", 0, 1), VersionSpan("1", 1, 2), VersionSpan("2", 2, 3)]
    reply = Message(role="assistant", content="x")
    trajectory.commit(plan, sampled=[1, 2, 3], logprobs=[-1.0] * 3, finish="stop", versions=spans, reply=reply)
    (sample,) = sealed(trajectory)
    start = sample.prompt_length
    assert sample.versions == [VersionSpan("1", start, start + 2), VersionSpan("2", start + 2, start + 3)]


def test_a_shared_turn_is_trained_once_and_context_elsewhere(plain: TemplateRenderer) -> None:
    session = Session(plain)
    history = line(session, 2)
    session.turn(history, "One end.")
    session.turn(history, "Another end.")
    first, second = sealed(session.trajectory)
    assert (first.turns, second.turns) == ([0, 1, 2], [0, 1, 3])
    shared = len(session.trajectory.turns[0].sampled) + len(session.trajectory.turns[1].sampled)
    assert second.excluded == {"shared_with_earlier_branch": shared}
    assert sum(second.loss_mask) == len(session.trajectory.turns[3].sampled)
    assert second.prompt_length == first.prompt_length
    total = sum(first.loss_mask) + sum(second.loss_mask)
    assert (first.weight, second.weight) == (sum(first.loss_mask) / total, sum(second.loss_mask) / total)


def test_a_branch_that_ends_in_the_main_role_keeps_the_shared_turns(plain: TemplateRenderer) -> None:
    session = Session(plain)
    history = line(session, 2)
    session.turn([*history, user("Summarise.")], "A summary.", role="compaction")
    session.turn(history, "Go on.")
    samples = sealed(session.trajectory)
    assert [(s.role, s.turns, sum(s.excluded.values()) > 0) for s in samples] == [
        ("main", [0, 1, 3], False),
        ("compaction", [0, 1, 2], True),
    ]


def test_an_undelivered_turn_trains_nothing_and_is_counted(plain: TemplateRenderer) -> None:
    session = Session(plain)
    history = line(session, 2)
    session.turn(history, "Lost on the way.")
    session.trajectory.mark_undelivered(2)
    (sample,) = sealed(session.trajectory)
    lost = len(session.trajectory.turns[2].sampled)
    assert (sample.turns, sample.excluded) == ([0, 1], {"undelivered": lost})
    session.turn(history, "Came through.")
    (sample,) = sealed(session.trajectory)
    assert (sample.turns, sample.excluded) == ([0, 1, 3], {"undelivered": lost})


def test_what_was_lost_is_counted_in_the_branch_it_hangs_on(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 1)
    other = [system(), user("Something else.")]
    _, reply = session.turn(other, "Yes.")
    session.turn([*other, reply, user("more")], "Lost.")
    session.trajectory.mark_undelivered(2)
    first, second = sealed(session.trajectory)
    assert (first.excluded, second.excluded) == ({}, {"undelivered": len(session.trajectory.turns[2].sampled)})


def test_a_rollout_whose_only_reply_was_lost_has_no_sample(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 1)
    session.trajectory.mark_undelivered(0)
    assert sealed(session.trajectory) == []
    report = verify(session.trajectory, [], None)
    assert (report.trained, report.violations) == (0, ())
    assert report.excluded == {"undelivered": report.sampled}


def test_an_undelivered_first_request_is_counted_in_the_first_sample(plain: TemplateRenderer) -> None:
    session = Session(plain)
    session.turn(START, "Lost.")
    session.trajectory.mark_undelivered(0)
    session.turn(START, "Found.")
    (sample,) = sealed(session.trajectory)
    assert sample.turns == [1]
    assert sample.excluded == {"undelivered": len(session.trajectory.turns[0].sampled)}


def test_a_branch_without_sampled_tokens_is_no_sample(plain: TemplateRenderer) -> None:
    session = Session(plain)
    session.turn(START, [], finish="length")
    assert sealed(session.trajectory) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_masked_and_counted(plain: TemplateRenderer, bad: float) -> None:
    session = Session(plain)
    session.turn(START, [5, 6, 7], finish="length", logprobs=[-0.1, bad, -0.3])
    (sample,) = sealed(session.trajectory)
    assert sample.loss_mask[-3:].tolist() == [1, 0, 1]
    assert sample.logprobs[-3:].tolist() == [-0.1, 0.0, -0.3]
    assert sample.excluded == {"non_finite_logprob": 1}


def test_a_rollout_of_nothing_but_bad_logprobs_cannot_be_trained_and_says_so(plain: TemplateRenderer) -> None:
    session = Session(plain)
    session.turn(START, [5, 6], finish="length", logprobs=[math.nan, math.nan])
    session.turn([system(), user("x")], [5], finish="length", logprobs=[math.nan])
    samples = sealed(session.trajectory)
    assert [(s.trainable, s.weight, s.excluded) for s in samples] == [
        (False, 0.5, {"non_finite_logprob": 2}),
        (False, 0.5, {"non_finite_logprob": 1}),
    ]


def test_flags_tell_of_cut_and_broken_turns(plain: TemplateRenderer) -> None:
    session = Session(plain)
    history = line(session, 1)
    session.turn(history, "<tool_call>\n<function=bash>", finish="length")
    (sample,) = sealed(session.trajectory)
    assert (sample.truncated, sample.ill_formed) == (True, True)
    (shorter,) = sealed(session.trajectory, ends(session.trajectory)[0])
    assert (shorter.truncated, shorter.ill_formed) == (True, False)


def test_what_may_not_be_trained_is_marked_but_complete(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 2)
    (sample,) = sealed(session.trajectory, trainable=False)
    assert not sample.trainable
    assert sum(sample.loss_mask) > 0


# ------------------------------------------------------------------ truncation


def test_a_long_branch_is_cut_at_the_end_of_a_turn(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 4)
    turns, at = session.trajectory.turns, ends(session.trajectory)
    for limit, kept in [(at[3], 4), (at[3] - 1, 3), (at[2], 3), (at[1] + 1, 2), (at[0], 1)]:
        (sample,) = sealed(session.trajectory, limit)
        assert sample.turns == list(range(kept))
        assert sample.tokens.tolist() == session.trajectory.ids(kept - 1)
        assert len(sample.loss_mask) == len(sample.logprobs) == len(sample.tokens) == at[kept - 1]
        assert sample.versions[-1].end == at[kept - 1]
        assert sample.truncated == (kept < 4)
        assert sum(sample.excluded.values()) == sum(len(turn.sampled) for turn in turns[kept:])
        assert set(sample.excluded) <= {"truncated"}


def test_where_not_even_the_first_turn_fits_it_is_cut_inside(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 2)
    first = session.trajectory.turns[0]
    (sample,) = sealed(session.trajectory, len(first.delta) + 2)
    assert sample.tokens.tolist() == session.trajectory.ids(0)[: len(first.delta) + 2]
    assert sample.loss_mask[-3:].tolist() == [0, 1, 1]
    assert sample.logprobs[-2:] == first.logprobs[:2]
    assert sample.versions == [VersionSpan("0", len(first.delta), len(first.delta) + 2)]
    assert sample.excluded == {"truncated": verify(session.trajectory, [sample], None).sampled - 2}
    assert sample.trainable


@pytest.mark.parametrize("over", [0, 1, 5])
def test_a_cut_inside_the_first_prompt_leaves_nothing_to_train_and_says_so(plain: TemplateRenderer, over: int) -> None:
    session = Session(plain)
    line(session, 2)
    first = session.trajectory.turns[0]
    limit = len(first.delta) - over
    (sample,) = sealed(session.trajectory, limit)
    assert sample.tokens == first.delta[:limit]
    assert sample.loss_mask.tolist() == [0] * limit
    assert sample.logprobs.tolist() == [0.0] * limit
    assert sample.versions == []
    assert sample.prompt_length == limit
    assert (sample.trainable, sample.truncated, sample.weight) == (False, True, 1.0)
    assert sample.excluded == {"truncated": sum(len(t.sampled) for t in session.trajectory.turns)}


def test_bad_logprobs_beyond_a_cut_are_counted_as_cut(plain: TemplateRenderer) -> None:
    session = Session(plain)
    session.turn(START, [5, 6, 7, 8], finish="length", logprobs=[-0.1, math.nan, -0.3, math.nan])
    (sample,) = sealed(session.trajectory, len(session.trajectory.turns[0].delta) + 3)
    assert sample.excluded == {"non_finite_logprob": 1, "truncated": 1}


def test_a_branch_cut_down_to_what_it_shares_trains_nothing(plain: TemplateRenderer) -> None:
    session = Session(plain)
    history = line(session, 2)
    session.turn(history, "One end.")
    session.turn(history, "Another, longer end, with more words than the first.")
    first, second = sealed(session.trajectory, ends(session.trajectory)[2])
    assert first.trainable
    assert (second.trainable, second.weight, second.turns) == (False, 0.0, [0, 1])
    assert set(second.excluded) == {"shared_with_earlier_branch", "truncated"}


# ------------------------------------------------------------------ cost


def test_two_hundred_turns_and_three_branches_are_sealed_in_a_moment(plain: TemplateRenderer) -> None:
    session = Session(plain)
    history = line(session, 198)
    session.turn(history, "One.")
    session.turn(history, "Two.")
    session.turn(history, "Three.")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        samples = sealed(session.trajectory)
        times.append(time.perf_counter() - started)
    assert len(samples) == 3
    # Some 15 ms here, the proof included.
    assert min(times) < 0.2


# ------------------------------------------------------------------ what is not to be trained


def test_tokens_of_weights_that_are_too_old_are_context_and_say_so(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 3)
    turns = session.trajectory.turns
    (sample,) = sealed(session.trajectory, accepted=within_lag(["0", "1", "2"], 1))
    assert sample.accepted_versions == ["1", "2"]
    assert sample.excluded == {"stale_version": len(turns[0].sampled)}
    assert sum(sample.loss_mask) == sum(len(turn.sampled) for turn in turns[1:])
    assert [span.version for span in sample.versions] == ["0", "1", "2"]


def test_a_turn_that_an_update_cut_in_two_is_trained_where_it_is_fresh(plain: TemplateRenderer) -> None:
    trajectory = Trajectory("r")
    plan = trajectory.plan(START, [], plain)
    spans = [VersionSpan("1", 0, 2), VersionSpan("2", 2, 4)]
    reply = Message(role="assistant", content="x")
    logprobs = [-1.0, math.nan, math.nan, -4.0]
    trajectory.commit(plan, sampled=[1, 2, 3, 4], logprobs=logprobs, finish="stop", versions=spans, reply=reply)
    (sample,) = sealed(trajectory, accepted=["2"])
    assert sample.loss_mask[-4:].tolist() == [0, 0, 0, 1]
    assert sample.logprobs[-4:].tolist() == [0.0, 0.0, 0.0, -4.0]
    assert sample.excluded == {"stale_version": 2, "non_finite_logprob": 1}


def test_a_rollout_of_stale_tokens_alone_is_not_trainable(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 1)
    (sample,) = sealed(session.trajectory, accepted=["9"])
    assert not sample.trainable
    assert (sample.weight, sum(sample.loss_mask)) == (1.0, 0)


@pytest.mark.parametrize(("lag", "accepted"), [(0, {"c"}), (1, {"b", "c"}), (5, {"a", "b", "c"})])
def test_the_lag_counts_versions_in_the_order_in_which_they_came(lag: int, accepted: set[str]) -> None:
    assert within_lag(["a", "b", "c"], lag) == accepted


def test_a_class_that_is_not_trained_is_delivered_without_loss(plain: TemplateRenderer) -> None:
    session = Session(plain)
    line(session, 2)
    title, _ = session.turn([system("Name this."), user()], "A title", role="side")
    session.trajectory.turns[title.index] = replace(title, trained=False)
    main, side = sealed(session.trajectory)
    assert (main.role, main.trainable, main.weight) == ("main", True, 1.0)
    assert (side.role, side.trainable, side.weight) == ("side", False, 0.0)
    assert side.excluded == {"class_not_trained": len(title.sampled)}


@pytest.mark.parametrize(
    "asked",
    [
        *({"reward": reward} for reward in (math.nan, math.inf, -math.inf)),
        *({"max_sample_tokens": most} for most in (0, -3)),
        {"accepted_versions": "scripted"},
    ],
)
def test_what_would_make_samples_that_no_one_asked_for_is_refused(plain: TemplateRenderer, asked: Any) -> None:
    session = Session(plain)
    line(session, 1)
    said: dict[str, Any] = {"reward": 1.0, "trainable": True, "counts_in_baseline": True}
    with pytest.raises(UsageError, match=next(iter(asked))):
        build_samples(session.trajectory, task_id="t", group_id="g", rollout_id="r", **(said | asked))
