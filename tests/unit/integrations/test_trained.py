"""Whatever became of the rollouts of a group, no converter trains, or rewards, anything but what the record says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import InfraError, RolloutSuperseded, UsageError
from rollwright.gateway.log import LoggedTrajectory
from rollwright.integrations import harbor, openrlhf, prime_rl, skyrl, tinker, trl, verl
from rollwright.integrations.record import StoredRollout, group_advantages, longest
from rollwright.integrations.slime.samples import Filler
from rollwright.store import withdrawn
from rollwright.types import Sample
from support.rollouts import LOST
from support.slime import Sample as SlimeSample

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens and mask of a row that trains something."""
Found = list[tuple[set[Row], float | None]]
"""Of each rollout its rows, and its reward as the trainer's baseline sees it; nan: the trainer is given none."""


# ------------------------------------------------------------------ what may become of a rollout


def relabelled(rollout: StoredRollout, **flags: Any) -> StoredRollout:
    return replace(rollout, record=replace(rollout.record, **flags))


def without_samples(rollout: StoredRollout, number: int | None = None) -> StoredRollout:
    """Its samples (or one of them) may not be trained."""
    return replace(
        rollout,
        samples=[replace(each, trainable=number not in (None, n)) for n, each in enumerate(rollout.samples)],
    )


ENDS: dict[str, Callable[[StoredRollout], StoredRollout]] = {
    "as it is": lambda rollout: rollout,
    "weak evidence": lambda rollout: without_samples(relabelled(rollout, trainable=False)),
    "weak evidence, told by the record alone": lambda rollout: relabelled(rollout, trainable=False),
    "weak evidence, told by the samples alone": without_samples,
    "one sample not trainable": lambda rollout: without_samples(rollout, 0),
    "does not count": lambda rollout: relabelled(rollout, counts_in_baseline=False),
    "withdrawn": lambda rollout: replace(rollout, record=withdrawn(rollout.record, LOST), samples=()),
    "withdrawn, samples left": lambda rollout: replace(rollout, record=withdrawn(rollout.record, LOST)),
    "superseded, samples left": lambda rollout: replace(
        rollout, record=withdrawn(rollout.record, replace(LOST, error=RolloutSuperseded.__name__))
    ),
}

ends = st.lists(st.sampled_from(sorted(ENDS)), min_size=5, max_size=5)


def may_count(rollout: StoredRollout) -> bool:
    record = rollout.record
    return record.failure is None and record.reward is not None and record.counts_in_baseline


def may_train(rollout: StoredRollout) -> list[Sample]:
    ok = may_count(rollout) and rollout.record.trainable
    return [each for each in rollout.samples if ok and each.trainable]


def row(tokens: Sequence[int], mask: Sequence[int]) -> set[Row]:
    return {(tuple(tokens), tuple(int(bit) for bit in mask))} if any(mask) else set()


def rows_of(samples: Sequence[Sample]) -> set[Row]:
    return set().union(*(row(each.tokens, each.loss_mask) for each in samples))


# ------------------------------------------------------------------ what each trainer is given

Convert = Callable[[list[StoredRollout], list[LoggedTrajectory]], Found]


def by_verl(group: list[StoredRollout], logs: list[LoggedTrajectory]) -> Found:
    found: Found = []
    for outputs in verl.group_fields(group):
        rows: set[Row] = set()
        for each in outputs:
            prompt = each["prompt_ids"]
            rows |= row(prompt + each["response_ids"], [0] * len(prompt) + each["response_mask"])
        found.append((rows, outputs[-1]["reward_score"] if outputs else None))
    return found


def by_skyrl(group: list[StoredRollout], logs: list[LoggedTrajectory]) -> Found:
    try:
        output = skyrl.generator_output(enumerate(group))
    except InfraError:  # there is no batch to train
        return [(set(), None)] * len(group)
    found: Found = [(set(), None)] * len(group)
    columns = ("trajectory_ids", "prompt_token_ids", "response_ids", "loss_masks", "rewards")
    for n, prompt, response, mask, reward in zip(*(output[name] for name in columns), strict=True):
        found[n] = (found[n][0] | row(prompt + response, [0] * len(prompt) + mask), reward)
    return found


