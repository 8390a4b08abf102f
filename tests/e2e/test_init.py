"""What `rollwright init` writes runs as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import orjson
import pytest

from rollwright.store import RunDir
from support.commandline import Rollwright
from support.sample import sample

pytestmark = [pytest.mark.pi]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Rollwright:
    return sample(tmp_path_factory.mktemp("init"))


def test_a_fresh_sample_runs_validates_and_verifies(fresh: Rollwright) -> None:
    folder = fresh.job.parent
    argv = fresh.argv("run", "run.toml", "--json")
    done = subprocess.run(argv, cwd=folder, env=fresh.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = orjson.loads(done.stdout)
    assert (said["statuses"], said["mean_reward"]) == ({"resolved": 2}, 1.0)
    run = RunDir(Path(said["run"]))
    assert run.path.parent == folder / "runs"
    assert run.path.name.startswith("sample-")
    assert "name=${1:-world}" in run.rollout("greet.1").patch.read_text()
    assert fresh("verify", run.path).stdout.startswith("0 violations in 2")
    proved = orjson.loads(fresh("validate", fresh.job, "--json").stdout)
    assert [(row["task"], row["gold"], row["noop"]) for row in proved] == [("greet", "resolved", "unresolved")]


def test_nothing_that_is_there_is_overwritten(fresh: Rollwright, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("mine")
    said = fresh("init", tmp_path, code=1).stderr
    assert f"{tmp_path / 'run.toml'} is already there" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert (tmp_path / "run.toml").read_text() == "mine"


def test_it_says_what_to_type_next_and_that_works(fresh: Rollwright, tmp_path: Path) -> None:
    argv = fresh.argv("init")
    done = subprocess.run(argv, cwd=tmp_path, env=fresh.env, capture_output=True, text=True, check=False)
    command = next(line for line in done.stdout.splitlines() if line.startswith("next: rollwright "))
    words = command.removeprefix("next: rollwright ").split()
    then = subprocess.run(fresh.argv(*words), cwd=tmp_path, env=fresh.env, capture_output=True, text=True, check=False)
    assert then.returncode == 0, then.stdout
