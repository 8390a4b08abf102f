"""Numbers to trackio, which keeps them on this machine unless told otherwise. The one door to its package."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from typing import Any

from rollwright.errors import ConfigError
from rollwright.store import RunDir
from rollwright.telemetry.metrics import Tracker

__all__ = ["Trackio"]


class Trackio(Tracker):
    """`project`: the tracker's project; the run's name is the run folder's. `space_id`: a Hugging Face Space to send
    to. Raises `ConfigError` without the extra."""

    what = "trackio"

    def __init__(self, *, run: RunDir, project: str = "rollwright", space_id: str | None = None) -> None:
        try:
            self._trackio = importlib.import_module("trackio")
        except ImportError as error:
            raise ConfigError(
                f"telemetry trackio needs the extra: pip install 'rollwright[trackio]' ({error})",
                field="telemetry.kinds",
            ) from error
        self._run = run
        self._project = project
        self._space_id = space_id
        self._open: Any = None

    def begin(self) -> None:
        super().begin()
        config = self._run.resolved()["config"]
        # An open run of this name goes on, as after `rollwright resume`.
        with contextlib.redirect_stdout(sys.stderr):  # it prints, and stdout is for results
            self._open = self._trackio.init(
                project=self._project,
                name=self._run.path.name,
                space_id=self._space_id,
                config=config,
                resume="allow",
                embed=False,
            )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._open.log(dict(values), step=step)

    def end(self) -> None:
        if self._open is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._open.finish()
