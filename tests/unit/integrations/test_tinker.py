"""Tinker: shifted by one, advantages ours, and each trained token in exactly one datum."""

from __future__ import annotations

import numpy as np
import pytest

from rollwright.integrations.record import StoredRollout, group_advantages
from rollwright.integrations.tinker import datum_fields, transitions


def test_inputs_and_targets_are_the_sample_shifted_by_one(calc: list[StoredRollout]) -> None:
    advantages = group_advantages(calc)
    samples = [sample for rollout in calc for sample in rollout.samples]
    found = list(datum_fields(calc, advantages))
    assert len(found) == len(samples)
    for (tokens, inputs), sample in zip(found, samples, strict=True):
        whole = sample.tokens.tolist()
        assert (tokens, inputs["target_tokens"].tolist()) == (whole[:-1], whole[1:])
        assert inputs["mask"].tolist() == sample.loss_mask[1:].tolist()
        assert np.allclose(inputs["logprobs"], sample.logprobs[1:], atol=1e-6)
        expected = np.array(sample.loss_mask[1:]) * advantages.advantages[sample.rollout_id]
        assert np.allclose(inputs["advantages"], expected)
        assert {name: values.dtype.name for name, values in inputs.items()} == {
            "target_tokens": "int64",
            "logprobs": "float32",
            "advantages": "float32",
            "mask": "float32",
        }


def test_lost_and_silent_rollouts_have_no_datum(calc: list[StoredRollout]) -> None:
    assert list(datum_fields(calc[2:3] + calc[4:], group_advantages(calc))) == []


def test_rollouts_can_count_once_each(calc: list[StoredRollout]) -> None:
    advantages = group_advantages(calc)
    found = list(datum_fields(calc, advantages, each="rollout"))
    sums = [float(inputs["advantages"].sum()) for _, inputs in found]
    per_rollout = [sums[0], sum(sums[1:4]), sums[4]]
    assert per_rollout == pytest.approx([advantages.advantages[f"calc.{n}"] for n in (1, 2, 4)], rel=1e-5)


def test_actions_are_the_trained_tokens_after_what_came_before(calc: list[StoredRollout]) -> None:
    (sample,) = calc[0].samples
    moves = list(transitions([sample]))
    assert len(moves) == 2
    for (observation, action, logprobs), (start, end) in zip(moves, sample.trained_spans(), strict=True):
        assert observation + action == sample.tokens[:end].tolist()
        assert logprobs == sample.logprobs[start:end].tolist()
    first, second = moves
    assert second[0][: len(first[0]) + len(first[1])] == first[0] + first[1]
