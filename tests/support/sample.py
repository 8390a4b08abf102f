"""The folder that `rollwright init` writes."""

from __future__ import annotations

from pathlib import Path

from support.commandline import Rollwright


def sample(folder: Path) -> Rollwright:
    """A fresh one, its `run.toml` as the job. The command line's home is beside it."""
    home = folder / "home"
    home.mkdir(parents=True)
    cli = Rollwright(home=home, job=folder / "sample" / "run.toml")
    cli("init", folder / "sample")
    return cli
