"""Predictions as SWE-bench's harness and sb-cli read them: one patch per instance, by the data set's own ids.

Those files hold one prediction per instance, so the first attempts are `preds.json`, the second `preds.2.json`, and so
on. A rollout whose patch was never captured predicts nothing, nor does one that another was made in place of; one that
could not be graded here may be graded there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.export import replacing
from rollwright.store import RunDir

__all__ = ["Predictions"]


class Predictions:
    name = "preds.json"
    unit = "predictions"

    def write(self, run: RunDir, target: Path) -> int:
        model = _model(run.resolved())
        attempts: dict[int, dict[str, dict[str, str]]] = {}
        for record in run.records():
            patch = run.rollout(record.rollout).patch
            if patch.exists() and not record.superseded:
                predictions = attempts.setdefault(record.attempt, {})
                predictions[record.source_id or record.task] = {
                    "instance_id": record.source_id or record.task,
                    "model_name_or_path": model,
                    # Bytes that are no UTF-8 come back from these escapes with the same error handler.
                    "model_patch": patch.read_bytes().decode("utf-8", "surrogateescape"),
                }
        for attempt in sorted({1, *attempts}):
            path = target if attempt == 1 else target.with_name(f"{target.stem}.{attempt}{target.suffix}")
            with replacing(path) as file:
                file.write_text(json.dumps(attempts.get(attempt, {}), indent=1) + "\n", encoding="ascii")
        return sum(len(predictions) for predictions in attempts.values())


def _model(resolved: Mapping[str, Any]) -> str:
    config: Mapping[str, Any] = resolved["config"]
    harness = config.get("harness", {}).get("kind", "rollwright")
    return f"{harness}-{config.get('policy', {}).get('model', 'policy')}"
