"""`rollwright validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import INTERRUPTED, OK, UNGRADED, Json, print_json, say
from rollwright.errors import ConfigError


def validate(
    job: Path,
    /,
    *overrides: str,
    gold_runs: int = 1,
    lock: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Prove that each task can be solved, and can be failed.

    Its gold patch must resolve it, and no patch must not. Exit 2 when a task is unusable.

    Parameters
    ----------
    job
        The run file that names the data set and the sandboxes.
    overrides
        Settings as dotted names.
    gold_runs
        How often each gold patch is graded; 3 shows most flakes.
    lock
        Write what was proved into the lockfile beside the data set.

    Examples
    --------
    rollwright validate run.toml
    rollwright validate run.toml --gold-runs 3 --lock
    """
    from rollwright.cli.places import places
    from rollwright.config import RunConfig
    from rollwright.validate import validate_run

    if gold_runs < 1:
        raise ConfigError(f"--gold-runs is {gold_runs}; at least one run shows anything")
    config = RunConfig.load(job, overrides)
    rows, interrupted = until_interrupted(
        lambda: validate_run(config, places(), say=say, gold_runs=gold_runs, lock=lock)
    )
    if interrupted or rows is None:
        return INTERRUPTED
    if json:
        print_json([row.to_json() for row in rows])
    else:
        width = max(len(row.task) for row in rows)
        print(f"{'task':{width}}  gold         no patch     seconds")
        for row in rows:
            print(f"{row.task:{width}}  {row.gold:11}  {row.noop:11}  {row.seconds:7.1f}  {row.problem}")
        print(f"{sum(row.usable for row in rows)} of {len(rows)} tasks are usable")
    return OK if all(row.usable for row in rows) else UNGRADED
