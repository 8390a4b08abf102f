"""From a patch to a verdict: its tests are run until their end says something of the patch.

A run that leaves nothing to judge may be the patch's doing (it eats the memory, breaks what runs the tests, fills the
disk) or ours. A run without the patch, in an equal box, tells: where that one ends well and the patched one does not,
twice, it is the patch, and no way out of a bad reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from rollwright.errors import (
    ApplyFailed,
    GraderError,
    GradingFailed,
    JobLost,
    LimitError,
    RollwrightError,
    SandboxBroken,
    SandboxGone,
)
from rollwright.graders import Grader, RawRun
from rollwright.graders.patch import Patch
from rollwright.graders.testrun import Clock, GradingLimits, new_nonce, protected_changes, run_plan
from rollwright.sandboxes import Provider, SandboxSpec
from rollwright.types import Task, Verdict, VerdictStatus

__all__ = [
    "Grading",
    "GradingLimits",
    "grade",
    "judge_run",
    "pass_to_pass",
    "protected_changes",
    "required",
]

_AFTER_THE_PATCH = frozenset(("stage", "scrub_history", "install", "collect", "unpack", "tests", "parse", "judge"))
"""Steps in which the patch can be at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """A verdict and what it was made from."""

    verdict: Verdict
    raw: RawRun | None = None
    """None when the patch decided without a run."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per step of the last attempt: boot, prepare, baseline, apply, stage, tests, judge."""
    attempts: int = 0
    """Runs of the patch's tests."""
    base_tree: str = ""
    """Git tree hash of the grading box's workdir before the patch."""

    def record(self) -> dict[str, Any]:
        """All that judging again needs but the log, JSON-able."""
        steps = {"seconds": dict(self.seconds), "attempts": self.attempts}
        return steps if self.raw is None else steps | self.raw.record()


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

    Raises `InfraError` or `LimitError` for every end that says nothing about the patch; `details["step"]` is where it
    happened.
    """
    if patch is not None and patch.refusal is not None:
        return Grading(verdict=_without_run(grader, VerdictStatus.PATCH_REJECTED, (str(patch.refusal),)))
    if patch is not None and patch.empty:
        return Grading(verdict=_without_run(grader, VerdictStatus.EMPTY_PATCH, ()))
    trials = _Trials(
        provider=provider,
        spec=spec,
        task=task,
        patch=patch,
        grader=grader,
        key=key,
        limits=limits or GradingLimits(),
    )
    return await trials.grading()


def judge_run(grader: Grader, task: Task, raw: RawRun) -> Verdict:
    """The verdict on a run, live or stored. Pure. Raises `GradingFailed` for runs that prove nothing."""
    if raw.spoiled:
        signals = (f"spoiled_by_the_patch: {raw.spoiled}",)
        verdict = replace(_without_run(grader, VerdictStatus.UNRESOLVED, signals), exit_code=raw.exit_code)
    elif raw.state in ("lost", "cancelled", "oom"):
        raise GradingFailed(
            f"the test run ended as {raw.state}", state=raw.state, evidence=raw.log[-2000:].decode(errors="replace")
        )
    else:
        verdict = grader.judge(task, raw)
        if not isfinite(verdict.reward):
            raise GradingFailed(f"grader {grader.name} gave {verdict.reward} for a reward", state=raw.state)
    return replace(
        verdict,
        dropped_paths=raw.dropped_paths,
        log_sha256=hashlib.sha256(raw.log).hexdigest(),
        signals=(*verdict.signals, *(f"flaky: {name}" for name in raw.flaky)),
    )


@dataclass(slots=True, kw_only=True)
class _Trials:
    """The runs of one patch's tests."""

    provider: Provider
    spec: SandboxSpec
    task: Task
    patch: Patch | None
    grader: Grader
    key: str
    limits: GradingLimits
    clock: Clock = field(default_factory=Clock)
    patched: int = 0
    """Runs with the patch."""
    controlled: bool = False
    """A run without it ended well."""

    async def grading(self) -> Grading:
        hangs = spoiled = reruns = 0
        judged: list[tuple[RawRun, Verdict]] = []
        while True:
            self.patched += 1
            self.clock = Clock()
            try:
                raw, verdict = await self._trial(self.patch, str(self.patched))
            except _Spoiled as end:
                if judged:  # what a run before this one has shown stays shown
                    break
                spoiled += 1
                await self._control(end)
                if spoiled + hangs >= self.limits.attempts:
                    raw = replace(end.raw, spoiled=end.error.message)
                    return self._graded(raw, judge_run(self.grader, self.task, raw))
                continue
            hangs += raw.state == "timeout"
            if raw.state == "timeout" and spoiled + hangs < self.limits.attempts:
                continue
            judged.append((raw, verdict))
            failures = _only_pass_to_pass(self.task, verdict)
            if not 0 < failures <= self.limits.p2p_failures or reruns >= self.limits.p2p_reruns or self._runs_are_up():
                break
            reruns += 1
        raw, verdict = judged[-1]
        seen = [required(each) for _, each in judged]
        flaky = tuple(name for name in seen[-1] if len({run.get(name) for run in seen}) > 1)
        if flaky:
            raw = replace(raw, flaky=flaky)
            verdict = judge_run(self.grader, self.task, raw)
        return self._graded(raw, verdict)

    def _runs_are_up(self) -> bool:
        return self.patched + self.controlled >= self.limits.runs

    def _graded(self, raw: RawRun, verdict: Verdict) -> Grading:
        return Grading(
            verdict=verdict,
            raw=raw,
            seconds=self.clock.seconds,
            attempts=self.patched,
            base_tree=self.clock.base_tree,
        )

    async def _control(self, end: _Spoiled) -> None:
        """A run without the patch must end well. Else the patch is not why there is nothing to judge, and what went
        wrong with it is raised."""
        if self.patch is None:
            raise end.error
        if self.controlled:
            return
        try:
            raw, _ = await self._trial(None, "control")
        except _Spoiled as alike:
            end.error.details["control"] = alike.error.message
            raise end.error from alike.error
        except RollwrightError as error:
            end.error.details["control"] = error.message
            raise end.error from error
        if raw.state != "exited":
            end.error.details["control"] = f"ended as {raw.state}"
            raise end.error
        self.controlled = True

    async def _trial(self, patch: Patch | None, name: str) -> tuple[RawRun, Verdict]:
        """One run in a fresh box, judged. Raises `_Spoiled` when it left nothing to judge and what ran in the box may
        be why, else what went wrong."""
        nonce = new_nonce()
        raw: RawRun | None = None
        try:
            raw = await run_plan(
                provider=self.provider,
                spec=self.spec,
                task=self.task,
                patch=patch,
                plan=self.grader.plan(self.task, nonce=nonce),
                nonce=nonce,
                key=f"{self.key}.{name}",
                limits=self.limits,
                clock=self.clock,
            )
            with self.clock.step("judge"):
                return raw, judge_run(self.grader, self.task, raw)
        except RollwrightError as error:
            if not _may_be_the_patchs_doing(error):
                raise
            raise _Spoiled(error, raw or _no_run(error, nonce)) from error


