"""The `r2e_gym` protocol: rows of R2E-Gym. The tests lie in the image and are hidden from the agent; every status must
be the recorded one, failures too."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, cast

from rollwright.graders import RawRun, TestPlan
from rollwright.graders.pytest_run import Canaries
from rollwright.graders.rows import Row, fields, statement, whole_lines, workdir
from rollwright.graders.swebench_log import END, LOG_BYTES, START, Claim, judge_log, mark, read_log
from rollwright.graders.swebench_script import ScriptOptions, script_folder
from rollwright.types import AgentView, GraderView, Task, TestOutcome, Verdict

__all__ = ["R2eGym", "parse_summary"]

_TESTS = "/r2e_tests"
_ANSI = re.compile(r"\x1b\[[0-9;]*m|\r")
_STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")


class R2eGym:
    """Options of the run file's `[grading.r2e_gym]` table: `seconds` of the tests, `canaries` and `prompt` as in
    `[grading.swebench]`. A canary that the row's script does not collect is no evidence."""

    name = "r2e_gym"
    version = "1"

    def __init__(self, *, seconds: float = 600, canaries: bool = True, prompt: str = "{problem_statement}") -> None:
        self._options = ScriptOptions(
            protocol=self.name, seconds=seconds, protect="official", canaries=canaries, prompt=prompt
        )

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        reader.must_be(self.name, "expected_output_json")
        folder = workdir(reader, "/testbed")
        image = reader.require(*fields("docker_image"), *fields("image"))
        said = statement(reader)
        issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", said, re.DOTALL)
        gold = reader.text(*fields("patch"), *fields("gold_patch"))
        return Task(
            agent=AgentView(
                id=reader.digest(),
                image=image,
                workdir=folder,
                prompt=self._options.prompt_for(issue.group(1).strip() if issue else said),
                pre_commands=reader.lines(*fields("pre_commands")),
            ),
            grader=GraderView(
                source_id=reader.text(*fields("instance_id"), *fields("commit_hash")) or image,
                protocol=self.name,
                payload={"expected": _expected(reader)},
                gold_patch=None if gold is None else whole_lines(gold),
                hidden_paths=(_TESTS, f"{folder}/run_tests.sh"),
            ),
        )

    def preflight(self) -> list[str]:
        return []

    def check(self, task: Task) -> list[str]:
        expected: dict[str, str] = task.grader.payload["expected"]
        if not expected:
            return ["expected_output_json: is empty, and a run without any test would equal it"]
        if "PASSED" not in expected.values():
            return ["expected_output_json: no test in it passes"]
        return []

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        canaries = Canaries.of(nonce, taken=task.grader.payload["expected"])
        folder = script_folder(nonce)
        files = {f"{folder}/eval.sh": mark(_script(task.agent.workdir), nonce, None)}
        if self._options.canaries:
            files[f"{_TESTS}/{canaries.path}"] = canaries.source(nonce)
        return TestPlan(
            argv=("/bin/bash", f"{folder}/eval.sh"),
            files=files,
            protected=("r2e_tests", "r2e_tests/**", "run_tests.sh", "run_tests.sh/**"),
            hide_history=True,
            log_bytes=LOG_BYTES,
            seconds=self._options.seconds,
            user="root",
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        expected: dict[str, str] = task.grader.payload["expected"]
        evidence = read_log(raw)
        found = parse_summary(evidence.body if evidence.began else "")
        names: tuple[str, str] | None = None
        results = dict(found)
        if self._options.canaries:
            canaries = Canaries.of(raw.nonce, taken=expected)
            names = (canaries.passing.partition("::")[2], canaries.failing.partition("::")[2])
            for name in names:
                if name not in expected:
                    results.pop(name, None)
        resolved = bool(expected) and results == expected
        return judge_log(
            grader=self.name,
            version=self.version,
            raw=raw,
            evidence=evidence,
            claim=Claim(statuses=found, official=resolved, strict=resolved, outcomes=_outcomes(expected, results)),
            canaries=names,
            canaries_may_be_absent=True,
        )


def parse_summary(log: str) -> dict[str, str]:
    """R2E-Gym's reading of `pytest -rA`: of each line after "short test summary info" the test's name without its file,
    its parts joined by dots. Only a line that begins with a status counts; upstream takes the word from anywhere in it,
    and a test that fails with the message "PASSED" passes there."""
    _, found, summary = _ANSI.sub("", log).partition("short test summary info")
    statuses: dict[str, str] = {}
    for line in summary.split("\n") if found else ():
        status, _, rest = line.strip().partition(" ")
        if status in ("PASSED", "FAILED", "ERROR") and rest:
            statuses[".".join(rest.split(" - ")[0].split("::")[1:])] = status
    return statuses


def _script(folder: str) -> str:
    return "\n".join(
        [
            f"cd {shlex.quote(folder)}",
            f"ln -sfn {_TESTS} r2e_tests",
            f": '{START}'",
            "bash ./run_tests.sh",
            f": '{END}'",
        ]
    )


def _expected(row: Row) -> dict[str, str]:
    name, value = row.find(*fields("expected_output_json"))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise row.error(name, f"is not JSON: {e}") from e
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise row.error(name, "is not an object of test names and statuses")
    expected: dict[str, str] = {}
    for test, status in cast("Mapping[Any, Any]", value).items():
        if not isinstance(test, str) or status not in _STATUSES:
            raise row.error(name, f"holds {status!r} where a status is expected")
        expected[_ANSI.sub("", test).split(" - ")[0]] = str(status)
    return expected


def _outcomes(expected: Mapping[str, str], results: Mapping[str, str]) -> tuple[TestOutcome, ...]:
    """`passed` is a test that ended as recorded."""
    outcomes: list[TestOutcome] = []
    for name, status in expected.items():
        got = results.get(name)
        word = "" if got == "PASSED" else f"{got or 'no result'}, recorded as {status}"
        if got == status:
            outcomes.append(TestOutcome(id=name, status="passed", message=word))
        else:
            outcomes.append(TestOutcome(id=name, status="missing" if got is None else "failed", message=word))
    outcomes += [
        TestOutcome(id=name, status="failed", message=f"{status}, recorded as no result")
        for name, status in results.items()
        if name not in expected
    ]
    return tuple(outcomes)
