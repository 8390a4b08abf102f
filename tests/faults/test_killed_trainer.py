"""A trainer's process is killed anywhere on its way: no reader and no later process finds a group that is not one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HELPER = Path(__file__).parents[1] / "support" / "killed_trainer.py"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder where syncing costs nothing: what a kill leaves does not depend on it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.soak)])
def test_superseding_a_group_survives_a_kill_at_any_touch_of_the_disk(
    memory: Path, step: int, request: pytest.FixtureRequest
) -> None:
    if step == 1 and "soak" not in request.config.getoption("markexpr"):
        pytest.skip("opt-in: pytest -m soak")
    ended = subprocess.run(
        [sys.executable, HELPER, memory, "1", str(step)], capture_output=True, check=False, text=True
    )
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert any(line["found"].get("with_samples") for line in lines), "some were killed while they took verdicts back"
    for line in lines:
        at, found, end = f"{line['kill_at']} {line['where']}", line["found"], line["end"]
        assert all(size <= 2 for size in found["members"].values()), at
        assert found["without_samples"] == [], f"{at}: graded, and nothing to train"
        assert end["members"] == {"a": 2, "b": 2, "c": 2}, at
        assert sorted(line["delivered"]) == ["a", "b", "c"], at
        assert all(size <= 2 for size in end["exported"].values()), at
        for wrong in ("without_samples", "with_samples", "graded_by_file", "left"):
            assert end[wrong] == [], f"{at}: {wrong}"
