"""A tracker that writes what it hears into the run folder, for tests and for writing trackers of your own."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from rollwright.store import RunDir
from rollwright.telemetry.metrics import Tracker

__all__ = ["Recorder"]


class Recorder(Tracker):
    """`logs/telemetry.jsonl`: a line for `begin`, for each `log`, and for `end`. `fail_at`: the step at which its
    system, as it were, goes away."""

    what = "the recorder"

    def __init__(self, *, run: RunDir, fail_at: int | None = None) -> None:
        self.path = run.logs / "telemetry.jsonl"
        self._fail_at = fail_at

    def begin(self) -> None:
        super().begin()
        self._line({"begin": True})

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if step == self._fail_at:
            raise ConnectionError("the recorder fails, as it was asked to")
        self._line({"step": step, **values})

    def end(self) -> None:
        self._line({"end": True})

    def _line(self, value: Mapping[str, object]) -> None:
        with self.path.open("ab") as file:
            file.write(orjson.dumps(value) + b"\n")
