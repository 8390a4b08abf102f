"""`rollwright regrade`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import INTERRUPTED, OK, UNGRADED, Json, print_json, say


def regrade(
    folder: Path,
    /,
    *,
    rerun: Annotated[bool, Parameter(negative=())] = False,
    write: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Judge a run's stored test runs again.

    Exit 2 when a rollout could not be.

    Parameters
    ----------
    folder
        The run folder.
    rerun
        Run the tests again, in new sandboxes, from the stored patches.
    write
        Write changed verdicts back, into the samples too; the old verdicts are kept beside them.

    Examples
    --------
    rollwright regrade runs/latest              # what would change
    rollwright regrade runs/latest --write
    rollwright regrade runs/latest --rerun      # in new sandboxes, from the stored patches
    """
    from rollwright.cli.places import places
    from rollwright.regrade import regrade_run

    found, interrupted = until_interrupted(
        lambda: regrade_run(folder.resolve(), places(), rerun=rerun, write=write, say=say)
    )
    if interrupted or found is None:
        return INTERRUPTED
    changed = sum(each.changed for each in found)
    problems = [each for each in found if each.problem]
    if json:
        print_json([each.to_json() for each in found])
    else:
        for each in problems:
            print(f"{each.rollout}: {each.problem}")
        print(f"{len(found)} rollouts judged again: {changed} changed, {len(problems)} could not be")
    return UNGRADED if problems else OK
