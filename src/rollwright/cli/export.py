"""`rollwright export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwright.cli.output import OK, Json, print_json


def export(
    folder: Path,
    /,
    *,
    format: str = "jsonl",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: Json = False,
) -> int:
    """Write a run's samples as one file for a trainer, its patches for a referee, or its trajectories.

    Parameters
    ----------
    folder
        The run folder.
    format
        jsonl or parquet (samples), preds (SWE-bench predictions), atif (Harbor trajectories), or module:Class.
    output
        The file, or the folder of atif; default: in the run folder.

    Examples
    --------
    rollwright export runs/latest
    rollwright export runs/latest --format parquet -o samples.parquet
    """
    from rollwright.cli.output import say
    from rollwright.export import export_run
    from rollwright.quorum import group_table
    from rollwright.store import RunDir

    run_dir = RunDir(folder)
    written = export_run(run_dir, format, output)
    for row in group_table(run_dir):
        if not row.trainable:
            say(f"group {row.group} is not trainable: {row.reason}")
    if json:
        print_json({written.unit: written.count, "file": str(written.path)})
    else:
        print(f"{written.count} {written.unit} in {written.path}")
    return OK
