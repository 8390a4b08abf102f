"""The quickstart as a person has it, and a wait for what other processes do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commandline import QUICKSTART, ROOT, Rollwright


@pytest.fixture(scope="session")
def images() -> Path:
    """The quickstart's images; made once, kept in the checkout's cache."""
    made = subprocess.run([sys.executable, QUICKSTART / "prepare.py"], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"the quickstart's images cannot be built here: {made.stderr.strip().splitlines()[-1]}")
    return ROOT / ".cache" / "quickstart" / "images"


@pytest.fixture
def rollwright(tmp_path: Path, images: Path) -> Iterator[Rollwright]:
    cli = Rollwright(home=tmp_path)
    yield cli
    for process in cli.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    """Wait for something another process does; fail with what it was when it does not come."""

    def wait(true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, f"{what} did not come within 60 s"
            signal.sigtimedwait([], 0.02)

    return wait
