"""prime-rl and verifiers: full length, no split, and a message graph whose paths are the token sequences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.integrations.prime_rl import trace, training_samples
from rollwright.integrations.prime_rl import traces as traces_of
from rollwright.integrations.record import StoredRollout, group_advantages, stored_groups
from support.rollouts import stored_run


def test_all_arrays_have_the_length_of_the_tokens(calc: list[StoredRollout]) -> None:
    advantages = group_advantages(calc)
    found = list(training_samples(calc, advantages, env_name="swe"))
    samples = [sample for rollout in calc for sample in rollout.samples]
    for fields, sample in zip(found, samples, strict=True):
        length = len(sample.tokens)
        assert {len(fields[n]) for n in ("token_ids", "mask", "logprobs", "temperatures", "advantages")} == {length}
        assert fields["token_ids"] == sample.tokens.tolist()
        assert fields["mask"] == [bool(bit) for bit in sample.loss_mask]
        assert all(type(bit) is bool for bit in fields["mask"])
        assert fields["logprobs"] == sample.logprobs.tolist()
        value = advantages.advantages[sample.rollout_id]
        assert fields["advantages"] == [value if bit else 0.0 for bit in sample.loss_mask]
        assert "rl_weights" not in fields


def test_weights_let_each_rollout_count_once(calc: list[StoredRollout]) -> None:
    found = list(training_samples(calc, group_advantages(calc), env_name="swe", each="rollout"))
    sums = [math.fsum(fields["rl_weights"]) for fields in found]
    tokens = sum(sum(fields["mask"]) for fields in found)
    assert [sums[0], math.fsum(sums[1:4]), sums[4]] == pytest.approx([tokens / 3] * 3)


@pytest.fixture
def traces(tmp_path: Path) -> list[dict[str, Any]]:
    run = stored_run(tmp_path)
    (group,) = stored_groups(run)
    return [trace(each, read_turn_log(run.rollout(each.record.rollout).turns)) for each in group]


def paths(nodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    parents = {node["parent"] for node in nodes}
    found: list[list[dict[str, Any]]] = []
    for leaf in range(len(nodes)):
        if leaf not in parents:
            line: list[dict[str, Any]] = []
            at: int | None = leaf
            while at is not None:
                line.insert(0, nodes[at])
                at = nodes[at]["parent"]
            found.append(line)
    return found


def test_each_path_of_the_graph_is_a_samples_tokens(traces: list[dict[str, Any]], calc: list[StoredRollout]) -> None:
    for found, rollout in zip(traces, calc, strict=True):
        lines = [[t for node in line for t in node.get("token_ids", [])] for line in paths(found["nodes"])]
        for sample in rollout.samples:
            assert sample.tokens.tolist() in lines


def test_masks_and_logprobs_are_those_of_the_samples(traces: list[dict[str, Any]], calc: list[StoredRollout]) -> None:
    for found, rollout in zip(traces, calc, strict=True):
        trained = sum(sum(node.get("mask", [])) for node in found["nodes"])
        assert trained == sum(sum(sample.loss_mask) for sample in rollout.samples)
        for node in found["nodes"]:
            assert len(node.get("token_ids", [])) == len(node.get("mask", []))
            assert len(node.get("logprobs", [])) == sum(node.get("mask", []))
        logprobs = sorted(value for node in found["nodes"] for value in node.get("logprobs", []))
        assert logprobs == sorted(value for sample in rollout.samples for value in sample.logprobs if value)


def test_a_lost_rollout_is_an_errored_trace_without_a_reward(traces: list[dict[str, Any]]) -> None:
    assert [each["ok"] for each in traces] == [True, True, False, True, True]
    assert traces[2]["rewards"] == {"rollwright": None}
    assert traces[2]["errors"] == [{"type": "SandboxGone", "message": "the box died"}]
    assert traces[0]["rewards"] == {"rollwright": {"score": 1.0, "weight": 1.0}}


def test_traces_of_a_group_below_its_quorum_are_errors(calc: list[StoredRollout], logs: list[LoggedTrajectory]) -> None:
    found = traces_of(calc, logs, quorum=5)
    assert [each["ok"] for each in found] == [False] * 5
    assert [each["errors"][0]["type"] for each in found] == [*["BelowQuorum"] * 2, "SandboxGone", *["BelowQuorum"] * 2]
    assert not any(any(node.get("mask", [])) for each in found for node in each["nodes"])


def test_tools_stand_at_the_roots(traces: list[dict[str, Any]]) -> None:
    for found in traces:
        for node in found["nodes"]:
            assert ("tools" in node) == (node["parent"] is None)
