"""An orchestrator that is killed while agents run: the next one goes on with them, and repeats nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rollwright.store import RunDir
from support.commandline import QUICKSTART, Rollwright

SETTINGS = (
    "run.limit=1",
    "run.attempts=3",
    "run.concurrency=4",
    "engine.kind=scripted",
    f"engine.scripted.script={QUICKSTART / 'replies.toml'}",
    "engine.scripted.seconds_per_turn=1.0",
    "run.name=r",
)


def turns_of(log: Path) -> int:
    try:
        return log.read_bytes().count(b'"turn"')
    except FileNotFoundError:
        return 0


def whole_lines(log: bytes) -> bytes:
    """Without what a killed process had not written to the end."""
    return log[: log.rfind(b"\n") + 1]


@pytest.mark.parametrize("harness", ["pi", "claude-code"])
def test_agents_that_run_are_gone_on_with(
    rollwright: Rollwright, until: Callable[[Callable[[], bool], str], None], harness: str
) -> None:
    survive = "sandbox.namespaces.survive=60"
    settings = (f"run.output={rollwright.home}", f"harness.kind={harness}", survive, *SETTINGS)
    process = rollwright.start("run", rollwright.job, *settings)
    run = RunDir(rollwright.home / "r")

    def in_flight() -> list[Path]:
        return [path for path in run.work.glob("*/turns.log") if turns_of(path) >= 1] if run.work.exists() else []

    until(lambda: len(in_flight()) >= 2, "agents with a turn behind them")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {path.parent.name: whole_lines(path.read_bytes()) for path in in_flight()}
    boxes = {box["id"] for box in rollwright.boxes()}
    assert boxes, "they live on"

    rollwright("resume", run.path)
    records = {record.rollout: record for record in run.records()}
    assert len(records) == 3
    assert {(record.status, record.tries) for record in records.values()} == {("resolved", 1)}
    went_on = [name for name, log in before.items() if run.rollout(name).turns.read_bytes().startswith(log)]
    assert went_on, "a log goes on where it was"
    assert all(records[name].trained_tokens == records[name].sampled_tokens for name in went_on)
    assert "0 violations" in rollwright("verify", run.path).stdout
    assert rollwright.boxes() == []


def test_boxes_that_nobody_comes_for_end_by_themselves(
    rollwright: Rollwright, until: Callable[[Callable[[], bool], str], None]
) -> None:
    settings = (f"run.output={rollwright.home}", "sandbox.namespaces.survive=2", *SETTINGS)
    process = rollwright.start("run", rollwright.job, *settings)
    until(lambda: len(rollwright.boxes()) >= 1, "a box")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not any(box["alive"] for box in rollwright.boxes()), "the end of the boxes")
    rollwright("resume", rollwright.home / "r")
    assert len(RunDir(rollwright.home / "r").records()) == 3
    assert rollwright.boxes() == []
