"""Which groups of a run may be trained: enough of them was judged, and what was not judged is in no number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError, StoreError
from rollwright.export import samples_of
from rollwright.integrations.record import StoredRollout, baselined, group_advantages, stored_groups
from rollwright.integrations.source import stored_attempts
from rollwright.quorum import group_rows, group_table, quorum_of
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.testing.scripted_executor import plain_task
from rollwright.types import Failure, Sample, Stage

LOST = Failure(stage=Stage.GRADED, error="SandboxGone", message="gone", fault="infra", retryable=True)


def record(name: str, reward: float | None, **more: Any) -> RolloutRecord:
    task, attempt = name.rsplit(".", 1)
    return RolloutRecord(
        rollout=name,
        task=task,
        task_id="t",
        attempt=int(attempt),
        status="ungraded" if reward is None else "resolved",
        reward=reward,
        trainable=reward is not None,
        counts_in_baseline=reward is not None,
        failure=LOST if reward is None else None,
        **more,
    )


@pytest.mark.parametrize(
    ("setting", "attempts", "needed"),
    [(2, 8, 2), (2, 1, 1), (9, 8, 8), (1, 8, 1), (0.5, 8, 4), (0.5, 7, 4), (0.01, 8, 1), (0.99, 8, 8)],
)
def test_a_quorum_is_a_number_or_a_share_and_never_more_than_the_group(
    setting: float, attempts: int, needed: int
) -> None:
    assert quorum_of(setting, attempts) == needed


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=9), st.integers(1, 9))
def test_the_statistics_of_a_group_are_those_of_its_graded_rollouts(rewards: list[float | None], quorum: int) -> None:
    (row,) = group_rows([record(f"a.{n}", reward, quorum=quorum) for n, reward in enumerate(rewards)])
    graded = [reward for reward in rewards if reward is not None]
    assert (row.rollouts, row.counted) == (len(rewards), len(graded))
    assert row.trainable == (len(graded) >= max(quorum, min(2, len(rewards))))
    assert bool(row.reason) != row.trainable
    if graded:
        assert row.mean == pytest.approx(fmean(graded))
    if len(graded) > 1:
        assert row.deviation == pytest.approx(stdev(graded), abs=1e-9)


def test_a_task_of_two_epochs_is_two_groups() -> None:
    rows = group_rows([record("a.1", 1.0), record("a.2", 0.0, epoch=2)])
    assert [(row.group, row.task, row.status) for row in rows] == [
        ("a", "a", "below_quorum"),
        ("a@2", "a", "below_quorum"),
    ]


def sample(name: str, reward: float) -> Sample:
    return Sample(
        task_id="t", group_id=name.rsplit(".", 1)[0], rollout_id=name, segment_index=0, n_segments=1, role="main",
        tokens=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -0.5], versions=[], prompt_length=1, reward=reward,
        weight=1.0, trainable=True, counts_in_baseline=True,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = {"run": {"attempts": 4}, "grading": {"group_quorum": 0.5}}
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={"config": config})
    for name, reward in {"a.1": 1.0, "a.2": 0.0, "a.3": None, "b.1": 1.0, "b.2": None, "b.3": None}.items():
        writer.store(record(name, reward), writer.begin(name), [] if reward is None else [sample(name, reward)])
    writer.close()
    return writer.run


def test_samples_of_a_group_below_its_quorum_are_given_and_not_trained(run: RunDir) -> None:
    assert [(row.group, row.status, row.reason) for row in group_table(run)] == [
        ("a", "ok", ""),
        ("b", "below_quorum", "1 of 3 rollouts count, 2 must"),
    ]
    assert [(s.rollout_id, s.trainable, s.reward) for s in samples_of(run)] == [
        ("a.1", True, 1.0),
        ("a.2", True, 0.0),
        ("b.1", False, 1.0),
    ]
    assert all(s.trainable for s in run.samples("b.1")), "what is stored does not depend on rollouts that may yet come"


@given(
    st.lists(st.none() | st.sampled_from([0.0, 1.0]), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.integers(1, 7), st.sampled_from([0.25, 0.5, 0.99])),
    st.integers(1, 6),
)
def test_every_reader_of_a_folder_says_what_the_live_group_said(
    tmp_path_factory: pytest.TempPathFactory,
    rewards: list[float | None],
    own: int | None,
    setting: float,
    attempts: int,
) -> None:
    """`own`: the records' quorum; None: they are of a time before there was one. A group is larger than `run.attempts`
    where a trainer asked for more."""
    config = {"run": {"attempts": attempts}, "grading": {"group_quorum": setting}}
    path = tmp_path_factory.mktemp("run") / "run"
    writer = RunWriter.create(path, run_file=b"", resolved={"config": config})
    quorum = quorum_of(setting, attempts) if own is None else own
    group: list[StoredRollout] = []
    for n, reward in enumerate(rewards):
        samples = [] if reward is None else [sample(f"a.{n}", reward)]
        group.append(StoredRollout(record=record(f"a.{n}", reward, quorum=quorum), samples=samples))
        writer.store(group[-1].record, writer.begin(f"a.{n}"), samples)
    writer.close()
    run = writer.run
    if own is None:
        lines = [orjson.loads(line) for line in run.index.read_bytes().splitlines()]
        lines = [{key: value for key, value in line.items() if key != "quorum"} for line in lines]
        run.index.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    said = group_advantages(group)
    assert said.status == group_rows(each.record for each in group)[0].status
    (row,), (stored,) = group_table(run), stored_groups(run)
    assert (row.status, row.quorum) == (said.status, max(quorum, min(2, len(group))))
    assert group_advantages(stored) == said
    assert group_advantages(stored_attempts(run, {"a": plain_task("a")}, ())) == said
    trained = said.counted if said.status != "below_quorum" else 0
    assert sum(each.trainable for each in samples_of(run)) == trained
    assert len(baselined(stored)) == len(baselined(group)) == trained


def test_a_line_without_a_quorum_keeps_the_one_it_was_read_with_when_it_is_withdrawn(run: RunDir) -> None:
    lines = [orjson.loads(line) for line in run.index.read_bytes().splitlines()]
    for line in lines:
        del line["quorum"]
    run.index.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    resolved = run.resolved()
    resolved["config"]["grading"]["group_quorum"] = 3
    run.resolved_file.write_bytes(orjson.dumps(resolved))
    writer = RunWriter.reopen(run.path)
    assert [each.quorum for each in writer.withdraw(["a.1"], LOST)] == [3]
    writer.close()
    assert {each.quorum for each in run.records()} == {3}


def test_a_withdrawn_verdict_leaves_no_sample_and_stays_beside_the_new_one(run: RunDir) -> None:
    writer = RunWriter.reopen(run.path)
    folder = run.rollout("a.1")
    folder.write_json(folder.verdict, {"schema": 1, "graded": {}})
    failure = replace(LOST, error="ImageQuarantined")
    writer.withdraw(["a.1", "a.3"], failure)
    writer.close()
    first, _, third, *_ = run.records()
    assert (first.status, first.reward, first.trainable, first.failure) == ("ungraded", None, False, failure)
    assert third.failure == LOST, "what was ungraded keeps its own reason"
    assert run.samples("a.1") == []
    assert (folder.path / "verdict.1.json").exists()
    assert [s.rollout_id for s in samples_of(run)] == ["a.2", "b.1"]
    assert not any(s.trainable for s in samples_of(run))


def test_a_rollout_that_another_one_was_made_in_place_of_is_in_no_group(run: RunDir) -> None:
    writer = RunWriter.reopen(run.path)
    failure = Failure(stage=Stage.STORED, error="RolloutSuperseded", message="old", fault="trainer", retryable=False)
    changed = writer.withdraw(["a.1", "a.3", "b.9"], failure)
    assert writer.withdraw(["a.1", "a.3"], failure) == [], "it is done once"
    writer.close()
    assert [record.status for record in changed] == ["superseded"] * 2
    first, _, third, *_ = run.records()
    assert (first.superseded, first.failure) == (True, failure)
    assert (third.superseded, third.failure) == (True, LOST), "what was ungraded keeps its own reason"
    assert [(row.group, row.rollouts, row.counted) for row in group_table(run)] == [("a", 1, 1), ("b", 3, 1)]
    assert [[each.record.rollout for each in group] for group in stored_groups(run)] == [["a.2"], ["b.1", "b.2", "b.3"]]
    assert [s.rollout_id for s in samples_of(run)] == ["a.2", "b.1"]


def test_the_order_of_weights_is_kept(run: RunDir) -> None:
    assert run.versions() == []
    writer = RunWriter.reopen(run.path)
    writer.store_versions(["v0", "v1"])
    writer.store_versions(["v0", "v1", "v2"])
    writer.close()
    assert run.versions() == ["v0", "v1", "v2"]
    run.weights_file.write_text("{}")
    with pytest.raises(StoreError, match=r"weights\.json"):
        run.versions()


def test_a_run_folder_that_was_never_finished_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for folder in ("rollouts", "work", "logs"):
        (path / folder).mkdir(parents=True)
    (path / "resolved.json.new").write_text("{")
    RunWriter.create(path, run_file=b"", resolved={}).close()
    assert RunDir(path).resolved() == {"schema": 1}
    with pytest.raises(ConfigError, match="exists"):
        RunWriter.create(path, run_file=b"", resolved={})
