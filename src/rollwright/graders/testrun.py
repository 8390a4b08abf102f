"""Runs a test plan in the grading box: the patch, the hidden tests, the run, what it left."""

from __future__ import annotations

import os
import re
import secrets
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rollwright.errors import GradingFailed, LimitError, PathNotFound, RollwrightError, UsageError
from rollwright.graders import Collect, LogParser, RawRun, Script, TestPlan
from rollwright.graders.diff import FileChange, touched_paths
from rollwright.graders.patch import Baseline, Patch, apply, take_baseline
from rollwright.graders.settings import same_settings
from rollwright.graders.steps import FOLDER, run_step
from rollwright.graders.workspace import make_base, prepare, scrub_history
from rollwright.sandboxes import JobResult, JobSpec, Provider, Sandbox, SandboxSpec
from rollwright.types import AgentView, Task

__all__ = ["Clock", "GradingLimits", "boot", "new_nonce", "protected_changes", "run_plan", "run_script"]

_SETTINGS_BYTES = 1 << 20
"""Of a settings file; a longer one is cut and then does not say the same as the base's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingLimits:
    """Seconds and sizes. The tests' own time is the plan's."""

    boot_seconds: float = 120
    step_seconds: float = 300
    """Each of prepare, baseline, apply, stage."""
    report_bytes: int = 32 << 20
    artifact_bytes: int = 64 << 20
    """What may cross into a separate tests' box."""
    runs: int = 3
    """Most runs for one patch, whatever for, each in a fresh box."""
    attempts: int = 2
    """Runs of tests that time out or leave nothing to judge."""
    p2p_reruns: int = 2
    """More runs, in fresh boxes, of a patch that fails nothing but up to `p2p_failures` tests that passed before."""
    p2p_failures: int = 5


class Clock:
    """Times the steps and stamps what goes wrong in them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.base_tree = ""

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        except RollwrightError as e:
            e.details.setdefault("step", name)
            raise
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def protected_changes(plan: TestPlan, workdir: str, changes: tuple[FileChange, ...]) -> tuple[FileChange, ...]:
    """The changes of a patch that are undone before the tests run."""
    root = workdir.rstrip("/") + "/"
    exact = {path.removeprefix(root).encode() for path in plan.files if path.startswith(root)}
    exact |= touched_paths(plan.test_patch)
    globs = [re.compile(_glob(pattern).encode(), re.DOTALL) for pattern in plan.protected]

    def protected(path: bytes) -> bool:
        inside = any(path.startswith(e + b"/") or e.startswith(path + b"/") for e in exact)
        return inside or path in exact or any(g.fullmatch(path) for g in globs)

    return tuple(change for change in changes if protected(change.path))


async def run_plan(
    *,
    provider: Provider,
    spec: SandboxSpec,
    task: Task,
    patch: Patch | None,
    plan: TestPlan,
    nonce: str,
    key: str,
    limits: GradingLimits,
    clock: Clock,
) -> RawRun:
    """One run in a fresh box (two, when the plan collects). Raises `InfraError` with the step in its details."""
    agent = task.agent
    if plan.network and plan.collect is None:
        spec = replace(spec, network="open")
    box = await boot(provider, spec, key, limits, clock)
    try:
        with clock.step("prepare"):
            await prepare(box, agent, seconds=limits.step_seconds)
            await make_base(box, task, for_agent=False, seconds=limits.step_seconds)
        with clock.step("baseline"):
            baseline = await take_baseline(box, agent.workdir, seconds=limits.step_seconds)
            clock.base_tree = baseline.base_tree
        if patch is not None:
            with clock.step("apply"):
                await apply(box, baseline, patch, seconds=limits.step_seconds)
        changes = patch.changes if patch is not None else ()
        dropped = protected_changes(plan, agent.workdir, changes)
        with clock.step("stage"):
            dropped += await _resettings(box, baseline, plan, [c for c in changes if c not in dropped])
            await _stage(box, baseline, plan, dropped, limits)
        if plan.collect is not None:
            with clock.step("collect"):
                artifacts = await _collect(box, agent.workdir, plan.collect, limits)
            await box.close()
            box = await boot(
                provider,
                replace(spec, image=plan.collect.image, network="open" if plan.network else spec.network),
                f"{key}.tests",
                limits,
                clock,
            )
            with clock.step("unpack"):
                await _unpack(box, agent, plan, plan.collect, artifacts, limits)
        return await _run_tests(box, plan, nonce, agent.workdir, dropped, limits, clock)
    finally:
        await box.close()


async def boot(provider: Provider, spec: SandboxSpec, key: str, limits: GradingLimits, clock: Clock) -> Sandbox:
    with clock.step("boot"):
        return await provider.create(replace(spec, boot_seconds=limits.boot_seconds), key=key)


async def run_script(box: Sandbox, script: Script, *, cwd: str) -> JobResult:
    """A program of the task's, as a durable job."""
    await _write_files(box, script)
    return await box.run(
        JobSpec(
            id=uuid.uuid4().hex,
            argv=script.argv,
            env=script.env,
            cwd=cwd,
            user=script.user,
            seconds=script.seconds,
            merge_stderr=True,
        )
    )


