"""Protocols whose tests are a script of ours around the data set's commands: one way to plan and to judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollwright.errors import ConfigError
from rollwright.graders import RawRun, TestPlan
from rollwright.graders.pytest_run import PROTECTED, SETTINGS
from rollwright.graders.swebench_log import LOG_BYTES, Claim, canaries_for, judge_log, mark, outcomes_of, read_log
from rollwright.types import Verdict

__all__ = ["ScriptOptions", "judge_script", "plan_script", "script_folder"]


# Tags below HEAD stay: some packages compute their version from them.
_FORGET = """
git for-each-ref --no-merged=HEAD --format='delete %(refname)' | git -c core.hooksPath=/dev/null update-ref --stdin
dir=$(git rev-parse --git-dir)
rm -rf "$dir/logs" "$dir/ORIG_HEAD" "$dir/FETCH_HEAD"
"""
_FORGET_FUTURE = ("sh", "-ec", _FORGET)
"""An install step that takes away the names of all commits that are not below HEAD, where a fix may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """What the run file says of such a protocol. Raises `ConfigError` naming the option."""

    protocol: str
    seconds: float
    """Of the script."""
    protect: Literal["official", "tests"]
    """What is put back before it: the tests' own files, or all tests, conftest.py files and what Python loads."""
    canaries: bool
    """Two tests of ours in the run, where it is pytest."""
    prompt: str

    def __post_init__(self) -> None:
        table = f"grading.{self.protocol}"
        if not self.seconds > 0:
            raise ConfigError(f"{table}.seconds: {self.seconds!r} is not a positive number")
        if self.protect not in ("official", "tests"):
            raise ConfigError(f"{table}.protect: {self.protect!r} is neither 'official' nor 'tests'")
        if "{problem_statement}" not in self.prompt:
            raise ConfigError(f"{table}.prompt: it has no {{problem_statement}}")

    def prompt_for(self, statement: str) -> str:
        """What the CLI is told."""
        return self.prompt.replace("{problem_statement}", statement)

    @property
    def protected(self) -> tuple[str, ...]:
        """Globs, beside the tests' own files."""
        return PROTECTED if self.protect == "tests" else ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Files whose pytest settings are the base's."""
        return SETTINGS if self.protect == "tests" else ()


def script_folder(nonce: str) -> str:
    """Where the script lies, and what it needs beside it; root's, outside of the workdir."""
    return f"/var/rollwright-tests/{nonce}"


def plan_script(
    script: str,
    *,
    nonce: str,
    workdir: str,
    options: ScriptOptions,
    protected: Sequence[str],
    taken: Sequence[str],
    user: Literal["agent", "root"],
    files: Mapping[str, bytes] | None = None,
    test_patch: bytes = b"",
    needs_history: bool = False,
    env: Mapping[str, str] | None = None,
    network: bool = False,
) -> TestPlan:
    """Run `script` (bash, with markers) in `workdir`, with our marks and canaries in it. `taken`: the task's own tests.
    `needs_history`: it names commits, so the repository keeps those below HEAD; otherwise the patch's code finds none
    in it."""
    canaries = canaries_for(script, nonce, taken) if options.canaries else None
    folder = script_folder(nonce)
    all_files = {**(files or {}), f"{folder}/eval.sh": mark(script, nonce, canaries)}
    if canaries is not None:
        all_files[f"{workdir}/{canaries.path}"] = canaries.source(nonce)
    return TestPlan(
        argv=("/bin/bash", f"{folder}/eval.sh"),
        files=all_files,
        test_patch=test_patch,
        install=_FORGET_FUTURE if needs_history else (),
        hide_history=not needs_history,
        env=env or {},
        protected=(*protected, *options.protected),
        settings=options.settings,
        user=user,
        network=network,
        log_bytes=LOG_BYTES,
        seconds=options.seconds,
    )


def judge_script(
    script: str,
    *,
    raw: RawRun,
    grader: str,
    version: str,
    options: ScriptOptions,
    parse: Callable[[str], Mapping[str, str]],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
) -> Verdict:
    """Weigh the log of `plan_script`: every test of `fail_to_pass` passed and none of `pass_to_pass` broke."""
    evidence = read_log(raw)
    statuses = parse(evidence.body if evidence.began else "")
    resolved, outcomes = outcomes_of(fail_to_pass, pass_to_pass, statuses)
    canaries = canaries_for(script, raw.nonce, [*fail_to_pass, *pass_to_pass]) if options.canaries else None
    return judge_log(
        grader=grader,
        version=version,
        raw=raw,
        evidence=evidence,
        claim=Claim(statuses=statuses, official=resolved, strict=resolved, outcomes=outcomes),
        canaries=None if canaries is None else (canaries.passing, canaries.failing),
    )
