"""Numbers to MLflow, a server or a folder. The one door to its package."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from rollwright.errors import ConfigError
from rollwright.store import RunDir
from rollwright.telemetry.metrics import Tracker

__all__ = ["Mlflow"]


class Mlflow(Tracker):
    """`tracking_uri`: a server or a store (without it MLflow's own environment decides); `experiment`: made where it is
    not there; the run's name is the run folder's. Raises `ConfigError` without the extra."""

    what = "MLflow"

    def __init__(self, *, run: RunDir, tracking_uri: str | None = None, experiment: str = "rollwright") -> None:
        try:
            module = importlib.import_module("mlflow")
        except ImportError as error:
            raise ConfigError(
                f"telemetry mlflow needs the extra: pip install 'rollwright[mlflow]' ({error})",
                field="telemetry.kinds",
            ) from error
        self._entities = importlib.import_module("mlflow.entities")
        self._run = run
        self._experiment = experiment
        try:
            # A client of our own: the package's functions share one state in the whole process.
            self._client: Any = module.MlflowClient(tracking_uri=tracking_uri)
        except Exception as error:  # its errors for an address it does not take have no common base
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"telemetry.mlflow.tracking_uri {tracking_uri!r}: {said}", field="telemetry.mlflow.tracking_uri"
            ) from error
        self._id = ""

    def begin(self) -> None:
        super().begin()
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        opened = self._client.create_run(experiment, run_name=self._run.path.name)
        self._id = opened.info.run_id
        for name, value in _flat(self._run.resolved()["config"]):
            self._client.log_param(self._id, name, str(value)[:500])

    def log(self, values: Mapping[str, float], *, step: int) -> None:

        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self) -> None:
        if self._id:
            self._client.set_terminated(self._id)


def _flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            found += _flat(value, f"{above}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            found.append((f"{above}{name}", value))
    return found
