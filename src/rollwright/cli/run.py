"""`rollwright run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rollwright.cli.output import OK, Json, print_json

if TYPE_CHECKING:
    from rollwright.run import Prepared


def run(
    job: Path,
    /,
    *overrides: str,
    concurrency: Annotated[int | None, Parameter(name=["--concurrency", "-j"])] = None,
    attempts: Annotated[int | None, Parameter(name=["--attempts", "-k"])] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    limit: int | None = None,
    controls: int | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Run every task of a run file.

    Leaves a run folder with training samples. Exit 2 when a rollout ended without a verdict.

    Parameters
    ----------
    job
        The run file.
    overrides
        Settings as dotted names, e.g. `sampling.temperature=0.7`.
    concurrency
        Rollouts at a time (run.concurrency).
    attempts
        Rollouts per task (run.attempts).
    output
        Folder that run folders are made in (run.output).
    limit
        Only the first so many tasks (run.limit).
    controls
        After so many graded rollouts of an image, grade gold and no patch again (grading.controls).
    dry_run
        Check everything that can be checked without starting, print the resolved plan, and stop.

    Examples
    --------
    rollwright run run.toml
    rollwright run run.toml run.attempts=8 sampling.temperature=0.7
    rollwright run run.toml -j 16 --limit 10
    rollwright run run.toml --dry-run      # what would be run, every setting resolved
    """
    from rollwright.cli.places import places
    from rollwright.cli.rollouts import execute_run
    from rollwright.config import RunConfig
    from rollwright.run import prepare
    from rollwright.store import RunDir, RunWriter
    from rollwright.telemetry import listeners_of

    flags = {
        "run.concurrency": concurrency,
        "run.attempts": attempts,
        "run.limit": limit,
        "grading.controls": controls,
    }
    settings = [*overrides, *(f"{name}={value}" for name, value in flags.items() if value is not None)]
    if output is not None:
        settings.append(f"run.output={output.absolute()}")
    config = RunConfig.load(job, settings)
    prepared = prepare(config, places())
    path = config.run.output / (config.run.name or default_name(job))
    if dry_run:
        listeners_of(config, RunDir(path))
        return print_plan(prepared, as_json=json)

    def create() -> RunWriter:
        writer = RunWriter.create(path, run_file=job.read_bytes(), resolved=prepared.resolved())
        point_latest(path)
        return writer

    return execute_run(prepared, path, create, as_json=json)


def print_plan(prepared: Prepared, *, as_json: bool) -> int:
    plans = prepared.plans("dry-run")
    if as_json:
        print_json({**prepared.resolved(), "rollouts": [plan.name for plan in plans]})
        return OK
    config = prepared.config
    print(f"{len(plans)} rollouts: {len(plans) // config.run.attempts} tasks × {config.run.attempts} attempts")
    for name in dict.fromkeys(plan.task_name for plan in plans):
        task = prepared.tasks.tasks[name]
        print(f"  {name}: {task.grader.protocol}, image {task.agent.image}, workdir {task.agent.workdir}")
    print(f"harness {config.harness.kind} · engine {config.engine.kind} · sandbox {config.sandbox.kind}")
    print(f"renderer {prepared.parts.renderer.name} · fingerprint {prepared.parts.renderer.fingerprint}")
    print("settings:")
    print_json(config.dump())
    return OK


def default_name(job: Path) -> str:
    import datetime

    job = job.resolve()
    stem = job.parent.name if job.stem == "run" else job.stem
    return f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def point_latest(path: Path) -> None:
    """`runs/latest` leads to the newest run."""
    link = path.parent / "latest"
    if link.is_symlink() or not link.exists():
        new = link.with_name(f".latest-{os.getpid()}")
        new.symlink_to(path.name)
        new.replace(link)
