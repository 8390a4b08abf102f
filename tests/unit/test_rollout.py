"""What a rollout hands to its trainer, and what it refuses to hand over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollwright.errors import TokensBroken
from rollwright.rollout import proved
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
