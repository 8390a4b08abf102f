"""All samples of a run as one Parquet file, every per-token list in full. Needs the `parquet` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from rollwright.errors import ConfigError
from rollwright.export import replacing, row, samples_of
from rollwright.store import RunDir

__all__ = ["Parquet"]


class Parquet:
    name = "samples.parquet"
    unit = "samples"

    def write(self, run: RunDir, target: Path) -> int:
        with replacing(target) as file:
            return _write(run, file)


def _write(run: RunDir, target: Path) -> int:
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
        for sample in samples_of(run):
            data = row(sample) | {"excluded": orjson.dumps(dict(sample.excluded)).decode()}
            writer.write_table(arrow.Table.from_pylist([data], schema=schema))
            count += 1
    return count
