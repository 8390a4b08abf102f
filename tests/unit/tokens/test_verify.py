"""Each way in which samples may lie is seeded once, and seen."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import ViolationKind, prompt_digest, verify
from rollwright.types import Sample, VersionSpan
from support.conversation import Session, call_text, system, tool, user

START = [system(), user()]


@pytest.fixture
def session(plain: TemplateRenderer) -> Session:
    """Two branches that share two turns, a turn that was lost, and one bad logprob."""
    session = Session(plain)
    history = list(START)
    for _ in range(2):
        _, reply = session.turn(history, f"Step.\n{call_text('ls')}")
        history += [reply, *(tool("a.py", call.id) for call in reply.tool_calls)]
    session.turn(history, [5, 6, 7], finish="length", logprobs=[-0.1, math.nan, -0.3], version="2")
    session.turn(history, "Another end.", version="2")
    session.turn(history, "Lost.", version="2")
    session.trajectory.mark_undelivered(4)
    return session


@pytest.fixture
def samples(session: Session) -> list[Sample]:
    return build_samples(
        session.trajectory,
        task_id="t",
        group_id="g",
        rollout_id="r",
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
    )


def sent(session: Session) -> dict[int, str]:
    return {index: prompt_digest(ids) for index, ids in session.sent.items()}


def test_true_samples_pass_and_are_counted(session: Session, samples: list[Sample]) -> None:
    report = verify(session.trajectory, samples, sent(session))
    assert report.violations == ()
    turns = session.trajectory.turns
    assert report.sampled == sum(len(turn.sampled) for turn in turns)
    assert report.excluded == {"undelivered": len(turns[4].sampled), "non_finite_logprob": 1}
    assert report.trained == report.sampled - len(turns[4].sampled) - 1


def test_the_digest_of_a_prompt_is_that_of_its_32_bit_integers() -> None:
    assert prompt_digest([1, 2]) == prompt_digest(array("i", [1, 2]))
    assert prompt_digest([1, 2]) != prompt_digest([2, 1])
    assert prompt_digest([]) != prompt_digest([0])


# ------------------------------------------------------------------ prompts


def test_a_prompt_that_was_not_the_training_prefix_is_seen(session: Session, samples: list[Sample]) -> None:
    for change in (
        {2: prompt_digest([*session.sent[2], 1])},
        {2: prompt_digest([*session.sent[2][:-1], 9])},
        {9: prompt_digest([1])},
    ):
        report = verify(session.trajectory, samples, sent(session) | change)
        assert [(v.kind, v.turn) for v in report.violations] == [("prompt_differs", next(iter(change)))]


def test_a_prompt_without_a_record_is_seen(session: Session, samples: list[Sample]) -> None:
    digests = sent(session)
    del digests[1]
    report = verify(session.trajectory, samples, digests)
    assert [(v.kind, v.turn) for v in report.violations] == [("prompt_differs", 1)]
    assert "no record" in str(report.violations[0])


# ------------------------------------------------------------------ samples


def changed(sample: Sample, **fields: object) -> Sample:
    return replace(sample, **fields)  # pyright: ignore[reportArgumentType]


def first_trained(sample: Sample) -> int:
    return sample.loss_mask.index(1)


def put(values: list[float], position: int, value: float) -> list[float]:
    return [*values[:position], value, *values[position + 1 :]]


def swap_token(s: Sample) -> Sample:
    at = first_trained(s)
    return changed(s, tokens=put(s.tokens, at, s.tokens[at] + 1))


def swap_prompt_token(s: Sample) -> Sample:
    return changed(s, tokens=put(s.tokens, 0, s.tokens[0] + 1))


def shift_mask(s: Sample) -> Sample:
    return changed(s, loss_mask=[0, *s.loss_mask[:-1]])


def train_prompt(s: Sample) -> Sample:
    return changed(s, loss_mask=put(s.loss_mask, 0, 1))


def prompt_logprob(s: Sample) -> Sample:
    return changed(s, logprobs=put(s.logprobs, 0, -0.5))


def shift_logprobs(s: Sample) -> Sample:
    return changed(s, logprobs=[0.0, *s.logprobs[:-1]])


def zero_logprob(s: Sample) -> Sample:
    return changed(s, logprobs=put(s.logprobs, first_trained(s), 0.0))


def nudge_logprob(s: Sample) -> Sample:
    at = first_trained(s)
    return changed(s, logprobs=put(s.logprobs, at, s.logprobs[at] - 1e-9))


def nan_logprob(s: Sample) -> Sample:
    return changed(s, logprobs=put(s.logprobs, first_trained(s), math.nan))


def train_bad_logprob(s: Sample) -> Sample:
    return changed(s, loss_mask=put(s.loss_mask, len(s.tokens) - 2, 1))


def train_shared(s: Sample) -> Sample:
    start = s.prompt_length
    return changed(s, loss_mask=put(s.loss_mask, start, 1))


def drop_token(s: Sample) -> Sample:
    return changed(s, loss_mask=put(s.loss_mask, first_trained(s), 0), logprobs=put(s.logprobs, first_trained(s), 0.0))


def drop_all(s: Sample) -> Sample:
    return changed(s, loss_mask=[0] * len(s.tokens), logprobs=[0.0] * len(s.tokens))


def mask_of_two(s: Sample) -> Sample:
    return changed(s, loss_mask=put(s.loss_mask, first_trained(s), 2))


def short_mask(s: Sample) -> Sample:
    return changed(s, loss_mask=s.loss_mask[:-1])


def short_logprobs(s: Sample) -> Sample:
    return changed(s, logprobs=s.logprobs[:-1])


def cut_in_silence(s: Sample) -> Sample:
    return changed(s, tokens=s.tokens[:-1], loss_mask=s.loss_mask[:-1], logprobs=s.logprobs[:-1])


def no_versions(s: Sample) -> Sample:
    return changed(s, versions=[])


def gap_in_versions(s: Sample) -> Sample:
    head, *rest = s.versions
    return changed(s, versions=[VersionSpan(head.version, head.start + 1, head.end), *rest])


def wrong_version(s: Sample) -> Sample:
    return changed(s, versions=[VersionSpan("9", span.start, span.end) for span in s.versions])


def other_path(s: Sample) -> Sample:
    return changed(s, turns=[0, 1, 3])


def no_path(s: Sample) -> Sample:
    return changed(s, turns=[0, 2])


def unknown_turn(s: Sample) -> Sample:
    return changed(s, turns=[0, 1, 99])


def wrong_prompt_length(s: Sample) -> Sample:
    return changed(s, prompt_length=s.prompt_length - 1)


def heavier(s: Sample) -> Sample:
    return changed(s, weight=s.weight + 0.5)


def untold(s: Sample) -> Sample:
    return changed(s, excluded={})


def told_as_cut(s: Sample) -> Sample:
    return changed(s, excluded=dict(s.excluded) | {"truncated": 3})


def other_number(s: Sample) -> Sample:
    return changed(s, segment_index=5)


def claims_freshness(s: Sample) -> Sample:
    return changed(s, accepted_versions=["2"])


LIES: list[tuple[Callable[[Sample], Sample], int, ViolationKind]] = [
    (swap_token, 0, "tokens_differ"),
    (swap_prompt_token, 0, "tokens_differ"),
    (cut_in_silence, 0, "tokens_differ"),
    (other_path, 0, "tokens_differ"),
    (no_path, 0, "path_broken"),
    (unknown_turn, 0, "path_broken"),
    (shift_mask, 0, "trained_not_sampled"),
    (train_prompt, 0, "trained_not_sampled"),
    (prompt_logprob, 0, "trained_not_sampled"),
    (mask_of_two, 0, "trained_not_sampled"),
    (shift_logprobs, 0, "logprob_differs"),
    (zero_logprob, 0, "logprob_differs"),
    (nudge_logprob, 0, "logprob_differs"),
    (nan_logprob, 0, "logprob_differs"),
    (train_bad_logprob, 0, "logprob_differs"),
    (train_shared, 1, "trained_twice"),
    (drop_token, 0, "sampled_lost"),
    (drop_all, 0, "sampled_lost"),
    (short_mask, 0, "length_mismatch"),
    (short_logprobs, 0, "length_mismatch"),
    (wrong_prompt_length, 0, "length_mismatch"),
    (no_versions, 0, "version_missing"),
    (gap_in_versions, 0, "version_missing"),
    (wrong_version, 0, "version_missing"),
    (heavier, 0, "weight_sum"),
    (untold, 1, "excluded_miscounted"),
    (told_as_cut, 1, "excluded_miscounted"),
    (other_number, 1, "segment_index"),
    (claims_freshness, 0, "trained_stale"),
    (claims_freshness, 1, "trained_stale"),
]


@pytest.mark.parametrize(("lie", "which", "kind"), LIES, ids=[lie[0].__name__ for lie in LIES])
def test_a_lie_is_seen(
    lie: Callable[[Sample], Sample], which: int, kind: ViolationKind, session: Session, samples: list[Sample]
) -> None:
    samples[which] = lie(samples[which])
    report = verify(session.trajectory, samples, sent(session))
    assert kind in [violation.kind for violation in report.violations]
    assert all(str(violation).startswith(violation.kind) for violation in report.violations)


def test_training_a_class_that_is_not_to_be_trained_is_seen(session: Session, samples: list[Sample]) -> None:
    session.trajectory.turns[2] = replace(session.trajectory.turns[2], trained=False)
    assert "trained_class" in [v.kind for v in verify(session.trajectory, samples, None).violations]


def test_a_missing_sample_is_seen(session: Session, samples: list[Sample]) -> None:
    kinds = [v.kind for v in verify(session.trajectory, samples[:1], None).violations]
    assert "sampled_lost" in kinds
    assert "weight_sum" in kinds
    assert [v.kind for v in verify(session.trajectory, [], None).violations] == ["sampled_lost"] * 4


def test_a_sample_given_twice_is_seen(session: Session, samples: list[Sample]) -> None:
    twice = [*samples, replace(samples[0], segment_index=2)]
    assert "trained_twice" in [v.kind for v in verify(session.trajectory, twice, None).violations]


def test_training_what_the_client_never_got_is_seen(session: Session, samples: list[Sample]) -> None:
    turns = session.trajectory.turns
    turns[3] = dataclasses.replace(turns[3], delivered=False)
    assert "trained_undelivered" in [v.kind for v in verify(session.trajectory, samples, None).violations]


def test_a_sample_of_another_rollout_is_seen(plain: TemplateRenderer, samples: list[Sample]) -> None:
    other = Session(plain)
    other.turn([system(), user("Something else.")], "Fine.")
    kinds = [v.kind for v in verify(other.trajectory, samples, None).violations]
    assert "path_broken" in kinds
    assert "sampled_lost" in kinds
    assert verify(Trajectory("r"), samples, None).violations[0].kind == "segment_index" or "path_broken" in [
        v.kind for v in verify(Trajectory("r"), samples, None).violations
    ]