def by_trl(group: list[StoredRollout], logs: list[LoggedTrajectory]) -> Found:
    batch = trl.rollout_batch(group, filler=0)
    columns = (batch[name] for name in ("prompt_ids", "completion_ids", "env_mask", trl.REWARD))
    return [(row(p + c, [0] * len(p) + mask), reward) for p, c, mask, reward in zip(*columns, strict=True)]


def by_openrlhf(group: list[StoredRollout], logs: list[LoggedTrajectory]) -> Found:
    found: Found = []
    for each in openrlhf.responses(group, prompt="", label="", neutral=0.125):
        mask = [0] * len(each["observation_tokens"])
        for start, end in each["action_ranges"]:
            mask[start:end] = [1] * (end - start)
        found.append((row(each["observation_tokens"], mask), math.nan))
    return found


def by_prime_rl(group: list[StoredRollout], logs: list[LoggedTrajectory]) -> Found:
    found: Found = []
    advantages = group_advantages(group)
    for each in group:
        rows = prime_rl.training_samples([each], advantages, env_name="swe")
        found.append((set().union(*(row(fields["token_ids"], fields["mask"]) for fields in rows)), math.nan))
    return found


def by_trl_async(group: list[StoredRollout], logs: list[LoggedTrajectory]) -> Found:
    advantages = group_advantages(group)
    return [
        (
            set().union(
                *(
                    row(fields["input_ids"].tolist(), fields["completion_mask"].tolist())
                    for fields in trl.sample_fields([each], advantages, number=0)
                )
            ),
            math.nan,
        )
        for each in group
    ]


def by_tinker(group: list[StoredRollout], logs: list[LoggedTrajectory]) -> Found:
    found: Found = []
    advantages = group_advantages(group)
    for each in group:
        rows: set[Row] = set()
        for tokens, inputs in tinker.datum_fields([each], advantages):
            rows |= row([*tokens, inputs["target_tokens"].tolist()[-1]], [0, *inputs["mask"].tolist()])
        found.append((rows, math.nan))
    return found


EACH_SAMPLE: list[Convert] = [by_verl, by_skyrl, by_prime_rl, by_trl_async, by_tinker]
ONE_SAMPLE: list[Convert] = [by_trl, by_openrlhf]


@pytest.mark.parametrize("convert", [*EACH_SAMPLE, *ONE_SAMPLE], ids=lambda convert: convert.__name__)
@given(chosen=ends, quorum=st.integers(1, 5), size=st.integers(1, 5))
def test_trained_and_rewarded_is_what_the_record_says(
    convert: Convert,
    chosen: list[str],
    quorum: int,
    size: int,
    calc: list[StoredRollout],
    logs: list[LoggedTrajectory],
) -> None:
    made = [relabelled(each, quorum=quorum) for each in calc[:size]]
    group = [ENDS[end](each) for end, each in zip(chosen, made, strict=False)]
    enough = sum(map(may_count, group)) >= max(quorum, min(2, size))
    for rollout, (rows, reward) in zip(group, convert(group, logs[:size]), strict=True):
        samples = may_train(rollout) if enough else []
        if convert in ONE_SAMPLE and samples:
            samples = [longest(samples)]
        assert rows == rows_of(samples)
        if reward is None or not math.isnan(reward):
            assert reward == (rollout.record.reward if enough and may_count(rollout) else None)


@given(chosen=ends, quorum=st.integers(1, 5))
def test_openrlhf_never_hears_of_a_reward_that_nobody_gave(
    chosen: list[str], quorum: int, calc: list[StoredRollout]
) -> None:
    group = [ENDS[end](relabelled(each, quorum=quorum)) for end, each in zip(chosen, calc, strict=True)]
    graded = [each.record.reward for each in group if may_count(each) and each.record.reward is not None]
    mean = math.fsum(graded) / len(graded) if graded else 0.125
    for each, said in zip(group, openrlhf.responses(group, prompt="", label="", neutral=0.125), strict=True):
        assert said["reward"] == (each.record.reward if may_count(each) else mean)
        assert said["extra_logs"]["ungraded"] == float(not may_count(each))
        if graded:
            assert said["scores"] == said["reward"]
        else:
            assert math.isnan(said["scores"])


