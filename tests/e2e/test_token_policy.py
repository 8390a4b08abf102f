"""What is trained of a run is set in its run file: histories, classes of traffic, and how old weights may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwright.audit import audit_run
from rollwright.export import samples_of
from rollwright.gateway.log import read_turn_log
from support.commandline import QUICKSTART, Rollwright

pytestmark = pytest.mark.pi


def test_tokens_of_old_weights_are_masked_and_the_sample_says_why(rollwright: Rollwright, tmp_path: Path) -> None:
    rollwright.job = QUICKSTART / "scripted.toml"
    script = tmp_path / "updated.toml"
    fault = "[[fault]]\ncall = 3\nkind = 'version'\nafter_tokens = 5\nversion = 'step-2'\n"
    script.write_text((QUICKSTART / "replies.toml").read_text() + fault)
    run = rollwright.run(f"engine.scripted.script={script}", "samples.max_version_lag=0", "gateway.history=append_only")
    (record,), (sample,) = run.records(), samples_of(run)
    turns = read_turn_log(run.rollout(record.rollout).turns).trajectory.turns
    stale = sum(len(turn.sampled) for turn in turns[:2]) + 5
    assert (record.status, sample.excluded) == ("resolved", {"stale_version": stale})
    assert record.trained_tokens == record.sampled_tokens - stale > 0
    assert (sample.accepted_versions, sample.history) == (["step-2"], "append_only")
    assert audit_run(run).violations == []


def test_a_class_of_traffic_that_is_not_to_be_trained_is_context_only(rollwright: Rollwright) -> None:
    rollwright.job = QUICKSTART / "scripted.toml"
    run = rollwright.run("gateway.trained=['subagent']")
    (record,), (sample,) = run.records(), samples_of(run)
    assert (record.status, record.trained_tokens, sample.trainable) == ("resolved", 0, False)
    assert sample.excluded == {"class_not_trained": record.sampled_tokens}
    assert (sample.history, audit_run(run).violations) == ("exact", [])
