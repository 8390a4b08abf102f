"""Commands: an exit code is a weak verdict, a report that agrees with it is a real one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError, TaskError
from rollwright.graders import RawRun
from rollwright.graders.command import Command
from rollwright.graders.command_reports import read_report
from rollwright.graders.grading import judge_run
from rollwright.graders.junit import BadReport
from rollwright.types import Task, Verdict, VerdictStatus

RESOLVED, UNRESOLVED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED
NONCE = "5f" * 16


def parse(**extra: Any) -> Task:
    meta = {"image": "i", "workdir": "/w", "problem_statement": "p", "command": "make test"} | extra
    return Command().parse({"metadata": meta}, where="rows line 1")


def verdict(task: Task, report: bytes | None, exit_code: int = 0, log: bytes = b"", state: Any = "exited") -> Verdict:
    plan = Command().plan(task, nonce=NONCE)
    reports = dict.fromkeys((*plan.reports, *plan.outputs), report)
    raw = RawRun(state=state, exit_code=exit_code, log=log, reports=reports, seconds=1, nonce=NONCE)
    return judge_run(Command(), task, raw)


def test_an_exit_code_is_not_for_training() -> None:
    good, bad = verdict(parse(), None), verdict(parse(), None, 1)
    assert (good.status, good.trainable) == (RESOLVED, False)
    assert (bad.status, bad.trainable) == (UNRESOLVED, False)
    assert verdict(parse(), None, state="timeout").status == VerdictStatus.TEST_TIMEOUT
    assert "exit_code_only" in good.signals


GOOD = b'<testsuite><testcase classname="t.x" name="a"/></testsuite>'
BAD = GOOD.replace(b"</testsuite>", b'<testcase classname="t.x" name="b"><failure/></testcase></testsuite>')


@pytest.mark.parametrize(
    ("report", "exit_code", "status"),
    [
        (GOOD, 0, RESOLVED),
        (GOOD, 1, UNRESOLVED),
        (BAD, 1, UNRESOLVED),
        (BAD, 0, UNRESOLVED),
        (b"<testsuite/>", 0, UNRESOLVED),
        (b"<oops", 0, UNRESOLVED),
        (None, 0, UNRESOLVED),
    ],
)
def test_report_and_exit_code_must_agree(report: bytes | None, exit_code: int, status: VerdictStatus) -> None:
    found = verdict(parse(report="junit"), report, exit_code)
    assert (found.status, found.trainable) == (status, True)


def test_named_tests_decide_and_others_may_fail() -> None:
    task = parse(report="junit", FAIL_TO_PASS=["t/x.py::a"])
    assert verdict(task, BAD, 1).status == RESOLVED
    assert verdict(task, BAD, 0).status == UNRESOLVED  # such a run cannot end with 0
    missing = verdict(parse(report="junit", FAIL_TO_PASS=["t.x::c"]), GOOD)
    assert [(t.id, t.status) for t in missing.tests if t.expected] == [("t.x::c", "missing")]
    assert missing.status == UNRESOLVED


def test_tap_may_be_the_output_itself() -> None:
    task = parse(report={"format": "tap", "path": "-"})
    assert verdict(task, None, log=b"1..2\nok 1 - a\nok 2 - b\n").status == RESOLVED
    assert verdict(task, None, log=b"1..2\nok 1 - a\n").status == UNRESOLVED


def test_a_report_without_a_path_gets_a_secret_one() -> None:
    plan = Command().plan(parse(report="junit", command=["t", "--out={report}"]), nonce=NONCE)
    assert NONCE in plan.reports[0]
    assert plan.argv == ("t", f"--out={plan.reports[0]}")
    assert plan.env["ROLLWRIGHT_REPORT"] == plan.reports[0]
    named = Command().plan(parse(report={"format": "ctrf", "path": "/tmp/r.json"}), nonce=NONCE)
    assert named.outputs == ("/tmp/r.json",)


def test_a_shell_command_is_a_file_and_never_a_word() -> None:
    plan = Command().plan(parse(command="a && b", files={"t/new.sh": "#!/bin/sh\n"}), nonce=NONCE)
    assert "a && b" not in " ".join(plan.argv)
    assert b"a && b\n" in plan.files.values()
    assert plan.files["/w/t/new.sh"] == b"#!/bin/sh\n"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"command": None}, "command"),
        ({"command": ["a\0b"]}, "command"),
        ({"report": "xml"}, "report.format"),
        ({"report": {"format": "tap", "path": "x"}}, "report.path"),
        ({"report": {"format": "junit", "path": "-"}}, "report.path"),
        ({"report": 7}, "report"),
        ({"files": {"../x": ""}}, "files"),
        ({"files": {"a/.git/hooks/x": ""}}, "files"),
        ({"workdir": "w"}, "workdir"),
    ],
)
def test_a_bad_row_names_its_field(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse(**extra)
    assert field in caught.value.details["field"]


def test_a_row_of_another_protocol_is_called_by_its_name() -> None:
    with pytest.raises(TaskError, match="swebench_pro"):
        Command().parse({"dockerhub_tag": "x"}, where="w")


def test_tests_without_a_report_to_find_them_in_are_a_problem() -> None:
    assert Command().check(parse(FAIL_TO_PASS=["a"]))
    assert Command().check(parse(FAIL_TO_PASS=["a"], report="tap")) == []


@pytest.mark.parametrize("options", [{"seconds": 0}, {"prompt": "x"}])
def test_a_bad_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"grading.command.{next(iter(options))}"):
        Command(**options)


# --------------------------------------------------------------------------- reports


def test_ctrf_is_read_and_the_worst_of_one_name_counts() -> None:
    tests = [
        {"name": "a", "suite": "s", "status": "passed", "duration": 1500},
        {"name": "a", "suite": ["s"], "status": "failed"},
        {"name": "b", "status": "pending"},
        {"name": "c", "status": "other"},
    ]
    cases = read_report(json.dumps({"results": {"tests": tests}}).encode(), "ctrf")
    assert {name: case.status for name, case in cases.items()} == {"s.a": "failed", "b": "skipped", "c": "error"}


def test_tap_knows_directives_numbers_and_subtests() -> None:
    text = (
        b"TAP version 14\n1..5\nok 1 - a\n    not ok 1 - inner\nnot ok 2 b\nok 3 # skip why\nnot ok 4 - d # TODO\nok\n"
    )
    cases = read_report(text, "tap")
    assert {n: c.status for n, c in cases.items()} == {
        "a": "passed",
        "b": "failed",
        "3": "skipped",
        "d": "xfailed",
        "5": "passed",
    }


@pytest.mark.parametrize("text", [b"", b"ok 1\n", b"1..2\nok\n", b"1..1\n1..1\nok\n", b"1..1\nok\nBail out! no\n"])
def test_a_tap_run_that_did_not_finish_is_no_report(text: bytes) -> None:
    with pytest.raises(BadReport):
        read_report(text, "tap")


@given(st.binary(max_size=100), st.sampled_from(["junit", "ctrf", "tap"]))
def test_no_bytes_do_worse_than_a_bad_report(data: bytes, format: Any) -> None:
    for text in (data, b'{"results": {"tests": [' + data + b"]}}", b"1..1\nok " + data):
        try:
            read_report(text, format)
        except BadReport:
            continue
