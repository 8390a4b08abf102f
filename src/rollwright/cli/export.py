"""`rollwright export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwright.cli.output import OK


def export(
    folder: Path, /, *, format: str = "jsonl", output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None
) -> int:
    """Write a run's samples as one file for a trainer: `rollwright export runs/latest --format parquet`.

    Parameters
    ----------
    folder
        The run folder.
    format
        jsonl or parquet.
    output
        The file; default: samples.FORMAT in the run folder.
    """
    from rollwright.export import export_run
    from rollwright.store import RunDir

    run_dir = RunDir(folder)
    run_dir.resolved()
    target = output or folder / f"samples.{format}"
    count = export_run(run_dir, target, format)
    print(f"{count} samples in {target}")
    return OK
