"""Test scripts that are judged by what they print: how they are marked, and what their log proves.

The script is the data set's own. Only lines that nobody else can write are added: marks with the run's nonce around
the tests, the exit code of the tests, two canary tests where the runner is pytest. The patch's code runs in the same
box as root may, so a patch written against this module can still forge a log; what is stopped is everything that
prints results, everything that acts on all tests alike and everything that ends the runner early.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollwright.errors import GradingFailed
from rollwright.graders import RawRun
from rollwright.graders.pytest_run import Canaries
from rollwright.types import TestOutcome, TestStatus, Verdict, VerdictStatus

__all__ = [
    "END",
    "LOG_BYTES",
    "START",
    "Claim",
    "LogEvidence",
    "canaries_for",
    "has_markers",
    "judge_log",
    "mark",
    "outcomes_of",
    "parse_pytest_summary",
    "parse_pytest_verbose",
    "read_log",
    "status_of",
]

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
EXIT = ">>>>> Test Exit Code"
FAILURES = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
"""Nothing in our run prints these: the patch is applied elsewhere and time is kept outside."""
LOG_BYTES = 32 << 20

_HEADER = ("#!/bin/bash", "set -uxo pipefail")
_PYTEST = re.compile(r"(?:^|[\s;&/])(?:pytest|py\.test)(?=\s|$)|\btox\b.*\s--(?=\s|$)")
_COMPOSED = re.compile(r"[|;&<>`\\]|\$\(")
_NARROWED = re.compile(r"(?:^|\s)(?:-x|--exitfirst|--maxfail\S*|-k|-m|--lf|--last-failed|--ff|--deselect)(?:[\s=]|$)")
_DROPPED = re.compile(r"\n\[\.\.\. \d+ bytes dropped \.\.\.\]\n")
_MAX_REPORTED = 5000
_STATUSES: dict[str, TestStatus] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
}


# --------------------------------------------------------------------------- the script


def has_markers(script: str) -> bool:
    """Whether the lines that frame the tests are there, in order."""
    start, end = _positions(script.split("\n"))
    return 0 <= start < end


def canaries_for(script: str, nonce: str, taken: Sequence[str] = ()) -> Canaries | None:
    """Canary tests for a script whose last test command is plainly pytest with files; they go beside the last file.
    `taken`: the task's own tests."""
    lines = script.split("\n")
    start, end = _positions(lines)
    found = _pytest_line(lines, start + 1, end)
    return None if found is None else Canaries.of(nonce, found[1], taken)


def mark(script: str, nonce: str, canaries: Canaries | None) -> bytes:
    """The script with the run's marks in it. It must have markers."""
    lines = [line for line in script.strip().split("\n") if line not in _HEADER]
    start, end = _positions(lines)
    tests = lines[start + 1 : end]
    if canaries is not None:
        found = _pytest_line(lines, start + 1, end)
        assert found is not None
        index = found[0] - start - 1
        tests[index] = f"{tests[index].rstrip()} {shlex.quote(canaries.path)}"
    out = [
        *_HEADER,
        f": 'rollwright {nonce} script'",
        *lines[:start],
        f": 'rollwright {nonce} begin'",
        lines[start],
        *tests,
        "SWEBENCH_TEST_EXIT_CODE=$?",
        lines[end],
        f'echo "{EXIT}: $SWEBENCH_TEST_EXIT_CODE"',
        f': "rollwright {nonce} end $SWEBENCH_TEST_EXIT_CODE"',
        *lines[end + 1 :],
    ]
    return ("\n".join(out) + "\n").encode()


def _positions(lines: Sequence[str]) -> tuple[int, int]:
    start = next((i for i, line in enumerate(lines) if START in line), -1)
    end = next((i for i, line in enumerate(lines) if END in line), -1)
    return start, end


def _pytest_line(lines: Sequence[str], start: int, end: int) -> tuple[int, str] | None:
    """The last test command and the folder of its last test file, where it is pytest and nothing narrows it."""
    index = next((i for i in range(end - 1, start - 1, -1) if lines[i].strip()), -1)
    if index < start:
        return None
    line = lines[index]
    match = _PYTEST.search(line)
    if match is None:
        return None
    rest = line[match.end() :]
    if _COMPOSED.search(rest) or _NARROWED.search(rest):
        return None
    try:
        words = shlex.split(rest)
    except ValueError:
        return None
    files = [word.partition("::")[0] for word in words if word.partition("::")[0].endswith(".py")]
    if not files or files[-1].startswith("/") or ".." in files[-1].split("/"):
        return None
    folder, slash, _ = files[-1].rpartition("/")
    return index, folder + slash


