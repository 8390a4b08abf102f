"""What a rollout hands to its trainer, and what it refuses to hand over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollwright.errors import TokensBroken
from rollwright.harnesses import AgentReport
from rollwright.rollout import may_be_our_absence, proved
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.types import Sample
from support.conversation import Session, system, user


@pytest.fixture
def trajectory(tmp_path: Path) -> Trajectory:
    session = Session(TemplateRenderer(tiny_tokenizer(tmp_path)))
    session.turn([system(), user()], "Done.")
    return session.trajectory


@pytest.fixture
def sample(trajectory: Trajectory) -> Sample:
    (sample,) = build_samples(
        trajectory,
        task_id="task",
        group_id="group",
        rollout_id="rollout",
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
    )
    return sample


def test_samples_that_hold_are_counted(trajectory: Trajectory, sample: Sample) -> None:
    report = proved(trajectory, [sample])
    assert report.trained == report.sampled == sum(sample.loss_mask)


def test_samples_that_do_not_hold_are_our_failure_and_reach_no_trainer(trajectory: Trajectory, sample: Sample) -> None:
    asked = [1, *sample.loss_mask[1:]]  # a token of the prompt with loss
    with pytest.raises(TokensBroken, match="trained_not_sampled") as caught:
        proved(trajectory, [replace(sample, loss_mask=asked)])
    assert (caught.value.fault, caught.value.retryable) == ("bug", False)


@pytest.mark.parametrize("reason", ["timeout", "limit: seconds", "limit: failures", "api_error: no answer", "exit 1"])
def test_an_agent_whose_gateway_was_away_is_not_judged_for_giving_up_or_for_its_time(reason: str) -> None:
    """The clock of its budget runs on while no process of ours answers it."""
    assert may_be_our_absence(AgentReport(ok=False, reason=reason))


@pytest.mark.parametrize(
    ("ok", "reason"), [(True, "completed"), (False, "limit: turns"), (False, "limit: sampled_tokens")]
)
def test_what_the_policy_alone_can_use_up_is_judged_even_if_the_gateway_was_away(ok: bool, reason: str) -> None:
    assert not may_be_our_absence(AgentReport(ok=ok, reason=reason))
