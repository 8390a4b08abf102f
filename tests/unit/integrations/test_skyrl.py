"""SkyRL: the rules its own `validate_generator_output` has for a step-wise batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import pytest

from rollwright.errors import InfraError
from rollwright.integrations.record import StoredRollout
from rollwright.integrations.skyrl import generator_output


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


def batch(calc: list[StoredRollout]) -> dict[str, list[object]]:
    return generator_output((TrajectoryID("calc", each.record.attempt), each) for each in calc)


def test_all_columns_are_of_one_length_and_all_rows_line_up(calc: list[StoredRollout]) -> None:
    output = batch(calc)
    columns = [value for value in output.values() if isinstance(value, list)]
    assert {len(column) for column in columns} == {6}
    for response, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        assert len(response) == len(mask) == len(logprobs) > 0


def test_the_rows_of_a_rollout_stand_together_and_its_last_one_says_so(calc: list[StoredRollout]) -> None:
    output = batch(calc)
    pairs = zip(output["trajectory_ids"], output["is_last_step"], strict=True)
    runs = [
        (trajectory.repetition_id, [last for _, last in rows]) for trajectory, rows in groupby(pairs, lambda p: p[0])
    ]
    assert runs == [(1, [True]), (2, [False, False, True]), (4, [True]), (5, [True])]


def test_the_lost_rollout_is_missing_and_counted(calc: list[StoredRollout]) -> None:
    output = batch(calc)
    assert output["rewards"] == [1.0, 0.0, 0.0, 0.0, 0.5, 0.0]
    assert output["rollout_metrics"] == {
        "rollwright/rollouts": 5,
        "rollwright/ungraded": 1,
        "rollwright/below_quorum": 0,
    }


def test_a_lone_survivor_has_no_row(calc: list[StoredRollout]) -> None:
    """SkyRL's own GRPO, as verl's, would take its reward for its advantage."""
    lone = [replace(each, record=replace(each.record, epoch=2)) for each in (calc[0], calc[2])]
    pairs = [(TrajectoryID(each.record.group, each.record.attempt), each) for each in (*lone, *calc)]
    output = generator_output(pairs)
    assert {trajectory.instance_id for trajectory in output["trajectory_ids"]} == {"calc"}
    assert output["rollout_metrics"] == {
        "rollwright/rollouts": 7,
        "rollwright/ungraded": 2,
        "rollwright/below_quorum": 1,
    }
    evaluated = generator_output(pairs, quorum=1)
    assert evaluated["rewards"] == [1.0, *output["rewards"]]


def test_a_turn_that_ran_out_is_told(calc: list[StoredRollout]) -> None:
    assert batch(calc)["stop_reasons"] == ["stop", "stop", "stop", "stop", "length", "stop"]


def test_what_trains_nothing_has_no_loss(calc: list[StoredRollout]) -> None:
    assert [any(mask) for mask in batch(calc)["loss_masks"]] == [True] * 5 + [False]


def test_a_batch_of_lost_rollouts_is_refused(calc: list[StoredRollout]) -> None:
    with pytest.raises(InfraError, match="of 1 rollouts 0 count"):
        batch([calc[2]])
