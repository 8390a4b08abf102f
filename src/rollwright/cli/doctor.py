"""`rollwright doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import INTERRUPTED, OK, USAGE, Json, print_json

if TYPE_CHECKING:
    from rollwright.doctor import Finding


def doctor(job: Path | None = None, /, *overrides: str, json: Json = False) -> int:
    """Look whether this machine, and a run file, can run.

    Nothing on the machine is changed: nothing is downloaded, and the boxes it opens are closed. Each check that does
    not pass says what to do. Exit 1 when one failed. With run.executor = "ray" each node of the cluster is looked at,
    too.

    Parameters
    ----------
    job
        A run file: also its tasks, graders, images, policy, engine, tokenizer and harness are looked at.
    overrides
        Settings as dotted names.

    Examples
    --------
    rollwright doctor
    rollwright doctor run.toml
    rollwright doctor run.toml run.concurrency=64 --json
    """
    from rollwright.cli.places import places
    from rollwright.config import RunConfig
    from rollwright.doctor import found, of_error
    from rollwright.doctor.examine import examine, examining, healthy
    from rollwright.errors import ConfigError

    config: RunConfig | None = None
    first: list[Finding] = []
    if job is not None:
        try:
            config = RunConfig.load(job, overrides)
            first = found("run file", "ok", f"{job} is well formed")
        except ConfigError as error:  # the machine can be looked at all the same
            first = [of_error("run file", error, "correct the run file; docs/configuration.md has all settings")]

    async def go() -> list[Finding]:
        environment = os.environ
        async with examining(
            places(),
            config,
            e2b_key=bool(environment.get("E2B_API_KEY")),
            ray_address=environment.get("RAY_ADDRESS") or None,
        ) as subject:
            findings = [*first, *await examine(subject)]
            sound = {finding.name for finding in findings if finding.state == "ok"}
            if config is None or not {"ray", "tasks"} <= sound:
                return findings
            from rollwright.cli.doctor_nodes import look_on_nodes

            return [*findings, *await look_on_nodes(config, places(), await subject.tasks.get())]

    findings, interrupted = until_interrupted(go)
    if interrupted or findings is None:
        return INTERRUPTED
    if json:
        print_json([finding.to_json() for finding in findings])
    else:
        _print(findings)
    return OK if healthy(findings) else USAGE


_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text.assemble(
            (f"{finding.state:7}", _STYLES[finding.state]), f"  {finding.name:{width}}  {finding.seen}"
        )
        console.print(line, soft_wrap=True)
        if finding.state in ("warn", "fail"):
            console.print(Text.assemble(" " * (width + 11), ("→ ", "bold"), finding.fix), soft_wrap=True)
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLES}
    console.print(", ".join(f"{n} {state}" for state, n in counts.items() if n), soft_wrap=True)
