"""Stored runs judged again: what changed is said, what is written is consistent, what was stays beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config import RunConfig
from rollwright.errors import StoreError
from rollwright.graders import RawRun
from rollwright.graders.command import Command
from rollwright.graders.grading import Grading, judge_run
from rollwright.graders.patch import Patch
from rollwright.regrade import Regraded, regrade_run
from rollwright.run import Places
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.types import SCHEMA, Failure, Sample, Stage, Task

META = {
    "image": "host",
    "workdir": "/w",
    "problem_statement": "p",
    "instance_id": "calc",
    "protocol": "command",
    "command": "true",
    "report": {"format": "tap", "path": "-"},
}
PASSED, FAILED = b"1..1\nok 1 - a\n", b"1..1\nnot ok 1 - a\n"


def raw(log: bytes, exit_code: int = 0) -> RawRun:
    return RawRun(state="exited", exit_code=exit_code, log=log, reports={}, seconds=1.0, nonce="0" * 32)


def sample(reward: float, mask: list[int]) -> Sample:
    return Sample(
        task_id="t", group_id="calc", rollout_id="calc.1", segment_index=0, n_segments=1, role="main",
        tokens=[1, 2], loss_mask=mask, logprobs=[0.0, -0.5 * mask[1]], versions=[], prompt_length=1, reward=reward,
        weight=1.0, trainable=bool(sum(mask)), counts_in_baseline=True,
    )  # fmt: skip


class Run:
    """A run folder with the rollouts a test asks for."""

    def __init__(self, folder: Path) -> None:
        (folder / "tasks.jsonl").write_text(json.dumps({"metadata": META}))
        data = {"tasks": {"path": "tasks.jsonl"}, "policy": {"path": "p"}}
        config = RunConfig.resolve(data, base=folder, where="t")
        self.path = folder / "run"
        self.writer = RunWriter.create(self.path, run_file=b"", resolved={"config": config.dump()})
        self.task: Task = Command().parse({"metadata": META}, where="t")

    def store(self, name: str, log: bytes | None, *, stored: bytes | None = None, exit_code: int = 0) -> None:
        """A rollout whose verdict was made from `stored`, and whose log is now `log`. None: it has no verdict."""
        folder = self.writer.begin(name)
        failure = None
        verdict = None
        if log is None:
            failure = Failure(stage=Stage.BOOTED, error="E", message="m", fault="infra", retryable=False)
            folder.write_json(folder.verdict, {"schema": SCHEMA, "ungraded": asdict(failure)})
        else:
            verdict = judge_run(Command(), self.task, raw(stored or log, exit_code))
            folder.write_json(folder.verdict, {"schema": SCHEMA, "graded": asdict(verdict)})
            folder.write_json(
                folder.grade_record, {"schema": SCHEMA, **Grading(verdict=verdict, raw=raw(log)).record()}
            )
            folder.write(folder.grade_log, log)
        record = RolloutRecord(
            rollout=name,
            task="calc",
            task_id=self.task.id,
            attempt=1,
            status="ungraded" if verdict is None else str(verdict.status),
            reward=None if verdict is None else verdict.reward,
            trainable=verdict is not None,
            counts_in_baseline=verdict is not None,
            failure=failure,
        )
        samples = [] if verdict is None else [sample(verdict.reward, [0, 1]), sample(verdict.reward, [0, 0])]
        self.writer.store(record, folder, samples)

    def regrade(self, **options: Any) -> tuple[list[Regraded], list[str]]:
        said: list[str] = []
        places = Places(cache=self.path / "cache", state=self.path / "state")

        async def go() -> list[Regraded]:
            return await regrade_run(self.path, places, say=said.append, **options)

        return anyio.run(go), said


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_only_what_changed_is_said_and_nothing_is_written(run: Run) -> None:
    run.store("calc.1", PASSED)
    run.store("calc.2", PASSED, stored=FAILED, exit_code=1)
    run.store("calc.3", None)
    run.writer.close()
    before = contents(run.path)
    done, said = run.regrade()
    assert [each.changed for each in done] == [False, True, False]
    assert said == ["calc.2: unresolved 0 → resolved 1", "calc.3: has no stored test run"]
    assert contents(run.path) == before


def test_written_verdicts_reach_the_index_and_the_samples(run: Run) -> None:
    run.store("calc.1", PASSED)
    run.store("calc.2", PASSED, stored=FAILED, exit_code=1)
    run.writer.close()
    old = (run.path / "rollouts" / "calc.2" / "verdict.json").read_bytes()
    assert run.regrade(write=True)[1][-1] == "wrote 1 verdicts"
    stored = RunDir(run.path)
    record = stored.records()[1]
    assert (record.status, record.reward, record.trainable) == ("resolved", 1.0, True)
    assert [s.reward for s in stored.samples("calc.2")] == [1.0, 1.0]
    assert [s.trainable for s in stored.samples("calc.2")] == [True, False]
    folder = stored.rollout("calc.2").path
    assert (folder / "verdict.1.json").read_bytes() == old
    assert not (stored.rollout("calc.1").path / "verdict.1.json").exists()
    assert [each.changed for each in run.regrade()[0]] == [False, False]


def test_a_revision_that_was_interrupted_is_done_again(run: Run) -> None:
    """Its index and samples are new, its verdict.json is not: the state in which a kill leaves it at the latest."""
    run.store("calc.1", PASSED, stored=FAILED, exit_code=1)
    run.writer.close()
    verdict = run.path / "rollouts" / "calc.1" / "verdict.json"
    old = verdict.read_bytes()
    run.regrade(write=True)
    verdict.write_bytes(old)
    assert run.regrade(write=True)[1][-1] == "wrote 1 verdicts"
    assert RunDir(run.path).records()[0].reward == 1.0
    assert sorted(p.name for p in verdict.parent.glob("verdict*")) == ["verdict.1.json", "verdict.json"]


def test_a_task_that_changed_is_not_judged(run: Run, tmp_path: Path) -> None:
    run.store("calc.1", PASSED)
    run.writer.close()
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"metadata": META | {"command": "false"}}))
    assert run.regrade()[1] == ["calc.1: its task has changed since"]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"metadata": META | {"instance_id": "other"}}))
    assert run.regrade()[1] == ["calc.1: its task is no longer in the data set"]


def test_a_lost_log_is_an_error_and_not_an_empty_one(run: Run) -> None:
    run.store("calc.1", PASSED)
    run.writer.close()
    (run.path / "rollouts" / "calc.1" / "grade.log").unlink()
    with pytest.raises(StoreError, match=r"grade\.log cannot be read"):
        run.regrade()


def test_a_patch_that_decided_without_a_run_keeps_its_verdict_when_run_again(run: Run) -> None:
    run.store("calc.1", FAILED, exit_code=1)
    folder = RunDir(run.path).rollout("calc.1")
    folder.write(folder.patch, b"")
    folder.write_json(folder.patch_record, {"schema": SCHEMA, **Patch.nothing("0" * 40).record()})
    run.store("calc.2", PASSED)
    run.writer.close()
    done, said = run.regrade(rerun=True, write=True)
    assert done[0].after is not None
    assert done[0].after.status == "empty_patch"
    assert done[1].problem == "has no stored patch"
    assert RunDir(run.path).records()[0].status == "empty_patch"
    assert said[-1] == "wrote 1 verdicts"


@given(st.binary(max_size=50), st.none() | st.binary(max_size=50), st.none() | st.integers(0, 255), st.text(max_size=9))
def test_a_raw_run_comes_back_as_it_was(log: bytes, report: bytes | None, exit_code: int | None, path: str) -> None:
    before = replace(raw(log), reports={"r": report}, exit_code=exit_code, dropped_paths=(path,), flaky=(path,))
    record = orjson.loads(orjson.dumps(before.record()))
    assert RawRun.restore(record, log) == before


@pytest.mark.parametrize("broken", [{}, {"state": "exited"}, raw(b"").record() | {"reports": {"r": "%"}}])
def test_a_broken_record_is_an_error(broken: dict[str, Any]) -> None:
    with pytest.raises(StoreError):
        RawRun.restore(broken, b"")
