"""What every converter may rely on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import UsageError
from rollwright.integrations.arrays import logprob_list, response_lists, views
from rollwright.integrations.classes import module
from rollwright.integrations.record import (
    StoredRollout,
    baselined,
    group_advantages,
    longest,
    rows,
    stand_in,
    steps,
    stored_groups,
    trained,
)
from rollwright.types import Sample
from support.rollouts import stored_run


def test_a_group_has_its_lost_rollouts_too(calc: list[StoredRollout]) -> None:
    assert [each.record.attempt for each in calc] == [1, 2, 3, 4, 5]
    assert [len(each.samples) for each in calc] == [1, 3, 0, 1, 0]


def test_groups_come_one_by_one(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    text = run.index.read_text()
    other = text.replace('"calc', '"zoo')
    run.index.write_text(text + other)
    for attempt in range(1, 6):
        (run.rollouts / f"zoo.{attempt}").symlink_to(run.rollouts / f"calc.{attempt}")
    assert [{each.record.task for each in group} for group in stored_groups(run)] == [{"calc"}, {"zoo"}]


def test_one_value_per_rollout_and_none_for_the_lost_one(calc: list[StoredRollout]) -> None:
    found = group_advantages(calc, estimator="dr_grpo")
    assert (found.counted, found.total, found.mean) == (4, 5, 0.375)
    assert dict(found.advantages) == {"calc.1": 0.625, "calc.2": -0.375, "calc.4": 0.125, "calc.5": -0.375}


def test_below_the_quorum_a_trainer_gets_nothing(calc: list[StoredRollout]) -> None:
    assert [each.record.attempt for each in baselined(calc)] == [1, 2, 4, 5]
    assert baselined(calc, quorum=5) == []
    assert baselined([calc[0], calc[2]]) == []


def test_a_stand_in_has_no_loss_and_a_reply(calc: list[StoredRollout]) -> None:
    for rollout in calc:
        row = stand_in(rollout, filler=3)
        assert not any(row.loss_mask)
        assert not any(row.logprobs)
        assert 0 < row.prompt_length < len(row.tokens)
        assert (row.trainable, row.reward) == (False, rollout.record.reward)
    assert stand_in(calc[4], filler=3).tokens.tolist() == [3, 3]
    assert stand_in(calc[0], filler=3).tokens == calc[0].samples[0].tokens


def test_a_rollout_that_trains_nothing_is_one_row(calc: list[StoredRollout]) -> None:
    unsure = replace(calc[1], samples=[replace(each, trainable=False) for each in calc[1].samples])
    assert trained(unsure) == []
    assert len(rows(unsure, filler=0)) == 1
    assert len(rows(calc[1], filler=0)) == 3


def test_the_longest_sample_trains_the_most(calc: list[StoredRollout]) -> None:
    most = longest(trained(calc[1]))
    assert sum(most.loss_mask) == max(sum(each.loss_mask) for each in calc[1].samples)


def test_steps_are_those_of_the_trained_tokens(calc: list[StoredRollout]) -> None:
    assert steps(calc[0].samples, int) == (7, 8)
    assert steps([], int) is None
    with pytest.raises(UsageError, match="no trainer step"):
        steps([replace(calc[0].samples[0], versions=[replace(calc[0].samples[0].versions[0], version="x")])], int)


def test_a_missing_trainer_is_named() -> None:
    with pytest.raises(UsageError, match=r"no_such_trainer\.part cannot be imported.*is no_such_trainer installed"):
        module("no_such_trainer.part")


# ------------------------------------------------------------------ arrays

masks = st.lists(st.booleans(), min_size=1, max_size=40)


def sample_of(mask: list[bool], prompt: int) -> Sample:
    mask = [False] * prompt + mask
    return Sample(
        task_id="t", group_id="g", rollout_id="g.1", segment_index=0, n_segments=1, role="main",
        tokens=[n * 1000 for n in range(len(mask))], loss_mask=mask,
        logprobs=[-0.1 * n * m for n, m in enumerate(mask)],
        versions=[], prompt_length=prompt, reward=1.0, weight=1.0, trainable=any(mask), counts_in_baseline=True,
    )  # fmt: skip


@given(masks, st.integers(0, 5))
def test_prompt_and_response_are_the_sample_again(mask: list[bool], prompt: int) -> None:
    sample = sample_of(mask, prompt)
    lists = response_lists(sample)
    assert lists.prompt + lists.response == sample.tokens.tolist()
    assert [0] * prompt + lists.mask == sample.loss_mask.tolist()
    assert [0.0] * prompt + lists.logprobs == sample.logprobs.tolist()
    assert logprob_list(sample) == sample.logprobs.tolist()


@given(masks, st.integers(0, 5))
def test_spans_are_the_mask(mask: list[bool], prompt: int) -> None:
    sample = sample_of(mask, prompt)
    again = [0] * len(sample.tokens)
    for start, end in sample.trained_spans():
        assert start < end
        assert start == 0 or not again[start - 1]
        again[start:end] = [1] * (end - start)
    assert again == sample.loss_mask.tolist()


def test_views_share_memory_with_the_sample() -> None:
    sample = sample_of([True, False], 1)
    found = views(sample)
    assert [view.dtype.name for view in found] == ["int32", "int8", "float64"]
    for view, buffer in zip(found, (sample.tokens, sample.loss_mask, sample.logprobs), strict=True):
        assert np.shares_memory(view, np.frombuffer(buffer, dtype=view.dtype))
