"""Pytest as the judge: how it is run so that the patch cannot bend it cheaply, and what its report is worth.

The patch's code runs in the same process as pytest, so a patch written against this very module can still forge a
result. What is stopped: everything that acts on the runner from outside the tests (configuration, conftest, plugins,
shadowed modules, exit codes, forged files) and everything that acts on all tests alike (two canaries, one of which must
fail).
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from rollwright.errors import GradingFailed
from rollwright.graders import RawRun, TestPlan, settings
from rollwright.graders.junit import BadReport, Case, case_key, read_junit

__all__ = ["PROTECTED", "SETTINGS", "Canaries", "PytestEvidence", "plan_pytest", "read_pytest"]

_ROOT = "/var/rollwright-tests"
_OPTIONS = ("-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir=.")
PROTECTED = (
    "**/conftest.py",
    "**/test_*.py",
    "**/*_test.py",
    "tests/**",
    "test/**",
    "**/tests/**",
    "**/pytest.ini",
    "**/.pytest.ini",
    "**/pytest.toml",
    "**/.pytest.toml",
    "**/tox.ini",
    # Python and pytest load code named by these before any test runs.
    "**/sitecustomize.py",
    "**/usercustomize.py",
    "**/*.pth",
    "**/*.egg-info/**",
    "**/*.dist-info/**",
)
"""Put back to the base before the tests run; with `SETTINGS`, where a configuration is read at all."""
SETTINGS = settings.FILES

_FIRST = "alpha amber basic cedar cobalt coral delta early final fixed gamma inner ivory linear local lower maple minor"
_SECOND = "batch bounds buffer chunk column cursor entry field header index ledger margin offset order record series"
_THIRD = (
    "add append compare copy count defaults empty equality length merge order pairs parse range reset round sum trim"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """Two tests that nobody can tell from ordinary ones: without the nonce their names are a guess."""

    path: str
    passing: str
    failing: str

    @classmethod
    def of(cls, nonce: str, folder: str = "", taken: Collection[str] = ()) -> Canaries:
        """`folder`: relative to the workdir, empty or with a slash at its end. `taken`: the task's own tests, as node
        ids, files, or bare names where a log tells tests apart by nothing else."""
        pick = random.Random(nonce)
        files = {test.partition("::")[0] for test in taken}
        module = f"{folder}test_{pick.choice(_FIRST.split())}_{pick.choice(_SECOND.split())}.py"
        while module in files:
            module = f"{module.removesuffix('.py')}_{pick.choice(_SECOND.split())}.py"
        verbs = [verb if f"test_{verb}" not in taken else f"{verb}_again" for verb in _THIRD.split()]
        passing, failing = (f"test_{verb}" for verb in pick.sample(verbs, 2))
        return cls(path=module, passing=f"{module}::{passing}", failing=f"{module}::{failing}")

    def source(self, nonce: str) -> bytes:
        pick = random.Random(nonce + "source")
        a, b = pick.randint(2, 99), pick.randint(2, 99)
        tests = [
            f"def {self.passing.split('::')[1]}():\n    values = [{a}, {b}]\n    assert sum(values) == {a + b}\n",
            f"def {self.failing.split('::')[1]}():\n    values = [{a}, {b}]\n    assert max(values) == {a + b}\n",
        ]
        pick.shuffle(tests)
        return "\n\n".join(tests).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestEvidence:
    """What a run of pytest proves."""

    cases: Mapping[tuple[str, str], Case]
    """Without the canaries; empty when there is no usable report."""
    signals: tuple[str, ...]
    trusted: bool
    """The report is complete and agrees with the exit code and the canaries."""
    tampered: bool
    """Something else than the tests decided the result."""


def plan_pytest(
    *,
    nonce: str,
    workdir: str,
    targets: Sequence[str],
    select: Sequence[str] | None,
    files: Mapping[str, bytes],
    test_patch: bytes,
    seconds: float,
    config: Literal["none", "base"],
) -> TestPlan:
    """Run `targets` (files, relative to the workdir; absent ones are skipped) and of them only the node ids `select`,
    unless it is None. `config`: no configuration file at all, or the base's own."""
    folder = f"{_ROOT}/{nonce}"
    canaries = Canaries.of(nonce, taken=targets)
    options = [*_OPTIONS, "--continue-on-collection-errors", f"--junitxml={folder}/report.xml"]
    if config == "none":
        options += ["-c", "/dev/null"]
    launch = {
        "nonce": nonce,
        "options": options,
        "targets": [*targets, canaries.path],
        "select": None if select is None else [*select, canaries.passing, canaries.failing],
    }
    return TestPlan(
        argv=("python3", f"{folder}/launch.py", f"{folder}/launch.json"),
        files={
            **files,
            f"{workdir.rstrip('/')}/{canaries.path}": canaries.source(nonce),
            f"{folder}/launch.py": _launcher(),
            f"{folder}/launch.json": json.dumps(launch).encode(),
        },
        test_patch=test_patch,
        env={"PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
        reports=(f"{folder}/report.xml",),
        protected=PROTECTED,
        settings=SETTINGS if config == "base" else (),
        hide_history=True,
        seconds=seconds,
    )


def read_pytest(raw: RawRun, targets: Sequence[str]) -> PytestEvidence:
    """Weigh a run of `plan_pytest` on `targets`. Raises `GradingFailed` when pytest itself never started."""
    if f"rollwright {raw.nonce} pytest ".encode() not in raw.log:
        said = raw.log[-2000:].decode("utf-8", "replace").strip()
        raise GradingFailed(
            f"the image's python3 could not start pytest: {said.splitlines()[-1] if said else raw.state}",
            state=raw.state,
            exit_code=raw.exit_code,
            evidence=said,
        )
    data = next(iter(raw.reports.values()))
    if data is None:
        # Nothing but exit(0) in the code under test ends pytest well and without its report.
        return _untrusted("no_report", tampered=raw.exit_code == 0)
    try:
        cases = read_junit(data)
    except BadReport as e:
        return _untrusted(f"unreadable_report: {e}", tampered=raw.exit_code == 0)
    canaries = Canaries.of(raw.nonce, taken=targets)
    passing, failing = (cases.pop(case_key(name), None) for name in (canaries.passing, canaries.failing))
    signals: list[str] = []
    if raw.state != "exited":
        signals.append(f"run_ended_as_{raw.state}")
    if raw.exit_code != 1:
        signals.append("exit_code_disagrees_with_report")
    canary_ok = (
        passing is not None and passing.status == "passed" and failing is not None and failing.status == "failed"
    )
    if not canary_ok:
        signals.append("canary_missing" if passing is None or failing is None else "canary_wrong")
    complete = raw.state == "exited" and raw.exit_code in (0, 1)
    return PytestEvidence(
        cases=cases,
        signals=tuple(signals),
        trusted=not signals,
        tampered=complete and (raw.exit_code == 0 or not canary_ok),
    )


def _untrusted(signal: str, *, tampered: bool) -> PytestEvidence:
    return PytestEvidence(cases={}, signals=(signal,), trusted=False, tampered=tampered)


def _launcher() -> bytes:
    return files("rollwright.graders").joinpath("assets", "pytest_launch.py").read_bytes()
