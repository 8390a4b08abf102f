"""`rollwright verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import INTERRUPTED, OK, UNGRADED, Json, print_json

if TYPE_CHECKING:
    from rollwright.rescore import Rescored
    from rollwright.store import RunDir
    from rollwright.tokens import Renderer


def verify(
    folder: Path,
    /,
    *overrides: str,
    rescore: Annotated[bool, Parameter(negative=())] = False,
    tolerance: float | None = None,
    limit: int | None = None,
    json: Json = False,
) -> int:
    """Prove that what would be trained is what was sampled.

    From a run's files, without a model or a network. Exit 2 on a violation.

    Parameters
    ----------
    folder
        The run folder.
    overrides
        With --rescore: settings of the run that are other ones now, e.g. `engine.sglang.url=http://other:30000`.
    rescore
        Also have the engine score the sampled tokens again, and compare with the logprobs that are stored.
    tolerance
        With --rescore: a larger difference is a violation. None: it is only told.
    limit
        With --rescore: only so many rollouts.

    Examples
    --------
    rollwright verify runs/latest
    rollwright verify runs/latest --json | jq .trained_tokens
    rollwright verify runs/latest --rescore --tolerance 0.05
    """
    from rollwright.audit import audit_run
    from rollwright.errors import UsageError
    from rollwright.store import RunDir

    if not rescore and (overrides or tolerance is not None or limit is not None):
        raise UsageError("settings, --tolerance and --limit are for --rescore")
    total = audit_run(RunDir(folder))
    again = renderer = None
    if rescore:
        (again, renderer), interrupted = _rescore(RunDir(folder), overrides, limit)
        if interrupted or again is None:
            return INTERRUPTED
        if tolerance is not None and again.max > tolerance:
            total.violations.append(f"logprobs differ by up to {again.max:g}, more than {tolerance:g}")
    if json:
        print_json(
            {
                "rollouts": total.rollouts,
                "sampled_tokens": total.sampled,
                "trained_tokens": total.trained,
                "excluded": dict(total.excluded),
                "drift": dict(total.drift),
                "violations": total.violations,
            }
            | ({} if again is None else {"rescore": _as_json(again)})
        )
        return UNGRADED if total.violations else OK
    for violation in total.violations[:50]:
        print(violation)
    print(f"{len(total.violations)} violations in {total.rollouts} graded rollouts")
    why = "; not trained: " + ", ".join(f"{n} {reason}" for reason, n in sorted(total.excluded.items()))
    print(f"{total.trained_share:.1%} of {total.sampled} sampled tokens are trained" + (why if total.excluded else ""))
    if total.drift:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(total.drift.items()))
        print(f"turns that could not just go on: {causes}")
    if again is not None and renderer is not None:
        _print_rescored(again, renderer)
    return UNGRADED if total.violations else OK


def _rescore(
    run: RunDir, overrides: tuple[str, ...], limit: int | None
) -> tuple[tuple[Rescored | None, Renderer], bool]:
    """On the run's own engine, as it is now."""
    from rollwright.config import RunConfig, overridden
    from rollwright.rescore import rescore_run
    from rollwright.run import make_engine, make_renderer, same_tokens

    data = run.resolved()["config"]
    base = Path(data.pop("base"))
    config = RunConfig.resolve(overridden(data, overrides), base=base, where=str(run.path / "resolved.json"))
    renderer = make_renderer(config)

    async def go() -> Rescored:
        async with make_engine(config, renderer) as engine:
            await engine.check()
            same_tokens(renderer, engine)
            return await rescore_run(run, engine, limit=limit)

    again, interrupted = until_interrupted(go)
    return (again, renderer), interrupted


def _as_json(again: Rescored) -> dict[str, Any]:
    return {
        "compared_tokens": again.compared,
        "max": again.max,
        "mean": again.mean,
        "not_compared": dict(again.skipped),
        "worst": again.worst,
    }


def _print_rescored(again: Rescored, renderer: Renderer) -> None:
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(again.skipped.items()))
    print(
        f"{again.compared} tokens scored again: logprobs differ by {again.max:.2g} at most, {again.mean:.2g} on average"
        + (f"; not compared: {skipped}" if skipped else "")
    )
    for worst in again.worst[:5]:
        if worst.size:
            print(
                f"  {worst.rollout} turn {worst.turn} token {worst.token} {renderer.decode([worst.id])!r}: "
                f"stored {worst.stored:.4f}, scored {worst.scored:.4f}"
            )