async def _resettings(
    box: Sandbox, baseline: Baseline, plan: TestPlan, changes: Sequence[FileChange]
) -> tuple[FileChange, ...]:
    """The changes that steer test runners otherwise than the base does."""
    found: list[FileChange] = []
    for change in changes:
        path = os.fsdecode(change.path)
        name = path.rpartition("/")[2]
        if name not in plan.settings:
            continue
        base = b""
        if change.kind != "added":
            blob = f"{baseline.base_tree}:{path}"
            shown = await box.exec(("git", f"--git-dir={baseline.shadow}/git", "cat-file", "blob", blob))
            if shown.exit_code != 0:
                raise GradingFailed(f"the base's {path} cannot be read", step="stage", evidence=shown.stderr.decode())
            base = shown.stdout
        try:
            now = await box.get(f"{baseline.workdir}/{path}", limit=_SETTINGS_BYTES)
        except PathNotFound:
            now = b""
        except UsageError:  # a folder, a pipe
            now = b"\0"
        if not same_settings(name, base, now):
            found.append(change)
    return tuple(found)


async def _stage(
    box: Sandbox, baseline: Baseline, plan: TestPlan, dropped: tuple[FileChange, ...], limits: GradingLimits
) -> None:
    """Protected paths back, the tests' own patch, the row's install step, an end to the history."""
    lists = {
        "remove": b"".join(change.path + b"\0" for change in dropped if change.kind == "added"),
        "restore": b"".join(change.path + b"\0" for change in dropped if change.kind != "added"),
        "test.patch": plan.test_patch,
    }
    for name, data in lists.items():
        if data:
            await box.put(f"{baseline.shadow}/{name}", data, mode=0o600)
    out = await run_step(
        box,
        "stage.sh",
        baseline.workdir,
        baseline.shadow,
        *plan.reports,
        seconds=limits.step_seconds,
        error=GradingFailed,
        what="stage",
    )
    if "failed" in out:
        raise GradingFailed(f"the tests' own patch does not apply: {out['failed']}", step="stage")
    if plan.install:
        install = Script(argv=plan.install, user="root", seconds=limits.step_seconds)
        await _task_step(box, install, baseline.workdir, "install")
    if plan.hide_history:
        await scrub_history(box, baseline.workdir, seconds=limits.step_seconds)
    await _make_outputs(box, plan, limits)


async def _make_outputs(box: Sandbox, plan: TestPlan, limits: GradingLimits) -> None:
    if plan.scratch or plan.outputs:
        args = (*plan.scratch, "--", *plan.outputs)
        await run_step(box, "outputs.sh", *args, seconds=limits.step_seconds, error=GradingFailed, what="stage")


async def _run_tests(
    box: Sandbox,
    plan: TestPlan,
    nonce: str,
    workdir: str,
    dropped: tuple[FileChange, ...],
    limits: GradingLimits,
    clock: Clock,
) -> RawRun:
    cwd = workdir if plan.collect is None else plan.collect.workdir
    with clock.step("stage"):
        await _write_files(box, plan)
    with clock.step("tests"):
        result = await box.run(
            JobSpec(
                id=uuid.uuid4().hex,
                argv=plan.argv,
                env=plan.env,
                cwd=cwd,
                user=plan.user,
                seconds=plan.seconds,
                merge_stderr=plan.merge_stderr,
                head_bytes=plan.log_bytes // 2,
                tail_bytes=plan.log_bytes // 2,
            )
        )
        reports = {path: await _report(box, path, limits) for path in (*plan.reports, *plan.outputs)}
    log = result.stdout.data()
    if plan.parser is not None:
        if result.state == "exited":
            with clock.step("parse"):
                reports[plan.parser.output] = await _parse(box, plan.parser, result, limits)
        log += b"\n[stderr]\n" + result.stderr.data()
    return RawRun(
        state=result.state,
        exit_code=result.exit_code,
        log=log,
        reports=reports,
        seconds=result.seconds,
        nonce=nonce,
        dropped_paths=tuple(change.name for change in dropped),
    )


