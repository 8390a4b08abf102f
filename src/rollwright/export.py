"""Writes a run's samples as one file for a trainer: JSONL, or Parquet with the `parquet` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from rollwright.errors import ConfigError, StoreError
from rollwright.quorum import group_table
from rollwright.store import RunDir
from rollwright.types import SCHEMA, Sample


def export_run(run: RunDir, target: Path, format: str) -> int:
    """Write all samples of graded rollouts to `target`. Returns how many.

    Raises `ConfigError` for an unknown format or a missing extra, `StoreError` when reading or writing fails.
    """
    if format not in FORMATS:
        raise ConfigError(f"format is one of {', '.join(sorted(FORMATS))}, not {format!r}", field="format")
    temporary = target.with_name(target.name + ".new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        count = FORMATS[format](samples_of(run), temporary)
        temporary.rename(target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror or error}") from error
    return count


def samples_of(run: RunDir) -> Iterator[Sample]:
    """Every sample of every graded rollout, in stored order. Those of a group below its quorum are not trainable;
    `group_table` says why."""
    out = {row.group for row in group_table(run) if not row.trainable}
    for record in run.records():
        if record.graded:
            for sample in run.samples(record.rollout):
                yield replace(sample, trainable=False) if sample.group_id in out else sample


def row(sample: Sample) -> dict[str, Any]:
    """A sample as plain values: all per-token lists in full, versions one string per token (`""` where untrained)."""
    versions = [""] * len(sample.tokens)
    for span in sample.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return {"schema": SCHEMA, **sample.to_json(), "versions": versions, "excluded": dict(sample.excluded)}


def _jsonl(samples: Iterator[Sample], target: Path) -> int:
    count = 0
    with target.open("wb") as file:
        for sample in samples:
            file.write(orjson.dumps(row(sample)) + b"\n")
            count += 1
    return count


def _parquet(samples: Iterator[Sample], target: Path) -> int:
    try:
        import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ConfigError("Parquet needs the extra: pip install 'rollwright[parquet]'", field="format") from error
    arrow: Any = pa
    schema: Any = arrow.schema(
        [
            ("schema", arrow.int16()),
            *(
                (name, arrow.string())
                for name in ("task_id", "group_id", "rollout_id", "role", "logprob_kind", "history")
            ),
            *((name, arrow.int32()) for name in ("segment_index", "n_segments", "prompt_length")),
            ("turns", arrow.list_(arrow.int32())),
            ("accepted_versions", arrow.list_(arrow.string())),
            ("tokens", arrow.list_(arrow.int32())),
            ("loss_mask", arrow.list_(arrow.int8())),
            ("logprobs", arrow.list_(arrow.float64())),
            ("versions", arrow.list_(arrow.dictionary(arrow.int32(), arrow.string()))),
            *((name, arrow.float64()) for name in ("reward", "weight", "temperature")),
            *((name, arrow.bool_()) for name in ("trainable", "counts_in_baseline", "truncated", "ill_formed")),
            ("excluded", arrow.string()),
        ]
    )
    count = 0
    writer: Any
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for sample in samples:
            data = row(sample) | {"excluded": orjson.dumps(dict(sample.excluded)).decode()}
            writer.write_table(arrow.Table.from_pylist([data], schema=schema))
            count += 1
    return count


FORMATS: Mapping[str, Callable[[Iterator[Sample], Path], int]] = {"jsonl": _jsonl, "parquet": _parquet}
