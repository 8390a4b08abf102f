"""Graders: one implementation per grading protocol. This is the contract; the work every protocol shares (capture,
apply, protected paths, the second sandbox) is core and lives in `patch` and `grading`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollwright.sandboxes import JobState
from rollwright.types import Task, Verdict

__all__ = ["Grader", "RawRun", "TestPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPlan:
    """How the tests of one task are run in the grading box, after the patch."""

    __test__ = False

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Absolute path → content, written as root after the patch and the restored paths. Readable by all."""
    test_patch: bytes = b""
    """The tests' own git patch. The paths it touches are protected; it is applied after they are restored."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    reports: tuple[str, ...] = ()
    """Absolute paths read back after the run; a missing one is evidence, not an error. Each is made beforehand as an
    empty file the tests may write, in a folder they may not."""
    protected: tuple[str, ...] = ()
    """Globs (relative to the workdir, `**` spans folders) put back to the base before `files` are written. What `files`
    and `test_patch` write is protected anyway."""
    seconds: float = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRun:
    """What a test run left. All a verdict may be made from, so it can be judged again offline."""

    state: JobState
    exit_code: int | None
    log: bytes
    """stdout and stderr in order, head and tail."""
    reports: Mapping[str, bytes | None]
    """None: not written, or larger than we read."""
    seconds: float
    nonce: str
    """The secret the plan was made with."""
    dropped_paths: tuple[str, ...] = ()


class Grader(Protocol):
    """One grading protocol."""

    name: str
    version: str
    """Of the judging code (and of the package it relies on); stored with each verdict."""

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        """Row → task. `where` names the row in errors. Raises `TaskError` naming the field."""
        ...

    def preflight(self) -> list[str]:
        """Start-up: what is missing on this machine, one sentence each with the fix; empty when ready."""
        ...

    def check(self, task: Task) -> list[str]:
        """Offline, under 10 ms: what would make this task ungradable; empty when fine."""
        ...

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        """The test run. `nonce` (32 hex digits) makes report paths unguessable for the patch."""
        ...

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        """Pure. Only for runs that exited, timed out or hit the output limit. The core fills in `dropped_paths` and
        `log_sha256`. Raises `GradingFailed` when the evidence says that we, not the patch, failed."""
        ...
