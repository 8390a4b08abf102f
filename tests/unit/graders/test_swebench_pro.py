"""Pro rows: what reaches the agent, what the official order becomes, what the parser's output is worth."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.pro_task import ID, assets, pro_row
from rollwright.errors import ConfigError, TaskError
from rollwright.graders import RawRun
from rollwright.graders.grading import judge_run
from rollwright.graders.swebench_pro import SwebenchPro, environment
from rollwright.types import Task, Verdict, VerdictStatus

BASE, SOLUTION = "a" * 40, "b" * 40
F2P, P2P = "tests/test_hidden.py::test_add", "tests/test_calc.py::test_zero"
NONCE = "5f" * 16


def parse(grader: SwebenchPro | None = None, **extra: Any) -> Task:
    return (grader or SwebenchPro()).parse(pro_row((BASE, SOLUTION), **extra), where="rows line 1")


@pytest.fixture
def grader(tmp_path: Path) -> SwebenchPro:
    return SwebenchPro(assets=assets(tmp_path))


def test_nothing_hidden_reaches_the_agent() -> None:
    seen = repr(parse().agent)
    for hidden in (SOLUTION, ID, "0123456789abcdef", "test_hidden", "test_zero"):
        assert hidden not in seen
    assert BASE in seen


def test_the_prompt_carries_requirements_and_interface_and_expands_nothing_in_them() -> None:
    told = parse(problem_statement="say {interface}", interface="def add()").agent.prompt
    assert told.startswith("say {interface}")
    assert "add adds" in told
    assert told.endswith("def add()")


def test_the_image_is_named_by_the_tag_and_the_folder_is_app() -> None:
    task = parse(image=None, workdir=None, dockerhub_tag="calc.calc-calc__calc-01")
    assert task.agent.image == "jefzda/sweap-images:calc.calc-calc__calc-01"
    assert task.agent.workdir == "/app"


def test_only_the_last_line_is_run_and_after_the_patch(grader: SwebenchPro) -> None:
    task = parse(grader)
    assert task.agent.pre_commands == (f"git reset -q --hard {BASE}", f"git checkout -q {BASE}")
    plan = grader.plan(task, nonce=NONCE)
    assert plan.install[-4:] == ("checkout", SOLUTION, "--", "tests/test_hidden.py")
    assert "tests/test_hidden.py" in plan.protected
    assert plan.argv[-1] == "tests/test_hidden.py,tests/test_calc.py"
    assert plan.hide_history


def test_the_parser_is_neither_readable_nor_writable_for_the_tests(grader: SwebenchPro) -> None:
    plan = grader.plan(parse(grader), nonce=NONCE)
    assert plan.parser is not None
    assert plan.parser.script.user == "root"
    assert not any("parser" in path for path in plan.files)


def test_missing_scripts_are_found_before_step_0(grader: SwebenchPro, tmp_path: Path) -> None:
    assert grader.check(parse(grader)) == []
    (tmp_path / "run_scripts" / ID / "parser.py").unlink()
    assert [p for p in grader.check(parse(grader)) if "no parser.py" in p]
    assert len(SwebenchPro().check(parse())) == 2
    assert "assets" in SwebenchPro().preflight()[0]
    assert "no folder" in SwebenchPro(assets=tmp_path / "nowhere").preflight()[0]
    assert grader.preflight() == []


def test_slimes_rows_name_their_scripts(grader: SwebenchPro, tmp_path: Path) -> None:
    (tmp_path / "mine.sh").write_text("echo mine\n")
    row = pro_row((BASE, SOLUTION))
    swepro = {"run_script_path": "mine.sh", "before_repo_set_cmd": row.pop("before_repo_set_cmd")}
    swepro |= {"selected_test_files": ["x"], "fail_to_pass": [F2P]}
    task = grader.parse({"metadata": {"swepro": swepro, **row}}, where="w")
    assert task.grader.payload["run_script"] == "echo mine\n"
    assert task.grader.payload["parser"] is not None
    swepro["run_script_path"] = "../../etc/passwd"
    with pytest.raises(TaskError, match="outside"):
        grader.parse({"metadata": {"swepro": swepro, **row}}, where="w")


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"before_repo_set_cmd": None}, "before_repo_set_cmd"),
        ({"before_repo_set_cmd": "git reset --hard x\nrm -rf /"}, "before_repo_set_cmd"),
        ({"before_repo_set_cmd": f"git checkout {SOLUTION} -- ../../etc"}, "before_repo_set_cmd"),
        ({"before_repo_set_cmd": f"git checkout {SOLUTION} -- a; rm -rf b"}, "before_repo_set_cmd"),
        ({"before_repo_set_cmd": "git checkout main -- a"}, "before_repo_set_cmd"),
        ({"base_commit": "HEAD"}, "base_commit"),
        ({"image": None, "dockerhub_tag": "../x"}, "dockerhub_tag"),
        ({"instance_id": "../../x"}, "instance_id"),
        ({"fail_to_pass": "__import__('os')"}, "fail_to_pass"),
        ({"problem_statement": None}, "problem_statement"),
    ],
)
def test_a_bad_row_names_its_field(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse(**extra)
    assert field in caught.value.details["field"]


ROW = Path(__file__).parents[4] / "shared" / "data" / "rows" / "swebench_pro" / "flipt_15b76cad_row.json"


@pytest.mark.skipif(not ROW.is_file(), reason="the example rows are not part of the repository")
def test_the_real_row_is_understood() -> None:
    task = SwebenchPro().parse(json.loads(ROW.read_text()), where="flipt")
    assert task.grader.payload["test_paths"] == ("internal/storage/cache/cache_test.go",)
    assert task.grader.payload["fail_to_pass"] == ("TestGetEvaluationRolloutsCached",)
    assert "15b76cada1" not in repr(task.agent).replace(task.agent.image, "")


# --------------------------------------------------------------------------- ENV


def shell(script: str, name: str, **env: str) -> str:
    argv = ["sh", "-c", f'{script}\nprintf %s "${name}"']
    return subprocess.run(argv, env={"PATH": "/usr/bin:/bin"} | env, capture_output=True, text=True, check=True).stdout


def test_env_lines_are_exported_in_order_and_only_names_are_expanded() -> None:
    docker = 'ENV A=1 B="two words"\nENV PATH=/go/bin:$PATH\nENV C ${A} and $(touch /tmp/x) `id`\nENV D=a\\\n  E=b\n'
    script = environment((docker,))
    assert shell(script, "B") == "two words"
    assert shell(script, "PATH") == "/go/bin:/usr/bin:/bin"
    assert shell(script, "C") == "1 and $(touch /tmp/x) `id`"
    assert shell(script, "E") == "b"


@given(st.text(st.characters(exclude_categories=["Z", "C"], exclude_characters="$\\"), min_size=1, max_size=20))
def test_a_value_is_quoted_whatever_it_is(value: str) -> None:
    assert environment((f"ENV X {value}",)) == f"export X={shlex.quote(value)}\n"


# --------------------------------------------------------------------------- verdicts


def verdict(tests: Any, *, state: Any = "exited", report: bool = True) -> Verdict:
    data = tests if isinstance(tests, bytes) else json.dumps({"tests": tests}).encode()
    reports = {"out": data if report else None} if state == "exited" else {}
    raw = RawRun(state=state, exit_code=0, log=b"", reports=reports, seconds=1, nonce=NONCE)
    return judge_run(SwebenchPro(), parse(), raw)


def results(**statuses: str) -> list[dict[str, str]]:
    return [{"name": {"f": F2P, "p": P2P}[key[0]], "status": status} for key, status in statuses.items()]


def test_all_required_tests_passed_is_resolved() -> None:
    found = verdict([*results(f="PASSED", p="PASSED"), {"name": "other", "status": "FAILED"}])
    assert (found.status, found.reward, found.trainable) == (VerdictStatus.RESOLVED, 1.0, True)
    assert [t.expected for t in found.tests] == [True, True, False]


@pytest.mark.parametrize(
    "tests", [[], results(f="PASSED"), results(f="PASSED", p="SKIPPED"), results(f="passed!", p="PASSED")]
)
def test_a_missing_or_skipped_test_is_not_resolved(tests: list[Any]) -> None:
    assert verdict(tests).status == VerdictStatus.UNRESOLVED


def test_one_passed_is_enough_as_upstream_but_a_contradiction_is_not_trained_on() -> None:
    found = verdict(results(f="PASSED", f2="FAILED", p="PASSED"))
    assert (found.status, found.trainable) == (VerdictStatus.RESOLVED, False)
    assert found.signals == (f"contradicting_results: {F2P}",)


def test_a_timeout_is_the_patchs_and_a_flood_is_not_resolved() -> None:
    assert verdict([], state="timeout").status == VerdictStatus.TEST_TIMEOUT
    assert verdict([], state="output_limit").status == VerdictStatus.UNRESOLVED


@given(
    st.binary(max_size=80)
    | st.recursive(st.none() | st.text(max_size=5), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_no_output_of_a_parser_makes_the_judge_crash(data: bytes) -> None:
    assert verdict(data).reward == 0.0


@pytest.mark.parametrize("options", [{"seconds": 0}, {"user": "me"}, {"prompt": "x"}])
def test_a_bad_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"grading.swebench_pro.{next(iter(options))}"):
        SwebenchPro(**options)
