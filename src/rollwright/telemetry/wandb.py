"""Numbers to Weights & Biases. The one door to its package."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from rollwright.errors import ConfigError
from rollwright.store import RunDir
from rollwright.telemetry.metrics import Tracker

__all__ = ["Wandb"]


class Wandb(Tracker):
    """`project`, `entity`: as there; the run's name is the run folder's. `mode`: `offline` keeps it in the run folder,
    for `wandb sync`. Raises `ConfigError` without the package."""

    what = "Weights & Biases"

    def __init__(
        self,
        *,
        run: RunDir,
        project: str = "rollwright",
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"telemetry wandb needs its package: pip install wandb ({error})", field="telemetry.kinds"
            ) from error
        self._run = run
        self._options: dict[str, Any] = {"project": project, "entity": entity, "mode": mode}
        self._open: Any = None

    def begin(self) -> None:
        super().begin()
        self._open = self._wandb.init(
            name=self._run.path.name,
            dir=str(self._run.logs),
            config=self._run.resolved()["config"],
            settings={"console": "off"},  # the terminal is ours
            **self._options,
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._open.log(dict(values), step=step)

    def end(self) -> None:
        if self._open is not None:
            self._open.finish()
