"""The run folder: what is stored stays, what was in flight is owed, and nothing is stored twice."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollwright.errors import ConfigError, StoreError
from rollwright.store import RolloutDir, RolloutRecord, RunDir, RunWriter
from rollwright.types import Failure, Sample, Stage, VersionSpan


def record(name: str, *, reward: float | None = 1.0) -> RolloutRecord:
    task, attempt = name.rsplit(".", 1)
    failure = None
    if reward is None:
        failure = Failure(stage=Stage.BOOTED, error="SandboxGone", message="gone", fault="infra", retryable=True)
    return RolloutRecord(
        rollout=name,
        task=task,
        task_id="t1",
        attempt=int(attempt),
        status="ungraded" if reward is None else "resolved",
        reward=reward,
        trainable=reward is not None,
        counts_in_baseline=reward is not None,
        failure=failure,
        seconds={"booted": 0.5},
        versions=("0",),
    )


def sample(mask: list[int]) -> Sample:
    return Sample(
        task_id="t1",
        group_id="a",
        rollout_id="a.1",
        segment_index=0,
        n_segments=1,
        role="main",
        tokens=list(range(len(mask))),
        loss_mask=mask,
        logprobs=[-0.5 * bit for bit in mask],
        versions=[VersionSpan("0", 0, len(mask))],
        prompt_length=mask.index(1) if 1 in mask else len(mask),
        reward=1.0,
        weight=1.0,
        trainable=True,
        counts_in_baseline=True,
        excluded={"truncated": 2},
    )


def new_run(path: Path) -> RunWriter:
    return RunWriter.create(path, run_file=b"[tasks]\n", resolved={"config": {}})


def store(writer: RunWriter, name: str, samples: list[Sample] | None = None) -> None:
    folder = writer.begin(name)
    folder.write(folder.patch, b"diff")
    writer.store(record(name), folder, samples or [])


def test_a_stored_rollout_reads_back(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    store(writer, "a.1", [sample([0, 1, 1, 0, 1])])
    writer.close()
    run = RunDir(tmp_path / "run")
    assert run.records() == [record("a.1")]
    assert run.samples("a.1") == [sample([0, 1, 1, 0, 1])]
    assert run.rollout("a.1").patch.read_bytes() == b"diff"


def test_a_failure_reads_back(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    writer.store(record("a.1", reward=None), writer.begin("a.1"), [])
    writer.close()
    assert RunDir(tmp_path / "run").records() == [record("a.1", reward=None)]


said = st.recursive(
    st.none() | st.text(st.characters(), max_size=5) | st.binary(max_size=5) | st.integers() | st.just(Path("/x")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100)
@example(text="\ud83d", detail={"argv": ("sh", b"\xff"), "output": {1: 2**70}})
@given(text=st.text(st.characters(), max_size=8), detail=said)
def test_whatever_a_cli_or_a_test_said_can_be_stored_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, detail: object
) -> None:
    failure = Failure(
        stage=Stage.BOOTED,
        error="E",
        message=text,
        fault="infra",
        retryable=True,
        details={"it": detail},
        evidence=text,
    )
    line = replace(record("a.1", reward=None), stop_reason=text, failure=failure).to_line()
    read = RolloutRecord.from_line(orjson.loads(line))
    assert read.stop_reason == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert read.failure is not None
    folder = RolloutDir(tmp_path_factory.mktemp("said"))
    folder.write_json(folder.verdict, {"tests": [{"id": text}], "details": detail})
    assert orjson.loads(folder.verdict.read_bytes())["tests"] == [{"id": read.stop_reason}]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_any_mask_survives_its_packed_form(tmp_path_factory: pytest.TempPathFactory, mask: list[int]) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    writer = new_run(path)
    store(writer, "a.1", [sample(mask)])
    writer.close()
    assert RunDir(path).samples("a.1") == [sample(mask)]


def test_what_was_in_flight_is_owed_again(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    store(writer, "a.1")
    writer.begin("a.2").write(writer.run.work / "a.2" / "agent.log", b"half")
    (writer.run.rollouts / "a.3").mkdir()  # renamed into place, killed before its line
    writer.close()
    with writer.run.index.open("ab") as index:
        index.write(b'{"schema":1,"rollout":"a.4"')  # killed within its line
    again = RunWriter.reopen(tmp_path / "run")
    assert [r.rollout for r in again.run.records()] == ["a.1"]
    assert sorted(p.name for p in again.run.rollouts.iterdir()) == ["a.1"]
    assert list(again.run.work.iterdir()) == []
    store(again, "a.4")
    again.close()
    assert [r.rollout for r in again.run.records()] == ["a.1", "a.4"]


def test_dropped_rollouts_are_owed_again(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    store(writer, "a.1")
    store(writer, "a.2")
    writer.drop({"a.1"})
    store(writer, "a.3")
    writer.close()
    assert [r.rollout for r in writer.run.records()] == ["a.2", "a.3"]
    assert not (writer.run.rollouts / "a.1").exists()


def test_two_writers_are_refused_also_across_processes(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    code = "import pathlib, sys; from rollwright.store import RunWriter; RunWriter.reopen(pathlib.Path(sys.argv[1]))"
    argv = [sys.executable, "-c", code, str(tmp_path / "run")]
    other = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "is being written by another process" in other.stderr
    writer.close()


def test_a_run_folder_is_never_written_over(tmp_path: Path) -> None:
    new_run(tmp_path / "run").close()
    with pytest.raises(ConfigError, match="rollwright resume"):
        new_run(tmp_path / "run")


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        RunDir(tmp_path).resolved()


def test_damage_inside_the_index_is_an_error_not_a_skip(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    store(writer, "a.1")
    store(writer, "a.2")
    writer.close()
    lines = writer.run.index.read_bytes().splitlines(keepends=True)
    writer.run.index.write_bytes(b"{broken\n" + lines[1])
    with pytest.raises(StoreError, match="line 1 is not JSON"):
        writer.run.records()
    writer.run.index.write_bytes(lines[0].replace(b'"attempt":1', b'"attempt":"x"'))
    with pytest.raises(StoreError, match="attempt"):
        writer.run.records()


def test_a_missing_sample_file_is_an_error(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    store(writer, "a.1")
    writer.close()
    writer.run.rollout("a.1").samples.unlink()
    with pytest.raises(StoreError, match="missing"):
        writer.run.samples("a.1")


def test_a_full_disk_is_a_store_error_and_the_rollout_stays_owed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], check=True)
    try:
        writer = new_run(small / "run")
        folder = writer.begin("a.1")
        with pytest.raises(StoreError, match="No space left"):
            writer.store(record("a.1"), folder, [sample([1] * 100_000)])
        assert writer.run.records() == []
        writer.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_half_a_line_is_taken_back_before_another_rollout_is_stored(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    for name in ("a.1", "a.2", "a.3"):
        store(writer, name)
    lost, kept = writer.begin("a.4"), writer.begin("a.5")
    # The kernel takes 40 bytes of the line, as a disk does that is nearly full.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.run.index.stat().st_size + 40, limits[1]))
    try:
        with pytest.raises(StoreError, match="took 40 of"):
            writer.store(record("a.4"), lost, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    writer.store(record("a.5"), kept, [])
    writer.close()
    again = RunWriter.reopen(tmp_path / "run")
    assert [r.rollout for r in again.run.records()] == ["a.1", "a.2", "a.3", "a.5"]
    assert not (again.run.rollouts / "a.4").exists()
    again.close()


@pytest.mark.parametrize(
    "change",
    [
        {"loss_spans": [[0, 1]]},
        {"loss_spans": [[1, 2], [2, 4]]},
        {"logprobs": [-0.5, -0.5, -0.5]},
        {"tokens": [0, 1]},
    ],
)
def test_spans_that_do_not_fit_are_an_error(tmp_path: Path, change: dict[str, list[object]]) -> None:
    writer = new_run(tmp_path / "run")
    store(writer, "a.1", [sample([0, 1, 1])])
    writer.close()
    path = writer.run.rollout("a.1").samples
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | change) + b"\n")
    with pytest.raises(StoreError, match=r"sample 0 of a\.1: loss_spans do not fit"):
        writer.run.samples("a.1")
