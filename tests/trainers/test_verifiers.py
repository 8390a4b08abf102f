"""verifiers' own `Trace` takes our message graph, and its branches are our samples. verifiers needs Python 3.12."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollwright.gateway.log import read_turn_log
from rollwright.integrations.prime_rl import trace
from rollwright.integrations.record import StoredRollout
from rollwright.store import RunDir

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


def traces(need: Need, run: RunDir, calc: list[StoredRollout]) -> list[Any]:
    model = need("verifiers.v1.trace").Trace
    logs = [read_turn_log(run.rollout(each.record.rollout).turns) for each in calc]
    return [model.model_validate(trace(each, logged)) for each, logged in zip(calc, logs, strict=True)]


def test_each_branch_is_a_sample(need: Need, run: RunDir, calc: list[StoredRollout]) -> None:
    for made, rollout in zip(traces(need, run, calc), calc, strict=True):
        branches = {tuple(branch.token_ids): branch for branch in made.branches}
        for sample in rollout.samples:
            branch = branches[tuple(sample.tokens)]
            assert branch.trainable
            assert branch.sampled_mask == [bool(bit) for bit in sample.loss_mask]
            assert branch.logprobs == sample.logprobs.tolist()


def test_the_lost_rollout_is_an_error_and_the_others_have_their_reward(
    need: Need, run: RunDir, calc: list[StoredRollout]
) -> None:
    made = traces(need, run, calc)
    assert [each.has_error for each in made] == [False, False, True, False, False]
    assert [each.reward for each in made if not each.has_error] == [1.0, 0.0, 0.5, 0.0]
    assert made[2].rewards == {"rollwright": None}
