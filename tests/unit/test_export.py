"""The files a trainer reads: everything a sample says, in both formats."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollwright.errors import ConfigError
from rollwright.export import Exported, export_run
from rollwright.gateway.log import read_turn_log
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.types import SCHEMA, Sample, VersionSpan
from support.rollouts import stored_run

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
        quorum=1,
    )
    writer.store(record, writer.begin("a.1"), [SAMPLE])
    writer.close()
    return writer.run


def rows(run: RunDir, format: str) -> list[dict[str, Any]]:
    target = run.path / f"all.{format}"
    assert export_run(run, format, target) == Exported(path=target, count=1, unit="samples")
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


def test_a_format_has_its_own_file_in_the_run_folder(run: RunDir) -> None:
    assert export_run(run, "jsonl") == Exported(path=run.path / "samples.jsonl", count=1, unit="samples")
    assert len((run.path / "samples.jsonl").read_bytes().splitlines()) == 1


def test_an_unknown_format_names_the_known_ones(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"format is one of atif, jsonl, parquet, preds, not 'csv'"):
        export_run(run, "csv")


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        export_run(RunDir(tmp_path), "jsonl")


# ------------------------------------------------------------------ predictions


def test_predictions_are_one_patch_per_instance_and_attempt(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    lost = run.rollout("calc.3").patch
    lost.unlink()
    latin = b"+caf\xe9\n"
    run.rollout("calc.2").patch.write_bytes(latin)
    assert export_run(run, "preds").count == 4
    first = orjson.loads((run.path / "preds.json").read_bytes())
    assert first == {
        "org__calc-1": {
            "instance_id": "org__calc-1",
            "model_name_or_path": "rollwright-tiny",
            "model_patch": "diff of calc.1\n",
        }
    }
    second = json.loads((run.path / "preds.2.json").read_text())["org__calc-1"]["model_patch"]
    assert second.encode("utf-8", "surrogateescape") == latin
    assert [path.name for path in sorted(run.path.glob("preds*"))] == [
        "preds.2.json",
        "preds.4.json",
        "preds.5.json",
        "preds.json",
    ]


# ------------------------------------------------------------------ trajectories


def trajectories(folder: Path) -> dict[str, dict[str, Any]]:
    run = stored_run(folder)
    assert export_run(run, "atif", folder / "out").count == 4
    return {path.stem: orjson.loads(path.read_bytes()) for path in (folder / "out").iterdir()}


def test_a_trajectory_has_each_message_reply_and_observation(tmp_path: Path) -> None:
    found = trajectories(tmp_path)
    assert set(found) == {"calc.1", "calc.2", "calc.3", "calc.4"}  # calc.5 asked nothing
    steps = found["calc.1"]["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    (call,) = steps[2]["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("bash", {"command": "ls"})
    assert steps[2]["observation"]["results"] == [{"source_call_id": call["tool_call_id"], "content": "a.py"}]
    assert found["calc.1"]["extra"]["reward"] == 1.0
    assert found["calc.3"]["extra"]["failure"] == {"error": "SandboxGone", "message": "the box died"}


def test_a_trajectory_has_every_token(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "again")
    for name, found in trajectories(tmp_path).items():
        turns = {turn.index: turn for turn in read_turn_log(run.rollout(name).turns).trajectory.turns}
        for branch in [found, *found.get("subagent_trajectories", [])]:
            ids: list[int] = []
            for step in branch["steps"]:
                if step.get("llm_call_count") == 1:
                    metrics, turn = step["metrics"], turns[step["extra"]["turn"]]
                    ids += metrics["extra"]["prompt_delta_token_ids"]
                    assert metrics["prompt_tokens"] == len(ids)
                    ids += metrics["completion_token_ids"]
                    assert metrics["completion_token_ids"] == turn.sampled.tolist()
                    assert metrics["logprobs"] == turn.logprobs.tolist()


def test_branches_beside_the_main_one_are_told_apart(tmp_path: Path) -> None:
    found = trajectories(tmp_path)["calc.2"]
    assert found["agent"]["extra"]["role"] == "main"
    assert [step["message"] for step in found["steps"] if step["source"] == "agent"] == ["Done."]
    others = found["subagent_trajectories"]
    assert {other["trajectory_id"] for other in others} == {"calc.2.1", "calc.2.2"}
    assert {other["agent"]["extra"]["role"] for other in others} == {"main", "subagent"}


def test_an_old_folder_of_trajectories_is_replaced(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    (run.path / "trajectories").mkdir()
    (run.path / "trajectories" / "old.json").write_text("{}")
    export_run(run, "atif")
    assert sorted(path.stem for path in (run.path / "trajectories").iterdir()) == [
        "calc.1",
        "calc.2",
        "calc.3",
        "calc.4",
    ]
