"""A run as files for others: samples for a trainer, predictions for a referee, trajectories for a viewer."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rollwright import plugins
from rollwright.errors import ConfigError, StoreError
from rollwright.quorum import group_table
from rollwright.store import RunDir
from rollwright.types import SCHEMA, Sample

__all__ = ["Exported", "Exporter", "export_run", "replacing", "row", "samples_of"]


class Exporter(Protocol):
    """One format. Registered in the entry-point group `rollwright.exporters`; made without arguments."""

    name: str
    """Of the file or folder it makes, in the run folder, when no other is asked for."""
    unit: str
    """What it counts, in the plural."""

    def write(self, run: RunDir, target: Path) -> int:
        """Write the whole run to `target` and return how many units. An old `target` is replaced when all is written.

        Raises `ConfigError` for a missing extra, `StoreError` when reading fails, `OSError` when writing does.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    count: int
    unit: str


def export_run(run: RunDir, format: str, target: Path | None = None) -> Exported:
    """Write a run in a registered format, or in that of a `module:Class`.

    Raises `ConfigError` for what is no run folder, an unknown format or a missing extra, `StoreError` when reading or
    writing fails.
    """
    run.resolved()
    known = plugins.names("exporters")
    if format not in known and ":" not in format:
        raise ConfigError(f"format is one of {', '.join(known)}, not {format!r}", field="format")
    exporter: Exporter = plugins.find("exporters", format)()
    path = target or run.path / exporter.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = exporter.write(run, path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return Exported(path=path, count=count, unit=exporter.unit)


@contextmanager
def replacing(target: Path) -> Generator[Path]:
    """A file beside `target` to write to; it takes its place at the end."""
    temporary = target.with_name(target.name + ".new")
    yield temporary
    temporary.rename(target)


def samples_of(run: RunDir) -> Iterator[Sample]:
    """Every sample of every graded rollout, in stored order. Those of a group below its quorum are not trainable;
    `group_table` says why."""
    out = {row.group for row in group_table(run) if not row.trainable}
    for record in run.records():
        if record.graded:
            for sample in run.samples(record.rollout):
                yield replace(sample, trainable=False) if sample.group_id in out else sample


def row(sample: Sample) -> dict[str, Any]:
    """A sample as plain values: all per-token lists in full, versions one string per token (`""` where not sampled)."""
    versions = [""] * len(sample.tokens)
    for span in sample.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return {"schema": SCHEMA, **sample.to_json(), "versions": versions, "excluded": dict(sample.excluded)}
