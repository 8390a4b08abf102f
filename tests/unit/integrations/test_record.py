"""What every converter may rely on."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import UsageError
from rollwright.export import samples_of
from rollwright.integrations import trl, verl
from rollwright.integrations.arrays import logprob_list, response_lists, views
from rollwright.integrations.classes import module
from rollwright.integrations.record import (
    StoredRollout,
    baselined,
    group_advantages,
    longest,
    parts,
    parts_by_group,
    stand_in,
    steps,
    stored_groups,
    trained,
    trained_versions,
)
from rollwright.types import Sample, VersionSpan
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
    assert baselined([calc[0], calc[2]], quorum=1) == [calc[0]]


def test_of_a_folder_from_before_records_had_one_the_quorum_is_the_run_files(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    resolved = run.resolved()
    lines = [orjson.loads(line) for line in run.index.read_bytes().splitlines()]
    lines = [{key: value for key, value in line.items() if key != "quorum"} for line in lines]
    run.index.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    for attempts, setting, needed in ((5, 5, 5), (5, 0.7, 4), (5, 1, 1), (1, 4, 1)):
        settings = {"grading": {"group_quorum": setting}, "run": {"attempts": attempts}}
        run.resolved_file.write_bytes(orjson.dumps(resolved | {"config": settings}))
        (group,) = stored_groups(run)
        assert {each.record.quorum for each in group} == {needed}
        enough = needed <= 4  # four of the five count
        assert (group_advantages(group).status == "ok") is enough
        assert len(baselined(group)) == 4 * enough
        assert any(sample.trainable for sample in samples_of(run)) is enough


def test_a_lone_survivor_trains_nothing_whatever_the_quorum(calc: list[StoredRollout]) -> None:
    group = [replace(each, record=replace(each.record, quorum=1)) for each in (calc[0], calc[2])]
    assert baselined(group) == []
    assert group_advantages(group).status == "below_quorum"
    assert baselined(group[:1]) == group[:1], "where one was all that was asked for, there is no baseline of others"


def test_a_batch_of_several_groups_keeps_its_order(calc: list[StoredRollout]) -> None:
    other = [replace(each, record=replace(each.record, epoch=2)) for each in (calc[0], calc[2])]
    found = parts_by_group([other[0], *calc, other[1]])
    assert [part.rollout for part in found] == [other[0], *calc, other[1]]
    assert [part.counts for part in found] == [False, True, True, False, True, True, False]


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
    assert [len(part.rows(filler=0)) for part in parts([unsure, calc[1]], quorum=1)] == [1, 3]


def test_the_longest_sample_trains_the_most(calc: list[StoredRollout]) -> None:
    most = longest(trained(calc[1]))
    assert sum(most.loss_mask) == max(sum(each.loss_mask) for each in calc[1].samples)


def test_steps_are_those_of_the_trained_tokens(calc: list[StoredRollout]) -> None:
    assert steps(calc[0].samples, int) == (7, 8)
    assert steps([], int) is None
    with pytest.raises(UsageError, match="no trainer step"):
        steps([replace(calc[0].samples[0], versions=[replace(calc[0].samples[0].versions[0], version="x")])], int)


def test_a_row_is_as_old_as_its_trained_tokens(calc: list[StoredRollout]) -> None:
    """Tokens that were too old are masked; they make no row too old."""
    (sample,) = calc[0].samples
    first, second = (span.version for span in sample.versions)
    (start, end), *_ = sample.trained_spans()
    mask = sample.loss_mask[:]
    mask[start:end] = array("b", bytes(end - start))
    stale = replace(sample, loss_mask=mask)
    assert (trained_versions(sample), trained_versions(stale)) == ([first, second], [second])
    assert steps([stale], int) == (8, 8)
    group = [replace(calc[0], samples=[stale]), calc[1]]
    assert next(trl.sample_fields(group, group_advantages(group), number=0))["model_version"] == 8
    extra = verl.output_fields(group[0], step_of=int)[0]["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (8, 8)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=6))
def test_trained_versions_are_those_of_trained_tokens(turns: list[tuple[str, list[int]]]) -> None:
    mask = [0, *(bit for _, bits in turns for bit in bits)]
    versions = [version for version, bits in turns for _ in bits]
    ends = list(itertools.accumulate((len(bits) for _, bits in turns), initial=1))
    spans = [VersionSpan(turns[n][0], ends[n], ends[n + 1]) for n in range(len(turns))]
    sample = replace(
        sample_of([], 1), tokens=[0] * len(mask), loss_mask=mask, logprobs=[0.0] * len(mask), versions=spans
    )
    assert set(trained_versions(sample)) == {version for version, bit in zip(versions, mask[1:], strict=True) if bit}
    assert len(trained_versions(sample)) == len(set(trained_versions(sample)))


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
