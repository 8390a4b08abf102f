"""The `rollwright` command as tests call it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from rollwright.store import RolloutRecord, RunDir

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"


@dataclass
class Rollwright:
    """The command line, with a home of its own and the bundles of the machine."""

    home: Path
    job: Path = QUICKSTART / "run.toml"
    settings: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"XDG_STATE_HOME": str(self.home / "state"), "PYTHONUNBUFFERED": "1"}

    def __call__(self, *args: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.argv(*args), capture_output=True, text=True, env=self.env, check=False, timeout=110)
        if code is not None:
            assert done.returncode == code, f"{args} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done

    def argv(self, *args: str | Path) -> list[str]:
        return [sys.executable, "-m", "rollwright.cli", *map(str, args)]

    def start(self, *args: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.argv(*args), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def run(self, *settings: str, code: int | None = 0) -> RunDir:
        """A whole run of the quickstart's run file; its folder."""
        name = f"run.name=run{len(list(self.home.glob('run*')))}"
        self("run", self.job, f"run.output={self.home}", name, *self.settings, *settings, code=code)
        return RunDir(self.home / name.removeprefix("run.name="))

    def boxes(self) -> list[dict[str, object]]:
        return orjson.loads(self("sandbox", "ls", "--json").stdout)


def graded(run: RunDir) -> dict[str, RolloutRecord]:
    return {record.rollout: record for record in run.records() if record.graded}
