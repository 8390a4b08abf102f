"""Rows become tasks whose two halves keep apart, and stored runs get the verdict they deserve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError, GradingFailed, TaskError
from rollwright.graders import RawRun
from rollwright.graders.grading import judge_run
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.types import Task, Verdict, VerdictStatus

NONCE = "5f" * 16
SCRIPT = "def test_a():\n    pass\n\nclass TestB:\n    def test_c(self):\n        pass\n"
SHA = "0123456789abcdef0123456789abcdef01234567"


def slime_row(**env: Any) -> dict[str, Any]:
    meta = {
        "image": "img",
        "workdir": "/workspace/repo/",
        "problem_statement": "It is broken.",
        "remote_env_info": {"f2p_script": SCRIPT, "instance_id": f"o__r-{SHA}", **env},
    }
    return {"prompt": "fallback", "label": "x", "metadata": meta}


def parse(row: dict[str, Any], **options: Any) -> Task:
    return ScaleSwe(**options).parse(row, where="tasks.jsonl line 3")


# --------------------------------------------------------------------------- rows


def test_a_row_of_slimes_example_is_understood() -> None:
    task = parse(slime_row(pre_commands="git checkout -f main\\necho 'a b'", patch="diff"))
    assert task.agent.image == "img"
    assert task.agent.workdir == "/workspace/repo"
    assert task.agent.prompt == "It is broken."
    assert task.agent.pre_commands == ("git checkout -f main", "echo 'a b'")
    assert task.grader.gold_patch == b"diff\n"


def test_a_flat_upstream_row_is_understood() -> None:
    row = {
        "instance_id": "u_r_pr7",
        "image_url": "docker/img:1",
        "workdir": "/workspace/r",
        "problem_statement": "p",
        "f2p_script": SCRIPT,
        "f2p_patch": "",
        "FAIL_TO_PASS": '["test_fail_to_pass.py::test_a"]',
        "PASS_TO_PASS": "['tests/t.py::test_b[a-1]', \"tests/t.py::test_c\"]",
        "pre_commands": "",
        "patch": "d\n",
    }
    task = parse(row)
    assert task.agent.image == "docker/img:1"
    assert task.grader.payload["fail_to_pass"] == ("test_fail_to_pass.py::test_a",)
    assert task.grader.payload["pass_to_pass"] == ("tests/t.py::test_b[a-1]", "tests/t.py::test_c")
    assert task.grader.source_id == "u_r_pr7"


def test_metadata_may_be_a_json_string() -> None:
    row = slime_row()
    row["metadata"] = json.dumps(row["metadata"])
    assert parse(row).agent.image == "img"


@pytest.mark.parametrize(
    "prompt", ["say this", [{"role": "system", "content": "s"}, {"role": "user", "content": "say this"}]]
)
def test_the_prompt_column_stands_in_for_a_missing_statement(prompt: object) -> None:
    row = slime_row()
    row["prompt"] = prompt
    del row["metadata"]["problem_statement"]
    assert parse(row).agent.prompt == "say this"


def test_the_prompt_can_be_framed() -> None:
    assert parse(slime_row(), prompt="Fix {this}: {problem_statement}").agent.prompt == "Fix {this}: It is broken."


def test_nothing_hidden_is_in_the_agents_half() -> None:
    task = parse(slime_row(FAIL_TO_PASS=["test_fail_to_pass.py::test_a"], patch="gold", f2p_patch="hidden"))
    seen = repr(task.agent)
    for hidden in (SHA, SHA[:8], "gold", "hidden", "test_a", "f2p"):
        assert hidden not in seen
    assert len(task.id) == 16


def test_the_id_is_the_same_each_time_and_differs_by_row() -> None:
    assert parse(slime_row()).id == parse(slime_row()).id
    assert parse(slime_row()).id != parse(slime_row(x=1)).id


def changed(path: str, value: Any) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(json.dumps(slime_row()))
    *steps, last = path.split(".")
    place: dict[str, Any] = row
    for step in steps:
        place = place[step]
    place[last] = value
    return row


@pytest.mark.parametrize(
    ("row", "field", "words"),
    [
        (changed("metadata.workdir", None), "metadata.workdir", "missing"),
        (changed("metadata.workdir", "repo"), "metadata.workdir", "absolute"),
        (changed("metadata.workdir", "/"), "metadata.workdir", "absolute"),
        (changed("metadata.workdir", "/a/../b"), "metadata.workdir", "absolute"),
        (changed("metadata.image", 7), "metadata.image", "not a string"),
        (changed("metadata.image", ""), "metadata.image", "missing"),
        (changed("metadata.remote_env_info.f2p_script", ""), "metadata.remote_env_info.f2p_script", "nothing to run"),
        (changed("metadata.remote_env_info.f2p_script", ["x"]), "metadata.remote_env_info.f2p_script", "a list"),
        (changed("metadata.remote_env_info.FAIL_TO_PASS", "[oops"), "metadata.remote_env_info.FAIL_TO_PASS", "list"),
        (changed("metadata.remote_env_info.FAIL_TO_PASS", "__import__('os')"), "FAIL_TO_PASS", "list"),
        (changed("metadata.remote_env_info.FAIL_TO_PASS", {"a": 1}), "FAIL_TO_PASS", "a dict"),
        (changed("metadata.remote_env_info.FAIL_TO_PASS", [1]), "FAIL_TO_PASS", "a int"),
        (changed("metadata.pre_commands", [None]), "metadata.pre_commands", "NoneType"),
        (changed("metadata.problem_statement", "\ud800"), "metadata.problem_statement", "valid text"),
        (changed("metadata.swepro", {"run_script_path": "x"}), "metadata.swepro", "swebench_pro"),
        (
            changed("metadata.remote_env_info", {"test_patch": "d", "version": "1", "base_commit": "c"}),
            "f2p_script",
            "swebench",
        ),
        ({"fix_patch": "d", "test_patch": "d"}, "f2p_script", "multi_swe_bench"),
        ({}, "f2p_script", "nothing to run"),
        ({"metadata": "{broken"}, "metadata", "not JSON"),
    ],
)
def test_a_bad_row_is_an_error_with_its_place_and_field(row: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse(row)
    assert caught.value.message.startswith("tasks.jsonl line 3: ")
    assert field in caught.value.details["field"]
    assert words in caught.value.message


ROWS = Path(__file__).parents[4] / "shared" / "data" / "rows"


@pytest.mark.skipif(not ROWS.is_dir(), reason="the example rows are not part of the repository")
@pytest.mark.parametrize(
    ("file", "protocol"),
    [
        ("swebench/verified_5rows.jsonl", "swebench"),
        ("swebench/swe-bench-lite-test.jsonl", "swebench"),
        ("swebench_pro/flipt_15b76cad_row.json", "swebench_pro"),
        ("swerebench_v2/sample.json", "swerebench_v2"),
    ],
)
def test_real_rows_of_other_protocols_are_called_by_their_name(file: str, protocol: str) -> None:
    text = (ROWS / file).read_text()
    row = json.loads(text.splitlines()[0] if file.endswith(".jsonl") else text)
    row = row[0] if isinstance(row, list) else row
    row = row.get("responses_create_params", {}).get("metadata", row) if "responses_create_params" in row else row
    if isinstance(row.get("instance_dict"), str):
        row = json.loads(row["instance_dict"])
    with pytest.raises(TaskError, match=protocol):
        parse(row)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "image",
    "workdir",
    "problem_statement",
    "eval_cmd",
    "pre_commands",
    "f2p_script",
    "FAIL_TO_PASS",
    "patch",
    "swepro",
)


@given(st.dictionaries(st.sampled_from(FIELDS), json_values), json_values)
def test_no_row_does_worse_than_a_task_error(meta: dict[str, Any], prompt: Any) -> None:
    for row in ({"metadata": meta, "prompt": prompt}, {"metadata": {"remote_env_info": meta}}, meta):
        try:
            task = parse(row)
        except TaskError:
            continue
        ScaleSwe().check(task)


@pytest.mark.parametrize(
    "options",
    [{"compat": "x"}, {"seconds": 0}, {"prompt": "no place"}, {"pytest_config": "mine"}, {"seconds": float("nan")}],
)
def test_a_bad_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"grading.scaleswe.{next(iter(options))}"):
        ScaleSwe(**options)


def test_check_finds_what_could_never_be_resolved() -> None:
    grader = ScaleSwe()
    assert grader.check(parse(slime_row())) == []
    assert "no test function" in grader.check(parse(slime_row(f2p_script="x = 1")))[0]
    assert "not a pytest node id" in grader.check(parse(slime_row(FAIL_TO_PASS=["test_a"])))[0]


# --------------------------------------------------------------------------- plans


def test_the_plan_shows_no_name_to_a_patch_that_does_not_know_the_nonce() -> None:
    plan = ScaleSwe().plan(parse(slime_row()), nonce=NONCE)
    other = ScaleSwe().plan(parse(slime_row()), nonce="00" * 16)
    assert all(NONCE in report for report in plan.reports)
    assert "/workspace/repo/test_fail_to_pass.py" in plan.files
    shared = set(plan.files) & set(other.files)
    assert shared == {"/workspace/repo/test_fail_to_pass.py"}


def test_slimes_way_is_an_exit_code_and_eval_cmd_comes_first() -> None:
    grader = ScaleSwe(compat="slime")
    both = parse(slime_row(eval_cmd="pytest -x"))
    assert any(data == b"pytest -x\n" for data in grader.plan(both, nonce=NONCE).files.values())
    assert grader.plan(parse(slime_row()), nonce=NONCE).argv[0] == "python3"
    assert ScaleSwe().plan(both, nonce=NONCE).reports


# --------------------------------------------------------------------------- verdicts


def case(name: str, inner: str = "", module: str = "test_fail_to_pass") -> str:
    return f'<testcase classname="{module}" name="{name}" time="0.01">{inner}</testcase>'


FAILURE = '<failure message="assert 0"/>'
GOOD = case("test_a") + case("test_c", module="test_fail_to_pass.TestB")


def canaries(task: Task, *, passing: str = "", failing: str = FAILURE) -> str:
    """The two canary entries as an untouched pytest writes them."""
    plan = ScaleSwe().plan(task, nonce=NONCE)
    launch = json.loads(next(data for path, data in plan.files.items() if path.endswith("launch.json")))
    module = launch["targets"][-1]
    source = plan.files[f"/workspace/repo/{module}"].decode()
    out = ""
    for test in source.split("def ")[1:]:
        out += case(test.partition("(")[0], failing if "max(" in test else passing, module=module[:-3])
    return out


def run(cases: str | None, *, exit_code: int | None = 1, state: Any = "exited", started: bool = True) -> RawRun:
    report = None if cases is None else f"<testsuites><testsuite>{cases}</testsuite></testsuites>".encode()
    banner = f"rollwright {NONCE} pytest 9.0.3 python 3.11.7\n" if started else ""
    return RawRun(
        state=state, exit_code=exit_code, log=banner.encode(), reports={"r": report}, seconds=1.0, nonce=NONCE
    )


def verdict(cases: str | None, task: Task | None = None, **how: Any) -> Verdict:
    return judge_run(ScaleSwe(), task or parse(slime_row()), run(cases, **how))


def test_all_tests_passed_is_resolved() -> None:
    task = parse(slime_row())
    found = verdict(GOOD + canaries(task))
    assert found.status == VerdictStatus.RESOLVED
    assert found.reward == 1.0
    assert found.trainable
    assert [t.id for t in found.tests] == ["test_fail_to_pass.py::test_a", "test_fail_to_pass.py::TestB::test_c"]


@pytest.mark.parametrize(
    "cases",
    [
        case("test_a"),
        case("test_a", FAILURE) + GOOD,
        case("test_a", "<skipped/>") + case("test_c", module="test_fail_to_pass.TestB"),
        GOOD + case("test_d", "<error/>"),
        case("test_a") + case("test_c", '<skipped type="pytest.xfail"/>', module="test_fail_to_pass.TestB"),
        "",
    ],
)
def test_a_test_that_is_missing_skipped_or_failed_is_not_resolved(cases: str) -> None:
    task = parse(slime_row())
    found = verdict(cases + canaries(task))
    assert found.status == VerdictStatus.UNRESOLVED
    assert found.reward == 0.0


def test_a_defined_test_that_was_not_run_is_shown_as_missing() -> None:
    found = verdict(case("test_a") + canaries(parse(slime_row())))
    assert ("test_fail_to_pass.py::TestB::test_c", "missing") in [(t.id, t.status) for t in found.tests]


def test_only_named_tests_count_when_the_row_names_them() -> None:
    task = parse(slime_row(FAIL_TO_PASS=["test_fail_to_pass.py::test_a"], PASS_TO_PASS=["t/x.py::T::test_y[a/b.c]"]))
    good = case("test_a") + case("test_y[a/b.c]", module="t.x.T")
    assert verdict(good + case("test_z", FAILURE) + canaries(task), task).status == VerdictStatus.RESOLVED
    assert verdict(case("test_a") + canaries(task), task).status == VerdictStatus.UNRESOLVED


@pytest.mark.parametrize(
    ("passing", "failing"), [("", ""), (FAILURE, FAILURE), (FAILURE, ""), ("<skipped/>", FAILURE), ("", "<error/>")]
)
def test_wrong_canaries_are_tampering(passing: str, failing: str) -> None:
    task = parse(slime_row())
    found = verdict(GOOD + canaries(task, passing=passing, failing=failing))
    assert found.status == VerdictStatus.TAMPERED
    assert "canary_wrong" in found.signals


def test_missing_canaries_are_tampering_in_a_run_that_says_it_ended_well() -> None:
    assert verdict(GOOD).status == VerdictStatus.TAMPERED
    assert verdict(GOOD, exit_code=2).status == VerdictStatus.UNRESOLVED


@pytest.mark.parametrize("exit_code", [2, 3, 4, 5, None])
def test_an_exit_code_that_disagrees_never_resolves(exit_code: int | None) -> None:
    found = verdict(GOOD + canaries(parse(slime_row())), exit_code=exit_code)
    assert found.status == VerdictStatus.UNRESOLVED
    assert "exit_code_disagrees_with_report" in found.signals


def test_a_clean_exit_is_impossible_with_a_failing_canary() -> None:
    assert verdict(GOOD + canaries(parse(slime_row())), exit_code=0).status == VerdictStatus.TAMPERED
    assert verdict(None, exit_code=0).status == VerdictStatus.TAMPERED
    assert verdict(None, exit_code=1).status == VerdictStatus.UNRESOLVED


def test_a_timeout_is_a_verdict_only_if_the_tests_had_begun() -> None:
    assert verdict(None, state="timeout", exit_code=None).status == VerdictStatus.TEST_TIMEOUT
    with pytest.raises(GradingFailed):
        verdict(None, state="timeout", exit_code=None, started=False)


@pytest.mark.parametrize("state", ["lost", "oom", "cancelled"])
def test_our_own_ends_are_never_a_verdict(state: str) -> None:
    with pytest.raises(GradingFailed, match=state):
        verdict(GOOD + canaries(parse(slime_row())), state=state)


def test_an_output_flood_is_not_resolved() -> None:
    assert verdict(GOOD + canaries(parse(slime_row())), state="output_limit").status == VerdictStatus.UNRESOLVED


def test_pytest_that_cannot_start_is_our_failure() -> None:
    with pytest.raises(GradingFailed, match="could not start pytest"):
        verdict(None, exit_code=97, started=False)


@given(st.binary(max_size=200), st.sampled_from([0, 1, 2, 139, None]))
def test_no_report_makes_the_judge_crash_or_resolve_by_chance(data: bytes, exit_code: int | None) -> None:
    raw = run("", exit_code=exit_code)
    for report in (data, b"<testsuites>" + data + b"</testsuites>"):
        found = judge_run(ScaleSwe(), parse(slime_row()), RawRun(**{**_fields(raw), "reports": {"r": report}}))
        assert found.reward == 0.0


def _fields(raw: RawRun) -> dict[str, Any]:
    return {name: getattr(raw, name) for name in RawRun.__dataclass_fields__}


@pytest.mark.parametrize(
    ("exit_code", "trust", "status", "trainable"),
    [
        (0, False, VerdictStatus.RESOLVED, False),
        (0, True, VerdictStatus.RESOLVED, True),
        (1, False, VerdictStatus.UNRESOLVED, False),
    ],
)
def test_an_exit_code_is_trained_on_only_if_the_user_says_so(
    exit_code: int, trust: bool, status: VerdictStatus, trainable: bool
) -> None:
    task = parse(slime_row(f2p_script=None, eval_cmd="make test"))
    found = judge_run(ScaleSwe(trust_exit_code=trust), task, run(None, exit_code=exit_code, started=False))
    assert (found.status, found.trainable) == (status, trainable)
    assert "exit_code_only" in found.signals