class _Spoiled(Exception):
    """A run that left nothing to judge."""

    def __init__(self, error: RollwrightError, raw: RawRun) -> None:
        super().__init__(error.message)
        self.error = error
        self.raw = raw


def _may_be_the_patchs_doing(error: RollwrightError) -> bool:
    """Whether code in the box could have brought this about. A box that is gone is the machine's doing, unless it was
    the box that ran out of memory."""
    if error.details.get("step") not in _AFTER_THE_PATCH:
        return False
    if isinstance(error, SandboxGone):
        return error.details.get("reason") == "oom"
    if isinstance(error, GradingFailed) and error.details.get("state") == "cancelled":
        return False
    return isinstance(error, GraderError | LimitError | JobLost | SandboxBroken) and not isinstance(error, ApplyFailed)


def _no_run(error: RollwrightError, nonce: str) -> RawRun:
    """What there is to keep of a run that did not come to its end."""
    said = str(error.details.get("evidence", "")).encode("utf-8", "replace")
    return RawRun(state="lost", exit_code=None, log=said, reports={}, seconds=0.0, nonce=nonce)


def required(verdict: Verdict) -> dict[str, str]:
    """Status of each test that must pass."""
    return {outcome.id: str(outcome.status) for outcome in verdict.tests if outcome.expected}


def pass_to_pass(task: Task) -> frozenset[str]:
    """Tests that passed before, by the name that all protocols keep them under in their payload."""
    return frozenset(task.grader.payload.get("pass_to_pass") or ())


def _only_pass_to_pass(task: Task, verdict: Verdict) -> int:
    """How many required tests failed, if nothing else is wrong than tests that passed before; else 0."""
    if verdict.status is not VerdictStatus.UNRESOLVED:
        return 0
    failed = [name for name, status in required(verdict).items() if status != "passed"]
    return len(failed) if pass_to_pass(task).issuperset(failed) else 0


def _without_run(grader: Grader, status: VerdictStatus, signals: tuple[str, ...]) -> Verdict:
    return Verdict(status=status, reward=0.0, grader=grader.name, grader_version=grader.version, signals=signals)
