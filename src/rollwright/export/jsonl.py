"""All samples of a run as JSON lines, every per-token list in full."""

from __future__ import annotations

from pathlib import Path

import orjson

from rollwright.export import replacing, row, samples_of
from rollwright.store import RunDir

__all__ = ["JsonLines"]


class JsonLines:
    name = "samples.jsonl"
    unit = "samples"

    def write(self, run: RunDir, target: Path) -> int:
        count = 0
        with replacing(target) as path, path.open("wb") as file:
            for sample in samples_of(run):
                file.write(orjson.dumps(row(sample)) + b"\n")
                count += 1
        return count
