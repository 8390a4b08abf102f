"""verl: the shape of `AgentLoopOutput` (verl 0.9.1), and who is in a session."""

from __future__ import annotations

import pytest

from rollwright.errors import UsageError
from rollwright.integrations.record import StoredRollout
from rollwright.integrations.verl import output_fields

FIELDS = {
    "prompt_ids",
    "response_ids",
    "response_mask",
    "response_logprobs",
    "reward_score",
    "num_turns",
    "extra_fields",
}


def test_each_sample_is_an_output_with_prompt_and_response(calc: list[StoredRollout]) -> None:
    found = output_fields(calc[1])
    assert len(found) == 3
    for fields, sample in zip(found, calc[1].samples, strict=True):
        assert set(fields) == FIELDS
        assert fields["prompt_ids"] + fields["response_ids"] == sample.tokens.tolist()
        assert fields["response_mask"] == sample.loss_mask[sample.prompt_length :].tolist()
        assert fields["response_logprobs"] == sample.logprobs[sample.prompt_length :].tolist()
        assert fields["response_mask"][0] in (0, 1)
        assert fields["reward_score"] == 0.0


def test_the_last_output_can_carry_the_advantage(calc: list[StoredRollout]) -> None:
    """verl reads it at the first trained token of the session's last output."""
    for rollout in (calc[0], calc[1], calc[3]):
        assert 1 in output_fields(rollout)[-1]["response_mask"]


def test_a_lost_rollout_is_a_missing_session(calc: list[StoredRollout]) -> None:
    assert output_fields(calc[2]) == []


def test_what_counts_and_trains_nothing_is_in_the_baseline_without_loss(calc: list[StoredRollout]) -> None:
    (fields,) = output_fields(calc[4], filler=9)
    assert (fields["prompt_ids"], fields["response_ids"], fields["response_mask"]) == ([9], [9], [0])
    assert fields["reward_score"] == 0.0
    assert fields["extra_fields"]["min_global_steps"] is None


def test_steps_are_the_oldest_and_newest_of_each_row(calc: list[StoredRollout]) -> None:
    (untold,) = output_fields(calc[0])
    assert untold["extra_fields"]["min_global_steps"] is None
    (fields,) = output_fields(calc[0], step_of=int)
    assert (fields["extra_fields"]["min_global_steps"], fields["extra_fields"]["max_global_steps"]) == (7, 8)
    assert fields["extra_fields"]["reward_extra_info"] == {}
    with pytest.raises(UsageError, match="no trainer step"):
        output_fields(calc[0], step_of=lambda version: int("step-" + version))
