"""The working folder of both sandboxes before anything else happens in it, and the agent's view of its history."""

from __future__ import annotations

import uuid

from rollwright.errors import WorkspaceFailed
from rollwright.graders.steps import FOLDER, run_step
from rollwright.sandboxes import Sandbox
from rollwright.types import AgentView, Task

__all__ = ["make_base", "prepare", "scrub_history"]


async def prepare(box: Sandbox, task: AgentView, *, seconds: float = 600) -> None:
    """The same in the agent's box and in the grading box: the row's `pre_commands` as root, the folder given to
    `agent`, git told to trust it.

    Raises `WorkspaceFailed` (no such folder, no git, a command that did not exit 0) and what the sandbox raises.
    """
    args = [task.workdir]
    if task.pre_commands:
        path = f"{FOLDER}/{uuid.uuid4().hex}.sh"
        await box.put(path, "\n".join(task.pre_commands).encode() + b"\n", mode=0o600)
        args.append(path)
    await run_step(
        box,
        "workspace.sh",
        "prepare",
        *args,
        seconds=seconds,
        error=WorkspaceFailed,
        what="prepare",
        durable=bool(task.pre_commands),
    )


async def make_base(box: Sandbox, task: Task, *, for_agent: bool, seconds: float = 300) -> None:
    """The files a task begins with, where they are not the image's: `base_patch` applied and committed, `hidden_paths`
    taken away. Between `prepare` and the scrub or the baseline. In the grading box (`for_agent` false) what is hidden
    is kept, and stage.sh puts it back.

    Raises `WorkspaceFailed` (the patch does not apply, a path is not there) and what the sandbox raises.
    """
    if not task.grader.base_patch and not task.grader.hidden_paths:
        return
    path = "-"
    if task.grader.base_patch:
        path = f"{FOLDER}/{uuid.uuid4().hex}.patch"
        await box.put(path, task.grader.base_patch, mode=0o600)
    await run_step(
        box,
        "base.sh",
        "agent" if for_agent else "grader",
        task.agent.workdir,
        path,
        *task.grader.hidden_paths,
        seconds=seconds,
        error=WorkspaceFailed,
        what="make_base",
    )


async def scrub_history(box: Sandbox, workdir: str, *, seconds: float = 300) -> str:
    """Leave the agent one parentless commit and nothing else of the repository's history, and check that it is so.

    A folder that is no repository becomes one. Returns the commit. Raises `WorkspaceFailed` and what the sandbox
    raises.
    """
    out = await run_step(
        box, "workspace.sh", "scrub", workdir, seconds=seconds, error=WorkspaceFailed, what="scrub_history"
    )
    if "commit" not in out:
        raise WorkspaceFailed("the history scrub named no commit", step="scrub_history", output=out)
    return out["commit"]
