"""The protocols around SWE-bench: whose rows they take, what their logs are worth, what their patches mean."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import ConfigError, GradingFailed, TaskError
from rollwright.graders import Grader, RawRun, TestPlan
from rollwright.graders.grading import judge_run
from rollwright.graders.pytest_run import Canaries
from rollwright.graders.r2e_gym import R2eGym, parse_summary
from rollwright.graders.swe_gym import SweGym
from rollwright.graders.swebench import SweBench
from rollwright.graders.swebench_log import END, EXIT, START, parse_pytest_summary, parse_pytest_verbose
from rollwright.graders.swebench_package import problem
from rollwright.graders.swerebench_v2 import SweRebenchV2, without_time
from rollwright.graders.swesmith import SweSmith, reverse_patch
from rollwright.types import Task, Verdict, VerdictStatus

NONCE = "5f" * 16
RESOLVED, UNRESOLVED, TAMPERED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED, VerdictStatus.TAMPERED
needs_package = pytest.mark.skipif(problem() is not None, reason="the swebench package is not installed")
TEST_PATCH = "diff --git a/t/test_a.py b/t/test_a.py\n--- a/t/test_a.py\n+++ b/t/test_a.py\n@@ -1 +1,2 @@\n x\n+y\n"
BUG = "diff --git a/a.py b/a.py\nindex 1111111..2222222 100644\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-good\n+bad\n"
BASE = {"problem_statement": "It is broken.", "FAIL_TO_PASS": ["t/test_a.py::test_new"]}
P2P = ["t/test_b.py::test_old"]
SMITH = BASE | {
    "instance_id": "o__r.0123abcd.lm_rewrite__x",
    "repo": "swesmith/o__r.0123abcd",
    "image_name": "swesmith.x86_64.o__r.0123abcd",
    "patch": BUG,
    "PASS_TO_PASS": P2P,
}
GYM = BASE | {
    "instance_id": "dask__dask-9378",
    "repo": "dask/dask",
    "version": "2022.8",
    "base_commit": "c" * 40,
    "patch": BUG,
    "test_patch": TEST_PATCH,
    "PASS_TO_PASS": json.dumps(P2P),
}
REBENCH = BASE | {
    "instance_id": "o__r-7",
    "repo": "o/r",
    "image_name": "docker.io/swerebenchv2/o-r:7-0123abc",
    "base_commit": "c" * 40,
    "patch": BUG,
    "test_patch": TEST_PATCH,
    "PASS_TO_PASS": P2P,
    "install_config": {"log_parser": "parse_log_pytest", "test_cmd": ["pytest -rA t/test_a.py t/test_b.py"]},
}
R2E = {
    "docker_image": "namanjain12/pandas_final:abc",
    "commit_hash": "abc",
    "problem_statement": "Look: [ISSUE]\nIt is broken.\n[/ISSUE]",
    "expected_output_json": json.dumps({"\u001b[1mTestA.test_x\u001b[0m": "PASSED", "test_y - boom": "FAILED"}),
    "parsed_commit_content": "{}",
}
SWEBENCH = GYM | {
    "repo": "o/r",
    "image": "img",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
    "eval_script": f"git apply -v -\n: '{START}'\npytest -rA t/test_a.py\n: '{END}'\n",
    "image_assets": "{}",
}
ALL: list[tuple[Grader, dict[str, Any]]] = [
    (SweSmith(), SMITH),
    (SweGym(), GYM),
    (SweRebenchV2(), REBENCH),
    (R2eGym(), R2E),
]
NAMES = [grader.name for grader, _ in ALL]


def parse(grader: Grader, row: dict[str, Any]) -> Task:
    return grader.parse(row, where="tasks.jsonl line 3")


def script_of(plan: TestPlan) -> str:
    return next(data for path, data in plan.files.items() if path.endswith("eval.sh")).decode()


def log(*results: str, exit_code: int = 1, began: bool = True) -> bytes:
    lines = [f"+ : 'rollwright {NONCE} script'"]
    if began:
        lines += [f"+ : 'rollwright {NONCE} begin'", f"+ : '{START}'", *results]
        lines += [f"+ SWEBENCH_TEST_EXIT_CODE={exit_code}", f"+ : '{END}'", f"+ echo '{EXIT}: {exit_code}'"]
        lines += [f"{EXIT}: {exit_code}", f"+ : 'rollwright {NONCE} end {exit_code}'"]
    return "\n".join(lines).encode()


def judge(grader: Grader, row: dict[str, Any], data: bytes, exit_code: int = 0) -> Verdict:
    raw = RawRun(state="exited", exit_code=exit_code, log=data, reports={}, seconds=1.0, nonce=NONCE)
    return judge_run(grader, parse(grader, row), raw)


# --------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(("grader", "row"), ALL, ids=NAMES)
def test_a_row_becomes_a_task_that_hides_its_answers(grader: Grader, row: dict[str, Any]) -> None:
    task = parse(grader, row)
    assert grader.check(task) == []
    assert task.agent.prompt == "It is broken."
    seen = repr(task.agent)
    for hidden in (
        "good",
        "bad",
        "test_new",
        "test_old",
        "c" * 40,
        "r2e_tests",
        str(row.get("instance_id", "abc"))[-9:],
    ):
        assert hidden not in seen.replace(task.agent.image, "")


@pytest.mark.parametrize(("grader", "row"), ALL, ids=NAMES)
def test_a_row_of_another_protocol_is_called_by_its_name(grader: Grader, row: dict[str, Any]) -> None:
    for other, foreign in ALL:
        if other is not grader:
            with pytest.raises(TaskError, match=f"looks like a row of the {other.name} protocol"):
                parse(grader, foreign)
            with pytest.raises(TaskError, match=other.name):
                parse(grader, {"prompt": "p", "metadata": {"remote_env_info": foreign}})


@pytest.mark.parametrize(("grader", "row"), ALL, ids=NAMES)
def test_a_row_without_tests_is_refused(grader: Grader, row: dict[str, Any]) -> None:
    empty = row | ({"expected_output_json": "{}"} if grader.name == "r2e_gym" else {"FAIL_TO_PASS": []})
    assert "is empty" in grader.check(parse(grader, empty))[0]


@pytest.mark.parametrize(
    ("grader", "row", "field"),
    [
        (SweSmith(), SMITH | {"patch": None}, "patch"),
        (SweSmith(), SMITH | {"patch": "diff --git a/x b/x\nGIT binary patch\n"}, "patch"),
        (SweSmith(), SMITH | {"FAIL_TO_PASS": ["../x.py::test"]}, "FAIL_TO_PASS"),
        (SweSmith(), SMITH | {"problem_statement": ""}, "problem_statement"),
        (SweGym(), GYM | {"test_patch": 3}, "test_patch"),
        (SweGym(), GYM | {"repo": None, "test_patch": None}, "repo"),
        (SweRebenchV2(), REBENCH | {"repo": "r"}, "repo"),
        (SweRebenchV2(), REBENCH | {"repo": "o/.."}, "repo"),
        (SweRebenchV2(), REBENCH | {"install_config": {"log_parser": "x"}}, "test_cmd"),
        (SweRebenchV2(), REBENCH | {"install_config": {"log_parser": "x", "test_cmd": [" "]}}, "test_cmd"),
        (SweRebenchV2(), REBENCH | {"install_config": {"test_cmd": "x"}}, "log_parser"),
        (SweRebenchV2(), REBENCH | {"image_name": None}, "image_name"),
        (R2eGym(), R2E | {"expected_output_json": "{oops"}, "expected_output_json"),
        (R2eGym(), R2E | {"expected_output_json": '{"a": "MAYBE"}'}, "expected_output_json"),
        (R2eGym(), R2E | {"docker_image": None}, "docker_image"),
    ],
)
def test_a_malformed_row_is_an_error_with_the_field(grader: Grader, row: dict[str, Any], field: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse(grader, row)
    assert field in caught.value.details["field"]


@pytest.mark.parametrize("kind", [SweSmith, SweGym, SweRebenchV2, R2eGym])
def test_a_bad_option_is_named(kind: Any) -> None:
    for options in ({"seconds": -1}, {"prompt": "no place"}):
        with pytest.raises(ConfigError, match=f"grading.{kind.name}.{next(iter(options))}"):
            kind(**options)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from([TEST_PATCH, BUG, "[", "[" * 100_000, "{}", "[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.sampled_from([*ALL, (SweBench(), SWEBENCH)]),
    st.dictionaries(st.sampled_from([*SMITH, *REBENCH, *R2E, *SWEBENCH, "workdir"]), json_values, max_size=3),
)
def test_no_row_does_worse_than_a_task_error(pair: tuple[Grader, dict[str, Any]], changes: dict[str, Any]) -> None:
    grader, row = pair
    for data in (row | changes, {"metadata": row | changes}, changes):
        try:
            task = grader.parse(data, where="row")
        except TaskError:
            continue
        if not grader.check(task):
            grader.plan(task, nonce=NONCE)


def test_a_repository_that_is_no_name_is_an_error_of_the_row() -> None:
    with pytest.raises(TaskError, match="repo"):
        SweBench().parse(SWEBENCH | {"repo": []}, where="row")


ROWS = Path(__file__).parents[4] / "shared" / "data" / "rows"


@pytest.mark.skipif(not ROWS.is_dir(), reason="the example rows are not part of the repository")
def test_real_rows_are_understood() -> None:
    smith = parse(SweSmith(), json.loads((ROWS / "swesmith" / "pandas_pr_53652.json").read_text()))
    assert smith.agent.image == "jyangballin/swesmith.x86_64.pandas-dev_1776_pandas.95280573"
    assert smith.grader.hidden_paths == ("/testbed/pandas/tests/indexing/test_datetime.py",)
    rebench = parse(SweRebenchV2(), json.loads((ROWS / "swerebench_v2" / "sample.json").read_text())[0])
    assert rebench.agent.workdir == "/netcdf-c"
    assert problem() is not None or SweRebenchV2().check(rebench) == []
    for line in (ROWS / "swegym" / "swerl_gen_5rows.jsonl").read_text().splitlines():
        gym = parse(SweGym(), json.loads(line))
        assert gym.agent.image.startswith("xingyaoww/sweb.eval.x86_64.")
        assert "_s_" in gym.agent.image
        assert SweGym().check(gym) == []


# --------------------------------------------------------------------------- swesmith


def test_the_patch_of_swesmith_is_the_bug_and_its_reverse_the_gold(tmp_path: Path) -> None:
    def git(*args: str, stdin: bytes = b"") -> bytes:
        return subprocess.run(["git", *args], cwd=tmp_path, check=True, capture_output=True, input=stdin).stdout

    git("init", "-q", ".")
    (tmp_path / "kept.py").write_text("".join(f"line {n}\n" for n in range(30)))
    (tmp_path / "gone.py").write_text("a\nb")
    (tmp_path / "moved.py").write_text("".join(f"moved {n}\n" for n in range(30)))
    (tmp_path / "x.sh").write_text("-- not a header\n++ neither\n")
    git("add", "-A")
    before = git("write-tree")
    text = (tmp_path / "kept.py").read_text()
    (tmp_path / "kept.py").write_text(text.replace("line 3\n", "").replace("line 20\n", "twenty\n\nmore"))
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("n\n")
    (tmp_path / "moved.py").rename(tmp_path / "elsewhere.py")
    (tmp_path / "x.sh").write_text("-- not a header either\n")
    (tmp_path / "x.sh").chmod(0o755)
    git("add", "-A")
    bug = git("diff", "--cached", "-M", before.decode().strip())
    assert b"rename from" in bug
    git("apply", "--index", stdin=reverse_patch(bug.decode()))
    assert git("write-tree") == before


def test_the_bug_is_planted_and_the_tests_that_it_breaks_are_hidden() -> None:
    task = parse(SweSmith(), SMITH)
    assert task.grader.base_patch == BUG.encode()
    assert task.grader.gold_patch == reverse_patch(BUG)
    assert b"+good\n-bad\n" in task.grader.gold_patch
    assert task.grader.hidden_paths == ("/testbed/t/test_a.py",)
    plan = SweSmith(protect="official").plan(task, nonce=NONCE)
    assert set(plan.protected) == {"t/test_a.py", "t/test_b.py"}
    assert plan.user == "agent"


@pytest.mark.parametrize("repo", ["swesmith/tornadoweb__tornado.d5ac65c1", "swesmith/python__mypy.e93f06ce"])
def test_a_repository_without_a_pytest_profile_is_refused(repo: str) -> None:
    assert "not tested by SWE-smith's pytest profile" in SweSmith().check(parse(SweSmith(), SMITH | {"repo": repo}))[0]
    go = SMITH | {"FAIL_TO_PASS": ["TestAdd"]}
    assert "not a pytest node id" in SweSmith().check(parse(SweSmith(), go))[0]


def canary_lines(folder: str, form: str = "{status} {name}") -> list[str]:
    canary = Canaries.of(NONCE, folder)
    pairs = (("PASSED", canary.passing), ("FAILED", canary.failing))
    return [form.format(status=status, name=name) for status, name in pairs]


def test_a_missing_test_of_swesmith_fails() -> None:
    ours = canary_lines("t/", "{name} {status} [ 50%]")
    good = ["t/test_a.py::test_new PASSED [ 10%]", "t/test_b.py::test_old PASSED [ 20%]"]
    assert judge(SweSmith(), SMITH, log(*good, *ours)).status == RESOLVED
    for results in (good[:1], good[1:], []):
        verdict = judge(SweSmith(), SMITH, log(*results, *ours))
        assert verdict.status == UNRESOLVED
        assert "missing" in {t.status for t in verdict.tests}
    assert judge(SweSmith(), SMITH, log(*good, exit_code=0)).status == TAMPERED


# --------------------------------------------------------------------------- swe_gym


def test_a_gym_row_brings_its_script_in_three_ways() -> None:
    made = SweGym().plan(parse(SweGym(), GYM), nonce=NONCE)
    assert "pytest -rA --color=no t/test_a.py " in script_of(made)
    assert made.test_patch == TEST_PATCH.encode()
    setup = f"#!/bin/bash\ncd /testbed\ngit checkout {'c' * 40} t/test_a.py\n"
    nemo = GYM | {"setup_script": setup, "test_script": "#!/bin/bash\ncd /testbed\npytest -n0 -rA t/test_a.py\n"}
    skyrl = GYM | {
        "eval_script": f"{setup}git apply -v - <<'EOF_114329324912'\n{TEST_PATCH}\nEOF_114329324912\n"
        f"pytest -n0 -rA t/test_a.py\ngit checkout {'c' * 40} t/test_a.py\n"
    }
    for row in (nemo, skyrl):
        task = parse(SweGym(), row)
        assert SweGym().check(task) == []
        plan = SweGym().plan(task, nonce=NONCE)
        lines = script_of(plan).splitlines()
        begin = lines.index(f": '{START}'")
        assert lines[begin + 1].startswith("pytest -n0 -rA t/test_a.py ")
        assert lines[begin + 3] == f": '{END}'"
        assert plan.test_patch == b""
    strange = SweGym().check(parse(SweGym(), GYM | {"eval_script": "pytest\n"}))
    assert "where its tests begin" in strange[0]


def test_a_gym_log_is_judged_by_its_summary() -> None:
    ours = canary_lines("t/")
    assert (
        judge(SweGym(), GYM, log("PASSED t/test_a.py::test_new", "XFAIL t/test_b.py::test_old", *ours)).status
        == RESOLVED
    )
    assert judge(SweGym(), GYM, log("SKIPPED t/test_a.py::test_new", f"PASSED {P2P[0]}", *ours)).status == UNRESOLVED


# --------------------------------------------------------------------------- swerebench_v2


def test_rebench_applies_the_tests_patch_with_upstreams_tolerance_before_its_commands() -> None:
    many = REBENCH | {"install_config": {"log_parser": "parse_log_pytest", "test_cmd": ["make", "make check"]}}
    plan = SweRebenchV2().plan(parse(SweRebenchV2(), many), nonce=NONCE)
    lines = script_of(plan).splitlines()
    apply = next(i for i, line in enumerate(lines) if line.startswith("git apply"))
    assert "--3way --recount --ignore-space-change --whitespace=nowarn" in lines[apply]
    begin = lines.index(f": '{START}'")
    assert apply < begin
    assert lines[begin + 1 : begin + 5] == ["( set -e", "make", "make check", ")"]
    assert plan.files[f"/var/rollwright-tests/{NONCE}/test.patch"] == TEST_PATCH.encode()
    assert "t/test_a.py" in plan.protected


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("adds [1.34 ms]", "adds"),
        ("adds [12 s]", "adds"),
        ("hash in 29.08 msec ok", "hash ok"),
        ("adds (123ms)", "adds"),
        ("adds (1.5s)", "adds"),
        ("adds [a] (b)", "adds [a] (b)"),
        ("t.py::test[3]", "t.py::test[3]"),
    ],
)
def test_times_are_no_part_of_a_name(name: str, bare: str) -> None:
    assert without_time(name) == bare


def test_a_rebench_log_is_judged_by_the_rows_parser_and_a_failed_test_patch_is_no_verdict() -> None:
    ours = canary_lines("t/")
    good = ["PASSED t/test_a.py::test_new", "PASSED t/test_b.py::test_old"]
    assert judge(SweRebenchV2(), REBENCH, log(*good, *ours)).status == RESOLVED
    assert judge(SweRebenchV2(), REBENCH, log(good[0], *ours)).status == UNRESOLVED
    with pytest.raises(GradingFailed, match="does not apply"):
        judge(SweRebenchV2(), REBENCH, log(began=False), exit_code=3)


@needs_package
def test_a_parser_of_the_package_reads_a_rebench_log() -> None:
    go = REBENCH | {
        "FAIL_TO_PASS": ["TestNew"],
        "PASS_TO_PASS": ["TestOld"],
        "install_config": {"log_parser": "parse_log_gotest", "test_cmd": "go test -v ./..."},
    }
    assert (
        judge(SweRebenchV2(), go, log("--- PASS: TestNew (0.00s)", "--- PASS: TestOld (0.01s)", exit_code=0)).status
        == RESOLVED
    )
    assert judge(SweRebenchV2(), go, log("--- FAIL: TestNew (0.00s)", "--- PASS: TestOld (0.01s)")).status == UNRESOLVED
    unknown = go | {"install_config": {"log_parser": "parse_log_dart", "test_cmd": "x"}}
    assert "'parse_log_dart'" in SweRebenchV2().check(parse(SweRebenchV2(), unknown))[0]


# --------------------------------------------------------------------------- r2e_gym


def test_the_hidden_tests_of_r2e_are_taken_from_the_agent() -> None:
    task = parse(R2eGym(), R2E)
    assert task.grader.hidden_paths == ("/r2e_tests", "/testbed/run_tests.sh")
    assert task.grader.payload["expected"] == {"TestA.test_x": "PASSED", "test_y": "FAILED"}
    plan = R2eGym().plan(task, nonce=NONCE)
    assert any(path.startswith("/r2e_tests/test_") for path in plan.files)
    assert {"r2e_tests/**", "run_tests.sh"} <= set(plan.protected)


SUMMARY = "===== short test summary info ====="


@pytest.mark.parametrize(
    ("results", "exit_code", "status"),
    [
        (["PASSED r2e_tests/test_1.py::TestA::test_x", "FAILED r2e_tests/test_1.py::test_y - boom"], 1, RESOLVED),
        (["PASSED r2e_tests/test_1.py::TestA::test_x", "PASSED r2e_tests/test_1.py::test_y"], 0, UNRESOLVED),
        (["PASSED r2e_tests/test_1.py::TestA::test_x"], 0, UNRESOLVED),
        (
            [
                "PASSED r2e_tests/test_1.py::TestA::test_x",
                "FAILED r2e_tests/test_1.py::test_y",
                "PASSED r2e_tests/test_1.py::test_z",
            ],
            1,
            UNRESOLVED,
        ),
        ([], 0, UNRESOLVED),
    ],
)
def test_every_status_of_r2e_must_be_the_recorded_one(
    results: list[str], exit_code: int, status: VerdictStatus
) -> None:
    assert judge(R2eGym(), R2E, log(SUMMARY, *results, exit_code=exit_code)).status == status


def test_canaries_of_r2e_count_where_they_were_collected() -> None:
    good = ["PASSED r2e_tests/test_1.py::TestA::test_x", "FAILED r2e_tests/test_1.py::test_y - boom"]
    canary = Canaries.of(NONCE)
    seen = [f"PASSED r2e_tests/{canary.passing}", f"FAILED r2e_tests/{canary.failing}"]
    assert judge(R2eGym(), R2E, log(SUMMARY, *good, *seen)).status == RESOLVED
    bent = [line.replace("FAILED", "PASSED") for line in seen]
    assert judge(R2eGym(), R2E, log(SUMMARY, *good, *bent)).status == TAMPERED
    assert judge(R2eGym(), R2E, log(SUMMARY, *good, seen[0])).status != RESOLVED


def test_a_word_in_a_message_is_no_status() -> None:
    assert parse_summary(f"{SUMMARY}\nFAILED r2e_tests/t.py::test_a - PASSED\n") == {"test_a": "FAILED"}
    assert parse_summary("PASSED r2e_tests/t.py::test_a") == {}


def test_pytest_is_read_in_both_of_its_forms() -> None:
    summary = "PASSED a.py::t[x y] z\n\x1b[31mFAILED\x1b[0m a.py::u - boom PASSED\nSKIPPED [2] a.py:3: no\nPASSEDLY x\n"
    assert parse_pytest_summary(summary) == {"a.py::t[x": "PASSED", "a.py::u": "FAILED"}
    verbose = "a.py::t PASSED   [ 10%]\na.py::u FAILED\na.py::v SKIPPED (no)\nPASSED a.py::t\n"
    assert parse_pytest_verbose(verbose) == {"a.py::t": "PASSED", "a.py::u": "FAILED", "a.py::v": "SKIPPED"}
