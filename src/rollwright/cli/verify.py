"""`rollwright verify`."""

from __future__ import annotations

from pathlib import Path

from rollwright.cli.output import OK, UNGRADED, Json, print_json


def verify(folder: Path, /, *, json: Json = False) -> int:
    """Prove that what would be trained is what was sampled.

    From a run's files, without a model or a network. Exit 2 on a violation.

    Parameters
    ----------
    folder
        The run folder.

    Examples
    --------
    rollwright verify runs/latest
    rollwright verify runs/latest --json | jq .trained_tokens
    """
    from rollwright.audit import audit_run
    from rollwright.store import RunDir

    total = audit_run(RunDir(folder))
    if json:
        print_json(
            {
                "rollouts": total.rollouts,
                "sampled_tokens": total.sampled,
                "trained_tokens": total.trained,
                "excluded": dict(total.excluded),
                "violations": total.violations,
            }
        )
        return UNGRADED if total.violations else OK
    for violation in total.violations[:50]:
        print(violation)
    print(f"{len(total.violations)} violations in {total.rollouts} graded rollouts")
    why = "; not trained: " + ", ".join(f"{n} {reason}" for reason, n in sorted(total.excluded.items()))
    print(f"{total.trained_share:.1%} of {total.sampled} sampled tokens are trained" + (why if total.excluded else ""))
    return UNGRADED if total.violations else OK
