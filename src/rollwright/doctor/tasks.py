"""The data set and the graders that would judge it."""

from __future__ import annotations

import anyio.to_thread

from rollwright.doctor import Check, Finding, found
from rollwright.doctor.subject import Subject
from rollwright.run import sound_tasks


def checks(subject: Subject) -> list[Check]:
    return [
        Check(name="tasks", look=_tasks, fix="correct the row, or set tasks.path", seconds=60),
        Check(name="graders", look=_graders, fix="install what the grader needs", seconds=60),
    ]


async def _tasks(subject: Subject) -> list[Finding]:
    config = subject.config
    assert config is not None
    await subject.tasks.own()
    graders = await subject.graders.own()
    tasks = await anyio.to_thread.run_sync(sound_tasks, config, graders)
    return found("tasks", "ok", f"{len(tasks.tasks)} tasks of {config.tasks.path.name}, each well formed")


async def _graders(subject: Subject) -> list[Finding]:
    tasks, graders = await subject.tasks.get(), await subject.graders.get()
    findings: list[Finding] = []
    for protocol in tasks.protocols:
        problems = await anyio.to_thread.run_sync(graders[protocol].preflight)
        name = f"grader {protocol}"
        if problems:
            seen, _, fix = problems[0].partition("; ")
            findings += found(name, "fail", seen, fix or problems[0])
        else:
            findings += found(name, "ok", f"version {graders[protocol].version}")
    return findings