# --------------------------------------------------------------------------- the log


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvidence:
    """What a log proves, whatever its tests say."""

    text: str
    """The whole log."""
    body: str
    """What was printed between our marks; line ends as a text file is read."""
    began: bool
    """The tests were reached."""
    exit_code: int | None
    """Of the tests; None when the script did not come past them."""
    injected: bool
    """Somebody else than the script printed its markers."""
    signals: tuple[str, ...]

    @property
    def framed(self) -> str:
        """Of the body what lies between the script's own markers, as the official graders cut it."""
        return self.body.split(START)[1].split(END)[0] if self.began and START in self.body else ""


def read_log(raw: RawRun) -> LogEvidence:
    """Weigh the log of a marked script. Raises `GradingFailed` when the script itself never started."""
    text = raw.log.decode("utf-8", "replace")
    if f": 'rollwright {raw.nonce} script'" not in text:
        said = text[-2000:].strip()
        raise GradingFailed(
            f"the image's bash did not start the tests' script: {said.splitlines()[-1] if said else raw.state}",
            state=raw.state,
            exit_code=raw.exit_code,
            evidence=said,
        )
    begin = f": 'rollwright {raw.nonce} begin'"
    before, began, rest = text.partition(begin)
    ends = list(re.finditer(rf": 'rollwright {raw.nonce} end (\d+)'", rest))
    body = rest[: ends[-1].start()] if ends else rest
    signals: list[str] = []
    if raw.state != "exited":
        signals.append(f"run_ended_as_{raw.state}")
    if not began:
        signals.append("no_report: the script did not reach the tests")
    elif not ends:
        signals.append("script_ended_in_the_tests")
    if _DROPPED.search(text):
        signals.append("log_truncated")
    injected = _injected(before, body, ended=bool(ends))
    if injected:
        signals.append("injected_markers")
    if any(words in text for words in FAILURES):
        signals.append("injected_failure_marker")
    return LogEvidence(
        text=text,
        body=body.replace("\r\n", "\n").replace("\r", "\n"),
        began=bool(began),
        exit_code=int(ends[-1].group(1)) if ends else None,
        injected=injected,
        signals=tuple(signals),
    )


