"""`rollwright resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwright.cli.output import Json


def resume(
    folder: Path,
    /,
    *,
    ungraded: Annotated[bool, Parameter(negative=())] = False,
    concurrency: Annotated[int | None, Parameter(name=["--concurrency", "-j"])] = None,
    json: Json = False,
) -> int:
    """Finish what a run still owes.

    What was stored is not run again.

    Parameters
    ----------
    folder
        The run folder.
    ungraded
        Run the rollouts again that ended without a verdict.
    concurrency
        Rollouts at a time, if not as before.

    Examples
    --------
    rollwright resume runs/latest
    rollwright resume runs/latest --ungraded    # also what failed by our doing
    """
    from rollwright.cli.places import places
    from rollwright.cli.rollouts import execute_run
    from rollwright.config import RunConfig
    from rollwright.run import prepare, same_run
    from rollwright.store import RunDir, RunWriter

    resolved = RunDir(folder).resolved()
    data = resolved["config"]
    if concurrency is not None:
        data["run"]["concurrency"] = concurrency
    config = RunConfig.resolve(data, base=Path(data.pop("base")), where=str(folder / "resolved.json"))
    prepared = prepare(config, places())
    same_run(prepared, resolved, folder)
    folder = folder.resolve()

    def reopen() -> RunWriter:
        writer = RunWriter.reopen(folder)
        if ungraded:
            failed = {record.rollout for record in writer.run.records() if record.status == "ungraded"}
            writer.drop(failed)
        return writer

    return execute_run(prepared, folder, reopen, as_json=json)