async def _parse(box: Sandbox, parser: LogParser, result: JobResult, limits: GradingLimits) -> bytes | None:
    """What the task's parser makes of the tests' output. One that cannot read *any* output is our failure; one that
    only cannot read this one is the patch's."""
    found = await _parse_once(box, parser, result.stdout.data(), result.stderr.data(), limits)
    if found is None:
        control = await _parse_once(box, parser, b"", b"", limits)
        if control is None:
            raise GradingFailed("the task's log parser does not work in this image, not even on an empty log")
    return found


async def _parse_once(
    box: Sandbox, parser: LogParser, stdout: bytes, stderr: bytes, limits: GradingLimits
) -> bytes | None:
    await box.put(parser.stdout, stdout, mode=0o600)
    await box.put(parser.stderr, stderr, mode=0o600)
    ended = await run_script(box, parser.script, cwd="/")
    return await _report(box, parser.output, limits) if ended.ok else None


async def _collect(box: Sandbox, workdir: str, collect: Collect, limits: GradingLimits) -> bytes:
    """The artifacts of a patched box, as a tar archive."""
    for script in collect.commands:
        await _task_step(box, script, workdir, "collect")
    path = f"{FOLDER}/artifacts.tar"
    await run_step(
        box,
        "artifacts.sh",
        "pack",
        path,
        *collect.artifacts,
        seconds=limits.step_seconds,
        error=GradingFailed,
        what="collect",
    )
    data = await box.get(path, limit=limits.artifact_bytes + 1)
    if len(data) > limits.artifact_bytes:
        raise LimitError(f"the artifacts are over {limits.artifact_bytes} bytes", step="collect")
    return data


async def _unpack(
    box: Sandbox, agent: AgentView, plan: TestPlan, collect: Collect, artifacts: bytes, limits: GradingLimits
) -> None:
    await prepare(box, replace(agent, workdir=collect.workdir, pre_commands=()), seconds=limits.step_seconds)
    await _make_outputs(box, plan, limits)
    path = f"{FOLDER}/artifacts.tar"
    await box.put(path, artifacts, mode=0o600)
    await run_step(box, "artifacts.sh", "unpack", path, seconds=limits.step_seconds, error=GradingFailed, what="unpack")


async def _task_step(box: Sandbox, script: Script, cwd: str, what: str) -> None:
    ended = await run_script(box, script, cwd=cwd)
    if ended.ok or (ended.state == "exited" and not script.required):
        return
    said = ended.stdout.data()[-2000:].decode("utf-8", "replace").strip()
    words = said.splitlines()[-1] if said else "it said nothing"
    raise GradingFailed(
        f"{what}: {ended.state} {ended.exit_code}: {words}", step=what, argv=list(script.argv), evidence=said
    )


async def _write_files(box: Sandbox, of: Script | TestPlan) -> None:
    for path, data in of.files.items():
        await box.put(path, data, mode=0o755 if data.startswith(b"#!") else 0o644)


async def _report(box: Sandbox, path: str, limits: GradingLimits) -> bytes | None:
    try:
        data = await box.get(path, limit=limits.report_bytes + 1)
    except UsageError:  # not there, or no plain file: what the tests made of it
        return None
    return data if 0 < len(data) <= limits.report_bytes else None


def _glob(pattern: str) -> str:
    out = ""
    i = 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out += "(?:.*/)?"
            i += 3
        elif pattern.startswith("**", i):
            out += ".*"
            i += 2
        elif pattern[i] == "*":
            out += "[^/]*"
            i += 1
        else:
            out += re.escape(pattern[i])
            i += 1
    return out


def new_nonce() -> str:
    """32 hex digits that the patch cannot guess."""
    return secrets.token_hex(16)
