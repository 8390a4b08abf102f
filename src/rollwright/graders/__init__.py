"""Graders: one implementation per grading protocol. This is the contract; the work every protocol shares (capture,
apply, protected paths, the second sandbox) is core and lives in `patch` and `grading`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

from rollwright.errors import StoreError
from rollwright.sandboxes import JobState
from rollwright.types import Task, Verdict

__all__ = ["Collect", "Grader", "LogParser", "RawRun", "Script", "SolvedByScript", "TestPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A command of the task's own, with its files."""

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Absolute path → content, written as root. One that begins with `#!` may be executed."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: Literal["agent", "root"] = "agent"
    seconds: float = 600
    required: bool = True
    """Whether any end but exit 0 stops the grading. Otherwise it may fail: what it did not leave is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogParser:
    """The task's own reader of its tests' output. It runs as root in the grading box when the tests' processes are
    gone, on files that they never could write."""

    script: Script
    stdout: str
    """Absolute path that the tests' stdout is written to."""
    stderr: str
    output: str
    """Absolute path of what it writes: a report of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """Tests that run in a box of their own, which the patch is not applied in: only artifacts get there."""

    commands: tuple[Script, ...]
    """Run in order in the patched box, in the workdir."""
    artifacts: tuple[str, ...]
    """Absolute paths (files or folders) that they leave; a missing one does not arrive."""
    image: str
    workdir: str
    """Of the tests' box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPlan:
    """How the tests of one task are run in the grading box, after the patch."""

    __test__ = False

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Absolute path → content, written as root after the patch and the restored paths. Readable by all; one that begins
    with `#!` may be executed."""
    test_patch: bytes = b""
    """The tests' own git patch. The paths it touches are protected; it is applied after they are restored."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    reports: tuple[str, ...] = ()
    """Absolute paths read back after the run; a missing one is evidence, not an error. Each is made beforehand as an
    empty file the tests may write, in a folder they may not."""
    outputs: tuple[str, ...] = ()
    """Absolute paths of reports that the tests make themselves; removed beforehand, read back after the run."""
    scratch: tuple[str, ...] = ()
    """Absolute folders, emptied and given to the tests."""
    install: tuple[str, ...] = ()
    """argv that brings in hidden tests: as root in the workdir, after the patch and the restored paths. Must exit 0."""
    hide_history: bool = False
    """Scrub the repository before the tests, so that the patch's code cannot read the fix out of it."""
    user: Literal["agent", "root"] = "agent"
    network: bool = False
    """Whether the tests' box has an open network."""
    merge_stderr: bool = True
    log_bytes: int = 2 << 20
    """Of each output stream: this much is kept, half from its head, half from its tail."""
    parser: LogParser | None = None
    collect: Collect | None = None
    protected: tuple[str, ...] = ()
    """Globs (relative to the workdir, `**` spans folders) put back to the base before `files` are written. What `files`
    and `test_patch` write is protected anyway."""
    settings: tuple[str, ...] = ()
    """Names of files (in any folder) that go back to the base where the patch changes what they tell test runners."""
    seconds: float = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRun:
    """What a test run left. All a verdict may be made from, so it can be judged again offline."""

    state: JobState
    exit_code: int | None
    log: bytes
    """stdout and stderr in order, or one after the other; head and tail."""
    reports: Mapping[str, bytes | None]
    """None: not written, or larger than we read."""
    seconds: float
    nonce: str
    """The secret the plan was made with."""
    dropped_paths: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    """Tests whose result differed between the runs of this patch; this is the last run."""
    spoiled: str = ""
    """What kept it from being judged, when runs without the patch can be: then the patch did it."""

    def record(self) -> dict[str, Any]:
        """All but the log, JSON-able; reports as base64, None: the run left none. `restore` is the way back."""
        reports = {p: None if data is None else base64.b64encode(data).decode() for p, data in self.reports.items()}
        return {
            "state": self.state,
            "exit_code": self.exit_code,
            "test_seconds": self.seconds,
            "nonce": self.nonce,
            "dropped_paths": list(self.dropped_paths),
            "flaky": list(self.flaky),
            "spoiled": self.spoiled,
            "reports": reports,
        }

    @classmethod
    def restore(cls, record: Mapping[str, Any], log: bytes) -> Self:
        """A stored run. Raises `StoreError` when something is missing or of the wrong type."""
        try:
            reports = {
                p: None if d is None else base64.b64decode(d, validate=True) for p, d in record["reports"].items()
            }
            return cls(
                state=record["state"],
                exit_code=record["exit_code"],
                log=log,
                reports=reports,
                seconds=float(record["test_seconds"]),
                nonce=str(record["nonce"]),
                dropped_paths=tuple(record["dropped_paths"]),
                flaky=tuple(record.get("flaky", ())),
                spoiled=str(record.get("spoiled", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise StoreError(f"a stored test run cannot be read back: {type(e).__name__}: {e}") from e


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
        `log_sha256`. Raises `GradingFailed` when the run leaves nothing to judge; the core finds out whose doing
        that is."""
        ...


@runtime_checkable
class SolvedByScript(Protocol):
    """A grader whose tasks may bring their solution as a program instead of a patch."""

    def solution(self, task: Task) -> Script | None:
        """What to run in an untouched box; what it changes in the workdir is the gold patch."""
        ...
