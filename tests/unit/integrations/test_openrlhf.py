"""OpenRLHF: one result per place of the group, and a mean that a lost rollout leaves alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rollwright.errors import InfraError
from rollwright.integrations.openrlhf import responses
from rollwright.integrations.record import StoredRollout


def made(group: list[StoredRollout]) -> list[dict[str, Any]]:
    return responses(group, prompt="Fix it.", label="calc")


def test_every_place_of_the_group_is_filled_in_order(calc: list[StoredRollout]) -> None:
    found = made(calc)
    assert [each["extra_logs"]["ungraded"] for each in found] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert {(each["prompt"], each["label"]) for each in found} == {("Fix it.", "calc")}


def test_action_ranges_and_logprobs_are_over_all_tokens(calc: list[StoredRollout]) -> None:
    (sample,) = calc[0].samples
    found = made(calc)[0]
    assert found["observation_tokens"] == sample.tokens.tolist()
    assert found["rollout_log_probs"] == sample.logprobs.tolist()
    mask = [0] * len(sample.tokens)
    for start, end in found["action_ranges"]:
        mask[start:end] = [1] * (end - start)
    assert mask == sample.loss_mask.tolist()


def test_a_lost_rollout_leaves_the_mean_and_trains_nothing(calc: list[StoredRollout]) -> None:
    found = made(calc)
    rewards = [each["reward"] for each in found]
    graded = [each.record.reward for each in calc if each.record.reward is not None]
    assert math.fsum(rewards) / 5 == math.fsum(graded) / 4
    assert found[2]["action_ranges"] == []
    assert not any(found[2]["rollout_log_probs"])


def test_a_group_below_the_quorum_trains_nothing_and_keeps_its_rewards(calc: list[StoredRollout]) -> None:
    found = made([calc[0], calc[2]])
    assert [each["action_ranges"] for each in found] == [[], []]
    assert [each["reward"] for each in found] == [each["scores"] for each in found] == [1.0, 1.0]
    assert [each["extra_logs"]["ungraded"] for each in found] == [0.0, 1.0]
    assert [each["extra_logs"]["below_quorum"] for each in found] == [1.0, 0.0]


def test_a_group_of_which_nothing_was_graded_has_no_reward_of_its_own(calc: list[StoredRollout]) -> None:
    with pytest.raises(InfraError, match="none of 2 rollouts was graded"):
        made([calc[2], calc[2]])
    found = responses([calc[2], calc[2]], prompt="", label="", neutral=0.25)
    assert [each["reward"] for each in found] == [0.25, 0.25]
    assert all(math.isnan(each["scores"]) for each in found), "OpenRLHF's dynamic filtering filters NaN out"
    assert [each["extra_logs"]["ungraded"] for each in found] == [1.0, 1.0]


def test_a_single_rollout_has_no_quorum_to_reach(calc: list[StoredRollout]) -> None:
    one = replace(calc[0], record=replace(calc[0].record, quorum=1))
    (found,) = made([one])
    assert (found["reward"], bool(found["action_ranges"])) == (1.0, True)


def test_what_a_fan_out_loses_is_counted(calc: list[StoredRollout]) -> None:
    counts = [sum(sample.loss_mask) for sample in calc[1].samples]
    found = made(calc)[1]
    assert found["extra_logs"]["dropped_tokens"] == sum(counts) - max(counts)
    assert sum(end - start for start, end in found["action_ranges"]) == max(counts)


def test_a_turn_that_ran_out_is_told(calc: list[StoredRollout]) -> None:
    assert [each["truncated"] for each in made(calc)] == [False, False, False, True, False]
