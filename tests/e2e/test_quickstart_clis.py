"""Each CLI solves a task of the quickstart, one setting of the run file changed, and `verify` passes the run."""

from __future__ import annotations

import pytest

from rollwright.audit import audit_run
from rollwright.export import samples_of
from support.clis import EACH_CLI, Cli
from support.commandline import QUICKSTART, Rollwright


@pytest.mark.parametrize("cli", EACH_CLI)
def test_a_cli_solves_a_task_and_all_that_was_sampled_is_trained(rollwright: Rollwright, cli: Cli) -> None:
    rollwright.job = QUICKSTART / "scripted.toml"
    run = rollwright.run(f"harness.kind={cli.harness.name}")
    (record,) = run.records()
    assert (record.status, record.reward, record.tries) == ("resolved", 1.0, 1), record
    assert (record.turns, record.branches, record.stop_reason) == (4, 1, "completed")
    assert "7 passed" in run.rollout(record.rollout).turns.read_text(), "the policy saw its own tests pass"
    (sample,) = samples_of(run)
    assert (sample.role, sample.turns, sample.excluded) == ("main", [0, 1, 2, 3], {})
    assert sum(sample.loss_mask) == record.sampled_tokens == record.trained_tokens > 0
    assert audit_run(run).violations == []
