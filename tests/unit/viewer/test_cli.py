"""`rollwright view` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from rollwright.store import RunDir

ARGV = [sys.executable, "-m", "rollwright.cli", "view"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def viewing(built: RunDir, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*ARGV, built.path], env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


def test_it_prints_an_address_that_works_until_ctrl_c(viewing: subprocess.Popen[str], tmp_path: Path) -> None:
    assert viewing.stdout is not None
    url = viewing.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:")
    assert httpx2.get(f"{url}runs/run/").status_code == 200
    assert len(list((tmp_path / "cache" / "rollwright" / "viewer").glob("*.sqlite"))) == 1
    viewing.send_signal(signal.SIGINT)
    rest, said = viewing.communicate(timeout=30)
    assert (viewing.returncode, rest) == (0, "")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["nowhere"], "nowhere is not a run folder"), (["--bundle", "."], "runs is not a run folder")],
)
def test_a_mistake_is_one_line(environment: dict[str, str], tmp_path: Path, arguments: list[str], told: str) -> None:
    done = subprocess.run(
        [*ARGV, *arguments], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"rollwright: {told}")
    assert len(done.stderr.splitlines()) == 1