@given(chosen=ends, quorum=st.integers(1, 5))
def test_a_trace_trains_and_rewards_what_the_record_says(
    chosen: list[str], quorum: int, calc: list[StoredRollout], logs: list[LoggedTrajectory]
) -> None:
    group = [ENDS[end](relabelled(each, quorum=quorum)) for end, each in zip(chosen, calc, strict=True)]
    enough = sum(map(may_count, group)) >= max(quorum, 2)
    for rollout, trace in zip(group, prime_rl.traces(group, logs), strict=True):
        counts = enough and may_count(rollout)
        assert trace["ok"] is counts
        assert (trace["rewards"]["rollwright"] is None) is not counts
        assert bool(trace["errors"]) is not counts
        trained = sum(sum(node.get("mask", [])) for node in trace["nodes"])
        assert trained == sum(sum(each.loss_mask) for each in (may_train(rollout) if counts else []))


@given(chosen=ends)
def test_where_a_rollout_stands_alone_only_what_may_be_trained_is(
    chosen: list[str], calc: list[StoredRollout], logs: list[LoggedTrajectory]
) -> None:
    """Harbor's details, slime's samples (whose group slime's reward function looks at), a single trace."""
    filler = Filler(decode=str)
    for end, each, logged in zip(chosen, calc, logs, strict=True):
        rollout = ENDS[end](each)
        expected = rows_of(may_train(rollout))
        details = harbor.rollout_details(rollout)
        assert sum(len(ids) for detail in details for ids in detail["completion_token_ids"]) == sum(
            sum(mask) for _, mask in expected
        )
        made = filler.samples(SlimeSample(index=0, group_index=0), rollout, evaluation=False)
        kept = [sample for sample in made if not sample.remove_sample]
        masks = ([0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask for sample in kept)
        assert set().union(*(row(s.tokens, mask) for s, mask in zip(kept, masks, strict=True))) == expected
        trace = prime_rl.trace(rollout, logged)
        assert sum(sum(node.get("mask", [])) for node in trace["nodes"]) == sum(sum(mask) for _, mask in expected)
        assert trace["ok"] is may_count(rollout)


# ------------------------------------------------------------------ what the logprobs are of


def as_raw(rollout: StoredRollout, temperature: float) -> StoredRollout:
    samples = [replace(each, logprob_kind="raw", temperature=temperature) for each in rollout.samples]
    return replace(rollout, samples=samples)


@pytest.mark.parametrize("convert", [*EACH_SAMPLE, *ONE_SAMPLE], ids=lambda convert: convert.__name__)
def test_logprobs_from_before_the_temperature_are_refused_where_nobody_could_be_told(
    convert: Convert, calc: list[StoredRollout], logs: list[LoggedTrajectory]
) -> None:
    with pytest.raises(UsageError, match=r"temperature 0\.7 .*engine\.vllm\.logprob_kind"):
        convert([as_raw(each, 0.7) for each in calc], logs)
    convert([as_raw(each, 1.0) for each in calc], logs)
    lost = [replace(each, record=withdrawn(each.record, LOST)) for each in calc]
    convert([as_raw(each, 0.7) for each in lost], logs)


def test_where_there_is_a_place_they_are_told(calc: list[StoredRollout], logs: list[LoggedTrajectory]) -> None:
    raw = as_raw(calc[0], 0.7)
    (detail,) = harbor.rollout_details(raw)
    assert set(detail["extra"]["logprob_kind"]) == {"raw"}
    assert set(detail["extra"]["temperature"]) == {0.7}
    (made,) = Filler(decode=str).samples(SlimeSample(index=0, group_index=0), raw, evaluation=True)
    assert made.metadata["rollwright"]["logprob_kind"] == "raw"
    with pytest.raises(UsageError, match="logprob_kind"):
        Filler(decode=str).samples(SlimeSample(index=0, group_index=0), raw, evaluation=False)
    with pytest.raises(UsageError, match="logprob_kind"):
        prime_rl.traces([raw], logs[:1], quorum=1)
    assert prime_rl.trace(calc[0], logs[0])["info"]["sampled_as"] == [("behaviour", 1.0)]
    extra = verl.output_fields(calc[0])[0]["extra_fields"]
    assert (extra["logprob_kind"], extra["temperature"]) == ("behaviour", 1.0)
    batch = trl.rollout_batch(calc, filler=0)
    assert (batch["rollwright_logprob_kind"], batch["rollwright_temperature"]) == (["behaviour"] * 5, [1.0] * 5)
    rows = list(trl.sample_fields(calc, group_advantages(calc), number=0))
    assert np.all([each["metrics"]["rollwright/temperature"] == 1.0 for each in rows])
