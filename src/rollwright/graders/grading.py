"""The second sandbox: every protocol's way from a patch to a verdict."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from rollwright.errors import GradingFailed, InfraError, PathNotFound, TaskError
from rollwright.graders import Grader, RawRun, TestPlan
from rollwright.graders.diff import FileChange, touched_paths
from rollwright.graders.patch import Baseline, Patch, adopt, apply, take_baseline
from rollwright.graders.steps import run_step
from rollwright.graders.workspace import prepare
from rollwright.sandboxes import JobSpec, Provider, Sandbox, SandboxSpec
from rollwright.types import Task, Verdict, VerdictStatus

__all__ = ["Grading", "GradingLimits", "Validation", "grade", "judge_run", "protected_changes", "validate_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingLimits:
    """Seconds and sizes. The tests' own time is the plan's."""

    boot_seconds: float = 120
    step_seconds: float = 300
    """Each of prepare, baseline, apply, stage."""
    report_bytes: int = 32 << 20
    attempts: int = 2
    """Runs of tests that time out, each in a fresh box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """A verdict and what it was made from."""

    verdict: Verdict
    raw: RawRun | None = None
    """None when the patch decided without a run."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per step of the last attempt: boot, prepare, baseline, apply, stage, tests, judge."""
    attempts: int = 0

    def record(self) -> dict[str, Any]:
        """All that judging again needs but the log, JSON-able. Reports as base64; None: the run left none."""
        raw = self.raw
        steps = {"seconds": dict(self.seconds), "attempts": self.attempts}
        if raw is None:
            return steps
        reports = {
            path: None if data is None else base64.b64encode(data).decode() for path, data in raw.reports.items()
        }
        return steps | {
            "state": raw.state,
            "exit_code": raw.exit_code,
            "test_seconds": raw.seconds,
            "nonce": raw.nonce,
            "dropped_paths": list(raw.dropped_paths),
            "reports": reports,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Whether a task can be trusted: its gold patch resolves it, doing nothing does not."""

    task: Task
    gold: Grading | None
    noop: Grading | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


async def grade(
    *,
    provider: Provider,
    spec: SandboxSpec,
    task: Task,
    patch: Patch | None,
    grader: Grader,
    key: str,
    limits: GradingLimits | None = None,
) -> Grading:
    """Judge `patch` in a sandbox of its own, made from `spec` (`key` and the attempt name it). `None` runs the tests on
    the untouched base; an empty patch is not worth a run.

    Raises `InfraError` for every end that says nothing about the patch; `details["step"]` is where it happened.
    """
    if patch is not None and patch.refusal is not None:
        return Grading(verdict=_without_run(grader, VerdictStatus.PATCH_REJECTED, (str(patch.refusal),)))
    if patch is not None and patch.empty:
        return Grading(verdict=_without_run(grader, VerdictStatus.EMPTY_PATCH, ()))
    limits = limits or GradingLimits()
    attempt = 0
    while True:
        attempt += 1
        clock = _Clock()
        raw = await _run(provider, spec, task, patch, grader, f"{key}.{attempt}", limits, clock)
        if raw.state != "timeout" or attempt >= limits.attempts:
            break
    with clock.step("judge"):
        verdict = judge_run(grader, task, raw)
    return Grading(verdict=verdict, raw=raw, seconds=clock.seconds, attempts=attempt)


def judge_run(grader: Grader, task: Task, raw: RawRun) -> Verdict:
    """The verdict on a run, live or stored. Pure. Raises `GradingFailed` for runs that prove nothing."""
    if raw.state in ("lost", "cancelled", "oom"):
        raise GradingFailed(
            f"the test run ended as {raw.state}", state=raw.state, evidence=raw.log[-2000:].decode(errors="replace")
        )
    verdict = grader.judge(task, raw)
    return replace(verdict, dropped_paths=raw.dropped_paths, log_sha256=hashlib.sha256(raw.log).hexdigest())


async def validate_task(
    *, provider: Provider, spec: SandboxSpec, task: Task, grader: Grader, key: str, limits: GradingLimits | None = None
) -> Validation:
    """Grade the gold patch and the untouched base. Raises what `grade` raises."""
    limits = limits or GradingLimits()
    problems: list[str] = list(grader.check(task))
    gold: Grading | None = None
    if task.grader.gold_patch is None:
        problems.append("the row has no gold patch")
    else:
        try:
            patch = await _gold(provider, spec, task, task.grader.gold_patch, f"{key}.patch", limits)
        except TaskError as e:
            problems.append(f"gold: {e.message}")
        else:
            gold = await grade(
                provider=provider, spec=spec, task=task, patch=patch, grader=grader, key=f"{key}.gold", limits=limits
            )
            if gold.verdict.status is not VerdictStatus.RESOLVED:
                problems.append(f"the gold patch is {gold.verdict.status}, not resolved")
    noop = await grade(
        provider=provider, spec=spec, task=task, patch=None, grader=grader, key=f"{key}.noop", limits=limits
    )
    if noop.verdict.status is not VerdictStatus.UNRESOLVED:
        problems.append(f"doing nothing is {noop.verdict.status}, not unresolved")
    return Validation(task=task, gold=gold, noop=noop, problems=tuple(problems))


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


async def _run(
    provider: Provider,
    spec: SandboxSpec,
    task: Task,
    patch: Patch | None,
    grader: Grader,
    key: str,
    limits: GradingLimits,
    clock: _Clock,
) -> RawRun:
    nonce = secrets.token_hex(16)
    plan = grader.plan(task, nonce=nonce)
    workdir = task.agent.workdir
    box = await _boot(provider, spec, key, limits, clock)
    try:
        with clock.step("prepare"):
            await prepare(box, task.agent, seconds=limits.step_seconds)
        with clock.step("baseline"):
            baseline = await take_baseline(box, workdir, seconds=limits.step_seconds)
        if patch is not None:
            with clock.step("apply"):
                await apply(box, baseline, patch, seconds=limits.step_seconds)
        with clock.step("stage"):
            dropped = protected_changes(plan, workdir, patch.changes if patch is not None else ())
            await _stage(box, baseline, plan, dropped, limits)
        with clock.step("tests"):
            result = await box.run(
                JobSpec(
                    id=uuid.uuid4().hex,
                    argv=plan.argv,
                    env=plan.env,
                    cwd=workdir,
                    user="agent",
                    seconds=plan.seconds,
                    merge_stderr=True,
                )
            )
            reports = {path: await _report(box, path, limits) for path in plan.reports}
    finally:
        await box.close()
    return RawRun(
        state=result.state,
        exit_code=result.exit_code,
        log=result.stdout.data(),
        reports=reports,
        seconds=result.seconds,
        nonce=nonce,
        dropped_paths=tuple(change.name for change in dropped),
    )


async def _gold(
    provider: Provider, spec: SandboxSpec, task: Task, gold: bytes, key: str, limits: GradingLimits
) -> Patch:
    clock = _Clock()
    box = await _boot(provider, spec, key, limits, clock)
    try:
        with clock.step("prepare"):
            await prepare(box, task.agent, seconds=limits.step_seconds)
        with clock.step("baseline"):
            baseline = await take_baseline(box, task.agent.workdir, seconds=limits.step_seconds)
        with clock.step("gold"):
            return await adopt(box, baseline, gold, seconds=limits.step_seconds)
    finally:
        await box.close()


async def _boot(provider: Provider, spec: SandboxSpec, key: str, limits: GradingLimits, clock: _Clock) -> Sandbox:
    with clock.step("boot"):
        try:
            with anyio.fail_after(limits.boot_seconds):
                return await provider.create(spec, key=key)
        except TimeoutError as e:
            raise GradingFailed(f"the grading sandbox did not come up in {limits.boot_seconds:g} s") from e


async def _stage(
    box: Sandbox, baseline: Baseline, plan: TestPlan, dropped: tuple[FileChange, ...], limits: GradingLimits
) -> None:
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
    for path, data in plan.files.items():
        await box.put(path, data)


async def _report(box: Sandbox, path: str, limits: GradingLimits) -> bytes | None:
    try:
        data = await box.get(path, limit=limits.report_bytes + 1)
    except PathNotFound:
        return None
    return data if 0 < len(data) <= limits.report_bytes else None


def _without_run(grader: Grader, status: VerdictStatus, signals: tuple[str, ...]) -> Verdict:
    return Verdict(status=status, reward=0.0, grader=grader.name, grader_version=grader.version, signals=signals)


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


class _Clock:
    """Times the steps and stamps what goes wrong in them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        except InfraError as e:
            e.details.setdefault("step", name)
            raise
        finally:
            self.seconds[name] = time.monotonic() - started