def _injected(before: str, body: str, *, ended: bool) -> bool:
    """Markers in what ran before the tests (a patch is shown there), or more of them than the script writes."""
    if any(marker in before for marker in (START, END, EXIT)):
        return True
    # Traced, and once more where the script says them with echo.
    starts = 2 if f"echo '{START}'" in body or f'echo "{START}"' in body else 1
    ends = 2 if f"echo '{END}'" in body or f'echo "{END}"' in body else 1
    if not ended:
        ends = 0
    return body.count(START) > starts or body.count(END) > ends or body.count(EXIT) > (2 if ended else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the log says of the tests."""

    statuses: Mapping[str, str]
    """Of the body: test → PASSED, FAILED, SKIPPED, ERROR or XFAIL."""
    official: bool
    """Resolved, by the protocol's own reading of the whole log."""
    strict: bool
    """Resolved, by the strict rules on the body. Both must say so."""
    outcomes: tuple[TestOutcome, ...]
    outside: bool = False
    """Only results outside of our marks make it resolved. Nobody prints those in an ordered log."""
    signals: tuple[str, ...] = ()


def judge_log(
    *,
    grader: str,
    version: str,
    raw: RawRun,
    evidence: LogEvidence,
    claim: Claim,
    canaries: tuple[str, str] | None,
    canaries_may_be_absent: bool = False,
    trust_official: bool = False,
) -> Verdict:
    """The verdict on a marked script. `canaries`: names, as the parser gives them, of the test that passes and the one
    that fails. `trust_official`: the protocol's own verdict counts, whatever the evidence says, and is not for
    training."""
    signals = [*evidence.signals, *claim.signals]
    claimed = claim.official or claim.strict
    complete = raw.state == "exited" and evidence.exit_code in (0, 1)
    unfinished = raw.state == "exited" and evidence.exit_code is None
    tampered = (claimed and (evidence.injected or claim.outside)) or (claim.official and unfinished)
    found = [None if canaries is None else claim.statuses.get(name) for name in canaries or ()]
    if canaries is None or (canaries_may_be_absent and found == [None, None]):
        trusted = evidence.exit_code == 0 or any(s in ("FAILED", "ERROR") for s in claim.statuses.values())
        if evidence.exit_code is not None and not trusted:
            signals.append("exit_code_disagrees_with_report")
    else:
        right = found == ["PASSED", "FAILED"]
        trusted = right and evidence.exit_code == 1
        if not right:
            signals.append("canary_missing" if None in found else "canary_wrong")
        if evidence.exit_code not in (None, 1):
            signals.append("exit_code_disagrees_with_report")
        # With a failing test in it pytest cannot end well.
        tampered |= complete and (evidence.exit_code == 0 or (not right and (claimed or None not in found)))
    if raw.state == "timeout":
        status = VerdictStatus.TEST_TIMEOUT
    elif trust_official:
        status = VerdictStatus.RESOLVED if claim.official else VerdictStatus.UNRESOLVED
    elif tampered:
        status = VerdictStatus.TAMPERED
    elif claim.official and claim.strict and trusted and raw.state == "exited":
        status = VerdictStatus.RESOLVED
    else:
        status = VerdictStatus.UNRESOLVED
    return Verdict(
        status=status,
        reward=1.0 if status is VerdictStatus.RESOLVED else 0.0,
        grader=grader,
        grader_version=version,
        tests=claim.outcomes[:_MAX_REPORTED],
        exit_code=evidence.exit_code,
        signals=tuple(signals),
        trainable=not trust_official,
    )


# --------------------------------------------------------------------------- statuses


def status_of(name: str, statuses: Mapping[str, str]) -> str | None:
    """The status of an expected test. Of an id that was cut within its parameters (676 in SWE-bench Verified) all tests
    that begin so count, if they agree; the rule of swebench 5."""
    if name in statuses:
        return statuses[name]
    if name.count("[") > name.count("]"):
        found = [status for key, status in statuses.items() if key.startswith(name)]
        if found and len({status in ("PASSED", "XFAIL") for status in found}) == 1:
            return found[0]
    return None


def outcomes_of(
    fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], statuses: Mapping[str, str], *, fail_only: bool = False
) -> tuple[bool, tuple[TestOutcome, ...]]:
    """Whether every required test holds, and how each ended. One that was to be fixed must pass (or fail as expected);
    one that passed before may also be skipped; one without a result fails. `fail_only`: for runners that only name
    what failed, everything else holds."""
    outcomes: list[TestOutcome] = []
    for names, fine in ((fail_to_pass, ("PASSED", "XFAIL")), (pass_to_pass, ("PASSED", "XFAIL", "SKIPPED"))):
        for name in names:
            status = status_of(name, statuses)
            holds = status != "FAILED" if fail_only else status in fine
            shown = "missing" if status is None else _STATUSES.get(status, "failed")
            word = "" if shown == "passed" or not holds else f"counts as passed: {status or 'no failure'}"
            outcomes.append(TestOutcome(id=name, status="passed" if holds else shown, message=word))
    return bool(fail_to_pass) and all(o.status == "passed" for o in outcomes), tuple(outcomes)


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SUMMARY_LINE = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S.*)")
_VERBOSE_LINE = re.compile(r"(\S+)\s+(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")


def parse_pytest_summary(log: str) -> dict[str, str]:
    """Statuses in the summary that `pytest -rA` ends with, one test a line; a test id ends at the first blank."""
    statuses: dict[str, str] = {}
    for line in _ANSI.sub("", log).split("\n"):
        match = _SUMMARY_LINE.match(line)
        if match is not None and not re.fullmatch(r"\[\d+\]", match.group(2).split()[0]):
            statuses[match.group(2).split()[0]] = match.group(1)
    return statuses


def parse_pytest_verbose(log: str) -> dict[str, str]:
    """Statuses in the progress lines of `pytest --verbose`."""
    statuses: dict[str, str] = {}
    for line in _ANSI.sub("", log).split("\n"):
        match = _VERBOSE_LINE.match(line)
        if match is not None:
            statuses[match.group(1)] = match.group(2)
    return statuses
