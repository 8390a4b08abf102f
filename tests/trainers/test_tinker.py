"""tinker's own `Datum` and tinker-cookbook's own `trajectory_to_data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollwright.integrations.record import StoredRollout, group_advantages
from rollwright.integrations.tinker import data, trajectory_group

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


def numbers(datum: Any) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in datum.loss_fn_inputs.items()}


def test_a_datum_holds_what_the_sample_says(need: Need, calc: list[StoredRollout]) -> None:
    need("tinker")
    samples = [sample for rollout in calc for sample in rollout.samples]
    found = data(calc, group_advantages(calc))
    for datum, sample in zip(found, samples, strict=True):
        assert datum.model_input.length == len(sample.tokens) - 1
        assert type(datum.model_input).model_validate(datum.model_input.model_dump()) == datum.model_input
        values = numbers(datum)
        assert datum.model_input.to_ints() + values["target_tokens"][-1:] == sample.tokens.tolist()
        assert {len(each) for each in values.values()} == {datum.model_input.length}


def test_the_cookbooks_own_conversion_comes_to_the_same(need: Need, calc: list[StoredRollout]) -> None:
    processing = need("tinker_cookbook.rl.data_processing")
    group = trajectory_group(calc)
    assert group.get_total_rewards() == [1.0, 0.0, 0.5, 0.0]
    assert [(error.error_type, error.error_message) for error in group.rollout_errors] == [
        ("SandboxGone", "the box died")
    ]
    (theirs,) = processing.compute_advantages([group])
    ours = group_advantages(calc, estimator="dr_grpo")
    assert theirs.tolist() == pytest.approx([ours.advantages[f"calc.{n}"] for n in (1, 2, 4, 5)])
    made, _ = processing.assemble_training_data([group], [theirs], include_provenance=False)
    whole = data(calc, ours)
    assert len(made) == len(whole)
    for their, our in zip(made, whole, strict=True):
        length = their.model_input.length  # theirs ends with the last sampled token, as ours do here
        assert our.model_input.to_ints()[:length] == their.model_input.to_ints()
        for name, values in numbers(their).items():
            assert np.allclose(values, numbers(our)[name][:length], atol=1e-6), name


def test_below_the_quorum_there_is_no_group(need: Need, calc: list[StoredRollout]) -> None:
    need("tinker_cookbook.rl.types")
    assert trajectory_group([calc[0], calc[2]]) is None
