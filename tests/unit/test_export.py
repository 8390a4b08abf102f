"""The files a trainer reads: everything a sample says, in both formats."""

from __future__ import annotations

from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollwright.export import export_run
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.types import SCHEMA, Sample, VersionSpan

SAMPLE = Sample(
    task_id="t1",
    group_id="a",
    rollout_id="a.1",
    segment_index=0,
    n_segments=1,
    role="main",
    tokens=[5, 6, 7, 8],
    loss_mask=[0, 0, 1, 0],
    logprobs=[0.0, 0.0, -0.123456789012345, 0.0],
    versions=[VersionSpan("3", 2, 3), VersionSpan("2", 3, 4)],
    prompt_length=2,
    reward=0.5,
    weight=1.0,
    trainable=True,
    counts_in_baseline=True,
    excluded={"stale_version": 1},
    turns=[0, 2],
    history="append_only",
    accepted_versions=["3"],
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={"config": {}})
    record = RolloutRecord(
        rollout="a.1",
        task="a",
        task_id="t1",
        attempt=1,
        status="resolved",
        reward=0.5,
        trainable=True,
        counts_in_baseline=True,
    )
    writer.store(record, writer.begin("a.1"), [SAMPLE])
    writer.close()
    return writer.run


def rows(run: RunDir, format: str) -> list[dict[str, Any]]:
    target = run.path / f"all.{format}"
    assert export_run(run, target, format) == 1
    if format == "jsonl":
        return [orjson.loads(line) for line in target.read_bytes().splitlines()]
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    return [row | {"excluded": orjson.loads(row["excluded"])} for row in parquet.read_table(target).to_pylist()]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_no_field_of_a_sample_is_left_out(run: RunDir, format: str) -> None:
    (row,) = rows(run, format)
    for field in fields(Sample):
        wanted = getattr(SAMPLE, field.name)
        wanted = wanted.tolist() if isinstance(wanted, array) else wanted
        if field.name == "versions":
            wanted = ["", "", "3", "2"]
        assert row[field.name] == wanted, field.name
    assert row["schema"] == SCHEMA
    assert set(row) == {field.name for field in fields(Sample)} | {"schema"}
