"""Rows of SWE-bench become tasks, and logs get the package's verdict unless they contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import ConfigError, GradingFailed, TaskError
from rollwright.graders import RawRun
from rollwright.graders.diff import FileChange
from rollwright.graders.grading import judge_run, protected_changes
from rollwright.graders.pytest_run import Canaries
from rollwright.graders.swebench import SweBench, paths_of_tests
from rollwright.graders.swebench_log import canaries_for, has_markers, mark
from rollwright.graders.swebench_package import problem
from rollwright.types import Task, Verdict, VerdictStatus

NONCE = "5f" * 16
needs_package = pytest.mark.skipif(problem() is not None, reason="the swebench package is not installed")
TEST_PATCH = "diff --git a/t/test_a.py b/t/test_a.py\n--- a/t/test_a.py\n+++ b/t/test_a.py\n@@ -1 +1,2 @@\n x\n+y\n"
F2P, P2P = ["t/test_a.py::test_new", "t/test_a.py::test_cut[log(photon"], ["t/test_a.py::test_old"]


def script(command: str = "pytest -rA t/test_a.py") -> str:
    return (
        "#!/bin/bash\nset -uxo pipefail\nsource /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed\n"
        "git checkout 0123456789abcdef0123456789abcdef01234567 t/test_a.py t/data.json\n"
        f"git apply -v - <<'EOF_114329324912'\n{TEST_PATCH}\nEOF_114329324912\n"
        f": '>>>>> Start Test Output'\n{command}\n: '>>>>> End Test Output'\n"
        "git checkout 0123456789abcdef0123456789abcdef01234567 t/test_a.py\n"
    )


def new_row(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "o__r-1",
        "repo": "o/r",
        "version": "1.0",
        "base_commit": "c" * 40,
        "image": "img",
        "problem_statement": "It is broken.",
        "patch": "gold",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": repr(P2P),
        "eval_script": script(),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        **changes,
    }


CLASSIC = {
    "repo": "django/django",
    "instance_id": "django__django-16255",
    "base_commit": "444b6da7cc229a58a2c476a52e45233001dc7073",
    "patch": "diff --git a/a b/a\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "It is broken.",
    "hints_text": "",
    "created_at": "2022-11-04T13:49:40Z",
    "version": "4.2",
    "FAIL_TO_PASS": '["test_callable_sitemod_no_items (sitemaps_tests.test_http.HTTPSitemapTests)"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": None,
}


def parse(row: dict[str, Any], **options: Any) -> Task:
    return SweBench(**options).parse(row, where="tasks.jsonl line 3")


# --------------------------------------------------------------------------- rows


def test_a_row_of_swebench_5_is_understood() -> None:
    task = parse(new_row())
    assert (task.agent.image, task.agent.workdir, task.agent.prompt) == ("img", "/testbed", "It is broken.")
    assert task.grader.payload["fail_to_pass"] == tuple(F2P)
    assert task.grader.payload["pass_to_pass"] == tuple(P2P)
    assert task.grader.gold_patch == b"gold\n"


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"prompt": "x", "metadata": {"remote_env_info": r}}])
def test_a_classic_row_is_understood_flat_and_as_slime_carries_it(wrap: Any) -> None:
    task = parse(wrap(CLASSIC))
    assert task.agent.image == "swebench/sweb.eval.x86_64.django_1776_django-16255:latest"
    assert task.grader.source_id == "django__django-16255"


def test_slimes_own_image_and_workdir_win() -> None:
    row = {"metadata": {"image": "mine", "workdir": "/app/", "remote_env_info": CLASSIC}}
    assert (parse(row).agent.image, parse(row).agent.workdir) == ("mine", "/app")


def test_nothing_hidden_reaches_the_agent() -> None:
    seen = repr(parse(new_row()).agent)
    for hidden in ("gold", "test_new", "o__r-1", "c" * 40, "EOF_"):
        assert hidden not in seen


@pytest.mark.parametrize(
    ("row", "field", "words"),
    [
        (new_row(repo=None), "repo", "missing"),
        (new_row(instance_id=7), "instance_id", "not a string"),
        (new_row(FAIL_TO_PASS="[oops"), "FAIL_TO_PASS", "list"),
        (new_row(eval_script="", test_patch=None), "test_patch", "nothing to run"),
        (new_row(eval_script="", version=None), "version", "nothing to run"),
        (new_row(image_assets="{oops"), "image_assets", "not JSON"),
        (new_row(image_assets="[]"), "image_assets", "not an object"),
        (new_row(problem_statement=None), "problem_statement", "missing"),
        ({"image_name": "i", "patch": "p", "FAIL_TO_PASS": ["a"]}, "test_patch", "swesmith"),
        ({"install_config": {"a": 1}, "image_name": "i"}, "test_patch", "swerebench_v2"),
        ({"expected_output_json": "{}"}, "test_patch", "r2e_gym"),
        ({"f2p_script": "def test(): pass"}, "test_patch", "scaleswe"),
        ({"swepro": {"a": 1}}, "test_patch", "swebench_pro"),
        (CLASSIC | {"repo": "dask/dask"}, "test_patch", "swe_gym"),
        ({"org": "o", "fix_patch": "p", "test_patch": "p"}, "test_patch", "multi_swe_bench"),
        ({"test_cmds": ["x"], "print_cmds": ["x"]}, "test_patch", "swebench_live"),
    ],
)
def test_a_bad_row_is_an_error_with_its_field_and_a_foreign_one_with_its_name(
    row: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(TaskError) as caught:
        parse(row)
    assert caught.value.message.startswith("tasks.jsonl line 3: ")
    assert field in caught.value.details["field"]
    assert words in caught.value.message


ROWS = Path(__file__).parents[4] / "shared" / "data" / "rows" / "swebench"


@pytest.mark.skipif(not ROWS.is_dir(), reason="the example rows are not part of the repository")
def test_real_rows_are_understood_and_their_tests_are_protected() -> None:
    count = 0
    for file in sorted(ROWS.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if "responses_create_params" in row:
                row = json.loads(row["responses_create_params"]["metadata"]["instance_dict"])
            task = parse(row)
            assert task.grader.payload["fail_to_pass"]
            assert paths_of_tests(row["test_patch"], "")
            count += 1
    assert count == 25


@needs_package
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FAIL_TO_PASS": "[]"}, "any patch would be resolved"),
        ({"eval_script": "pytest\n"}, "markers"),
        ({"log_parser": "parse_log_mine"}, "no parser 'parse_log_mine'"),
        ({"eval_type": "maybe"}, "'maybe' is neither"),
        ({"image_assets": '{"test_patch": [{"path": "a.png", "url": "http://x"}]}'}, "from the network (a.png)"),
        ({"eval_script": ""}, "has no tables"),
    ],
)
def test_check_says_what_could_never_be_judged(changes: dict[str, Any], words: str) -> None:
    assert SweBench().check(parse(new_row())) == []
    assert words in " ".join(SweBench().check(parse(new_row(**changes))))


@pytest.mark.parametrize(
    "options",
    [{"seconds": 0}, {"verdict": "mine"}, {"protect": "all"}, {"image": "fixed"}, {"prompt": "no place"}],
)
def test_a_bad_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"grading.swebench.{next(iter(options))}"):
        SweBench(**options)


# --------------------------------------------------------------------------- scripts


def test_a_marked_script_is_the_official_one_with_lines_of_ours() -> None:
    marked = mark(script(), NONCE, canaries_for(script(), NONCE)).decode().splitlines()
    canary = Canaries.of(NONCE, "t/")
    assert marked[:3] == ["#!/bin/bash", "set -uxo pipefail", f": 'rollwright {NONCE} script'"]
    ours = [line for line in marked if NONCE in line or "EXIT_CODE" in line]
    rest = [line.removesuffix(f" {canary.path}") for line in marked if line not in ours]
    assert rest == script().splitlines()
    assert marked.index("SWEBENCH_TEST_EXIT_CODE=$?") == marked.index(f"pytest -rA t/test_a.py {canary.path}") + 1


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("pytest -rA t/test_a.py", "t/"),
        ("pytest -rA test_a.py", ""),
        ("python -m pytest --no-header a/b/test_x.py::T::test_y", "a/b/"),
        ("cd x\nPYTHONWARNINGS=ignore pytest t/test_a.py", "t/"),
        ("tox --current-env -epy39 -v -- tests/test_build.py", "tests/"),
        ("./tests/runtests.py --verbosity 2 sitemaps_tests.test_http", None),
        ("bin/test -C --verbose sympy/core/tests/test_x.py", None),
        ("pytest -x t/test_a.py", None),
        ("pytest -k new t/test_a.py", None),
        ("pytest t/test_a.py | tee log", None),
        ("pytest t/test_a.py || true", None),
        ("pytest", None),
        ("pytest /abs/test_a.py", None),
        ("pytest 't/test_a.py", None),
        ("npm test", None),
    ],
)
def test_canaries_go_where_pytest_plainly_runs_files(command: str, folder: str | None) -> None:
    canaries = canaries_for(script(command), NONCE)
    assert canaries == (None if folder is None else Canaries.of(NONCE, folder))


@pytest.mark.parametrize("text", ["", "pytest", ": '>>>>> End Test Output'\n: '>>>>> Start Test Output'"])
def test_a_script_without_markers_in_order_is_not_taken(text: str) -> None:
    assert not has_markers(text)
    assert has_markers(script())


def test_the_files_of_the_tests_are_put_back_and_nothing_else() -> None:
    task = parse(new_row())
    plan = SweBench(protect="official").plan(task, nonce=NONCE)

    def undone(path: str, grader: SweBench) -> bool:
        change = FileChange(path=path.encode(), kind="modified", mode=0o100644)
        return bool(protected_changes(grader.plan(task, nonce=NONCE), "/testbed", (change,)))

    assert set(plan.protected) == {"t/test_a.py", "t/data.json"}
    for path, official, tests in [
        ("t/test_a.py", True, True),
        ("t/data.json", True, True),
        ("conftest.py", False, True),
        ("t/test_b.py", False, True),
        ("src/a.py", False, False),
    ]:
        assert undone(path, SweBench(protect="official")) == undone(path, SweBench(verdict="official")) == official
        assert undone(path, SweBench(protect="tests")) == undone(path, SweBench()) == tests


# --------------------------------------------------------------------------- verdicts

START, END, EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
OUTSIDE = "results_outside_markers"
PASSING = [f"PASSED {F2P[0]}", f"PASSED {F2P[1]})-2]", f"PASSED {P2P[0]}"]


def log(
    *results: str,
    exit_code: int | None = 1,
    canaries: tuple[str, str] | None = ("PASSED", "FAILED"),
    before: str = "",
    after: str = "",
) -> bytes:
    """What a marked script prints."""
    ours = canaries_for(script(), NONCE)
    assert ours is not None
    lines = [f"+ : 'rollwright {NONCE} script'", "+ git show", before, f"+ : 'rollwright {NONCE} begin'"]
    lines += ["+ : '>>>>> Start Test Output'", "+ pytest", *results]
    if canaries is not None:
        lines += [f"{canaries[0]} {ours.passing}", f"{canaries[1]} {ours.failing} - assert 1 == 2"]
    if exit_code is not None:
        lines += [f"+ SWEBENCH_TEST_EXIT_CODE={exit_code}", "+ : '>>>>> End Test Output'"]
        lines += [f"+ echo '>>>>> Test Exit Code: {exit_code}'", f">>>>> Test Exit Code: {exit_code}"]
        lines += [f"+ : 'rollwright {NONCE} end {exit_code}'", "+ git checkout", after]
    return "\n".join(lines).encode()


def judge(data: bytes, *, state: Any = "exited", row: dict[str, Any] | None = None, **options: Any) -> Verdict:
    raw = RawRun(state=state, exit_code=0, log=data, reports={}, seconds=1.0, nonce=NONCE)
    return judge_run(SweBench(**options), parse(row or new_row()), raw)


@needs_package
def test_all_passed_is_resolved_with_a_cut_id_and_a_version() -> None:
    verdict = judge(log(*PASSING))
    assert verdict.status == VerdictStatus.RESOLVED
    assert verdict.reward == 1.0
    assert verdict.trainable
    assert verdict.signals == ()
    assert verdict.grader_version.startswith("1+swebench-")
    assert [t.status for t in verdict.tests] == ["passed"] * 3


@needs_package
@pytest.mark.parametrize(
    ("results", "status", "word"),
    [
        ([f"FAILED {F2P[0]} - x", *PASSING[1:]], "failed", ""),
        ([f"ERROR {F2P[0]}", *PASSING[1:]], "error", ""),
        (PASSING[1:], "missing", ""),
        ([f"SKIPPED {F2P[0]}", *PASSING[1:]], "skipped", ""),
    ],
)
def test_a_test_to_fix_that_did_not_pass_is_not_resolved(results: list[str], status: str, word: str) -> None:
    verdict = judge(log(*results))
    assert verdict.status == VerdictStatus.UNRESOLVED
    assert verdict.tests[0].status == status


@needs_package
def test_a_skipped_test_that_passed_before_is_no_regression() -> None:
    verdict = judge(log(*PASSING[:2], f"SKIPPED {P2P[0]}"))
    assert verdict.status == VerdictStatus.RESOLVED
    assert verdict.tests[2].message == "counts as passed: SKIPPED"


@needs_package
def test_cut_ids_that_disagree_are_not_resolved() -> None:
    assert judge(log(*PASSING, f"FAILED {F2P[1]})-3]")).status == VerdictStatus.UNRESOLVED


@needs_package
@pytest.mark.parametrize(
    ("data", "status", "signal"),
    [
        (log(*PASSING, exit_code=0), VerdictStatus.TAMPERED, "exit_code_disagrees_with_report"),
        (log(*PASSING, exit_code=3), VerdictStatus.UNRESOLVED, "exit_code_disagrees_with_report"),
        (log(*PASSING, canaries=("PASSED", "PASSED")), VerdictStatus.TAMPERED, "canary_wrong"),
        (log(*PASSING, canaries=None), VerdictStatus.TAMPERED, "canary_missing"),
        (log(canaries=None), VerdictStatus.UNRESOLVED, "canary_missing"),
        (log(exit_code=0, canaries=None), VerdictStatus.TAMPERED, "canary_missing"),
        (log("ERROR t/test_a.py", exit_code=2, canaries=None), VerdictStatus.UNRESOLVED, "canary_missing"),
        (log(*PASSING, ">>>>> End Test Output"), VerdictStatus.TAMPERED, "injected_markers"),
        (log(*PASSING, ">>>>> Test Exit Code: 0"), VerdictStatus.TAMPERED, "injected_markers"),
        (log(before="\r".join(["# ", START, *PASSING, END, f"{EXIT}: 0"])), VerdictStatus.TAMPERED, OUTSIDE),
        (log(before="\n".join(PASSING), exit_code=0, canaries=None), VerdictStatus.TAMPERED, OUTSIDE),
        (log(*PASSING, ">>>>> Tests Errored"), VerdictStatus.UNRESOLVED, "injected_failure_marker"),
        (
            log(*PASSING, "+ : '>>>>> End Test Output'", exit_code=None),
            VerdictStatus.TAMPERED,
            "script_ended_in_the_tests",
        ),
        (log(*PASSING, exit_code=None), VerdictStatus.UNRESOLVED, "script_ended_in_the_tests"),
    ],
)
def test_a_log_that_contradicts_itself_never_resolves(data: bytes, status: VerdictStatus, signal: str) -> None:
    verdict = judge(data)
    assert verdict.status == status, verdict
    assert signal in verdict.signals
    assert verdict.reward == 0.0


@needs_package
def test_without_canaries_the_exit_code_and_the_failures_must_agree() -> None:
    row = new_row(eval_script=script("make check"))
    assert judge(log(*PASSING, exit_code=0, canaries=None), row=row).status == VerdictStatus.RESOLVED
    odd = judge(log(*PASSING, exit_code=1, canaries=None), row=row)
    assert (odd.status, odd.signals) == (
        VerdictStatus.UNRESOLVED,
        ("official_verdict_is_not_resolved", "exit_code_disagrees_with_report"),
    )
    other = judge(log(*PASSING, "FAILED t/test_z.py::test_z", exit_code=1, canaries=None), row=row)
    assert other.status == VerdictStatus.RESOLVED


@needs_package
def test_a_runner_that_names_only_failures_must_show_that_it_ran() -> None:
    row = new_row(eval_type="fail_only", eval_script=script("npm test"), log_parser="parse_log_karma")
    ran = judge(log("Executed 3 of 3 SUCCESS", exit_code=0, canaries=None), row=row)
    assert ran.status == VerdictStatus.RESOLVED
    assert ran.tests[0].message == "counts as passed: no failure"
    assert judge(log("Executed 0 of 0", exit_code=0, canaries=None), row=row).status == VerdictStatus.UNRESOLVED


@needs_package
def test_a_timeout_is_a_verdict_only_if_the_script_had_begun() -> None:
    assert judge(log(exit_code=None, canaries=None), state="timeout").status == VerdictStatus.TEST_TIMEOUT
    with pytest.raises(GradingFailed, match="bash did not start"):
        judge(b"/bin/bash: not found\n", state="exited")
    with pytest.raises(GradingFailed):
        judge(b"", state="timeout")


@needs_package
def test_a_script_that_ends_before_the_tests_is_seen_and_not_resolved() -> None:
    verdict = judge(f"+ : 'rollwright {NONCE} script'\nkilled".encode())
    assert verdict.status == VerdictStatus.UNRESOLVED
    assert verdict.signals[0].startswith("no_report")


@needs_package
def test_an_output_flood_is_not_resolved() -> None:
    assert judge(log(*PASSING), state="output_limit").status == VerdictStatus.UNRESOLVED


@needs_package
def test_the_official_verdict_alone_is_for_comparing_not_for_training() -> None:
    row = new_row(eval_script=script("make check"))
    verdict = judge(log(*PASSING, exit_code=0, canaries=("PASSED", "PASSED")), row=row, verdict="official")
    assert (verdict.status, verdict.trainable) == (VerdictStatus.RESOLVED, False)


# --------------------------------------------------------------------------- conformance

words = st.sampled_from(
    [
        *PASSING,
        *(f"{status} {name}" for status in ("FAILED", "SKIPPED", "ERROR", "XFAIL") for name in (*F2P, *P2P)),
        "FAILED t/test_z.py::test_z - boom",
        "SKIPPED [2] t/test_a.py:3: no",
        "3 passed in 0.1s",
        ">>>>> Start Test Output",
        ">>>>> End Test Output",
        ">>>>> Tests Timed Out",
        ">>>>> Test Exit Code: 0",
        "caf\xe9 \x00\x1b[31m",
        "a\rPASSED t/test_a.py::test_new",
    ]
)


def official_report(data: bytes, row: dict[str, Any], folder: Path) -> bool:
    """`get_eval_report` of a saved log, as its own harness calls it."""
    import importlib

    from rollwright.graders.swebench_package import load_package

    load_package()
    grading, types = importlib.import_module("swebench.harness.grading"), importlib.import_module("swebench.types")
    spec = types.TestSpec(
        instance_id=row["instance_id"],
        image=row["image"],
        eval_script_list=row["eval_script"].split("\n"),
        repo=row["repo"],
        version=row["version"],
        FAIL_TO_PASS=F2P,
        PASS_TO_PASS=P2P,
        log_parser=row["log_parser"],
        eval_type=row["eval_type"],
    )
    file = folder / "test_output.txt"
    file.write_text(data.decode("utf-8", "replace"), encoding="utf-8", newline="")
    prediction = {"instance_id": row["instance_id"], "model_patch": "x", "model_name_or_path": "m"}
    return bool(grading.get_eval_report(spec, prediction, str(file), True)[row["instance_id"]]["resolved"])


@needs_package
@settings(max_examples=60, deadline=None)
@given(
    results=st.lists(words, max_size=8),
    before=st.lists(words, max_size=2),
    exit_code=st.sampled_from([0, 1, 2, None]),
    eval_type=st.sampled_from(["pass_and_fail", "fail_only"]),
)
def test_our_official_verdict_is_get_eval_reports_and_our_strict_one_never_says_more(
    tmp_path_factory: pytest.TempPathFactory,
    results: list[str],
    before: list[str],
    exit_code: int | None,
    eval_type: str,
) -> None:
    row = new_row(eval_script=script("make check"), eval_type=eval_type)
    data = log(*results, exit_code=exit_code, canaries=None, before="\n".join(before))
    expected = official_report(data, row, tmp_path_factory.getbasetemp())
    assert (judge(data, row=row, verdict="official").reward == 1.0) == expected
    strict = judge(data, row=row)
    assert strict.reward <= float(expected)


@needs_package
def test_a_long_log_is_judged_within_seconds() -> None:
    import time

    noise = [f"PASSED t/test_many.py::test_{n:06d}[some parameters that are longer]" for n in range(40_000)]
    data = log(*noise, *PASSING)
    assert len(data) > 2 << 20
    started = time.monotonic()
    assert judge(data).status == VerdictStatus.RESOLVED
    assert time.monotonic() - started < 10
