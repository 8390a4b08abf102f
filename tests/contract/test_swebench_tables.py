"""swebench 4.1, which makes a classic row's script from its tables: offline, and stricter than it is by itself.

One package can be installed at a time, so these tests run again below themselves with 4.1 on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.calc_task import FIX, python
from contract.swebench_task import FAIL_TO_PASS, GOLD, PASS_TO_PASS, TEST_PATCH, rig
from rollwright.graders import RawRun
from rollwright.graders.grading import judge_run
from rollwright.graders.swebench import SweBench
from rollwright.graders.swebench_package import installed_version, problem
from rollwright.graders.validation import validate_task
from rollwright.sandboxes import SandboxSpec
from rollwright.types import VerdictStatus

NONCE = "5f" * 16
TABLES = (installed_version() or "").startswith("4.1.")
with_tables = pytest.mark.skipif(not TABLES, reason="swebench 4.1 is not the one that is installed")
ROWS = Path(__file__).parents[3] / "shared" / "data" / "rows" / "swebench"


@pytest.mark.network
@pytest.mark.skipif(TABLES, reason="swebench 4.1 is installed")
def test_everything_here_holds_with_swebench_4_1(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        "swebench==4.1.0",
        "unidiff",
    ]
    if subprocess.run(install, capture_output=True, check=False).returncode != 0:
        pytest.skip("the package registry does not answer")
    here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "t"), __file__]
    done = subprocess.run(here, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def classic(base: str, **changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "marshmallow-code__marshmallow-1",
        "repo": "marshmallow-code/marshmallow",
        "version": "3.19",
        "base_commit": base,
        "environment_setup_commit": None,
        "problem_statement": "add subtracts",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
        "PASS_TO_PASS": json.dumps(PASS_TO_PASS),
        **changes,
    }


@with_tables
@pytest.mark.anyio
async def test_a_classic_row_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    async with rig(tmp_path / "images", tmp_path / "state") as place:
        task = SweBench().parse({"metadata": {"image": "testbed", "remote_env_info": classic(place.base)}}, where="row")
        assert SweBench().check(task) == []
        checked = await validate_task(
            provider=place.provider, spec=SandboxSpec(image="testbed"), task=task, grader=SweBench(), key="v"
        )
        assert checked.ok, (checked.problems, checked.noop.raw and checked.noop.raw.log.decode())
        async with place.agent(task, "desk") as desk:
            cheat = await desk.patch(python("import pytest\npytest.skip('no', allow_module_level=True)"))
            assert (await place.grade(SweBench(), task, cheat, "skip")).verdict.status == VerdictStatus.UNRESOLVED
            honest = await desk.patch(FIX + "echo 'def test_mine(): pass' >tests/test_mine.py")
            found = await place.grade(SweBench(), task, honest, "honest")
            assert found.verdict.status == VerdictStatus.RESOLVED
            assert found.verdict.grader_version == "1+swebench-4.1.0"


@with_tables
@pytest.mark.skipif(not ROWS.is_dir(), reason="the example rows are not part of the repository")
def test_scripts_of_real_rows_are_made_without_a_network() -> None:
    assert problem() is None
    count = 0
    for file in ("swe-bench-lite-test.jsonl", "verified_5rows.jsonl", "verified_minisweagent2_5rows.jsonl"):
        for line in (ROWS / file).read_text().splitlines():
            row = json.loads(line)
            if "responses_create_params" in row:
                row = json.loads(row["responses_create_params"]["metadata"]["instance_dict"])
            task = SweBench().parse(row, where=file)
            assert SweBench().check(task) == [], row["instance_id"]
            plan = SweBench().plan(task, nonce=NONCE)
            script = next(data for path, data in plan.files.items() if path.endswith("eval.sh")).decode()
            assert f"git checkout {row['base_commit']} " in script
            assert f"rollwright {NONCE} end" in script
            count += 1
    assert count == 15


@with_tables
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repo": "tiny/calc"}, "has no tests for tiny/calc"),
        ({"version": "0.0"}, "has no tests for marshmallow-code/marshmallow '0.0'"),
        ({"FAIL_TO_PASS": "[]"}, "any patch would be resolved"),
        (
            {"eval_script": ": '>>>>> Start Test Output'\n: '>>>>> End Test Output'", "log_parser": "x"},
            "need swebench 5",
        ),
    ],
)
def test_rows_that_it_cannot_judge_are_named(changes: dict[str, Any], words: str) -> None:
    task = SweBench().parse(classic("c" * 40, **changes), where="row")
    assert words in " ".join(SweBench().check(task))


def log(*results: str, exit_code: int) -> RawRun:
    lines = [f"+ : 'rollwright {NONCE} script'", f"+ : 'rollwright {NONCE} begin'", "+ : '>>>>> Start Test Output'"]
    lines += [*results, f"+ SWEBENCH_TEST_EXIT_CODE={exit_code}", "+ : '>>>>> End Test Output'"]
    lines += [f"+ : 'rollwright {NONCE} end {exit_code}'"]
    data = "\n".join(lines).encode()
    return RawRun(state="exited", exit_code=0, log=data, reports={}, seconds=1, nonce=NONCE)


@with_tables
@pytest.mark.parametrize(
    ("repo", "results", "exit_code", "signal"),
    [
        # What 4.1 by itself calls resolved, and we do not.
        (
            "django/django",
            [f"{name} ... skipped 'no'" for name in (*FAIL_TO_PASS, *PASS_TO_PASS)],
            0,
            "skipped_is_not_resolved",
        ),
        (
            "django/django",
            [f"{name} ... ok" for name in (*FAIL_TO_PASS, *PASS_TO_PASS)],
            1,
            "exit_code_disagrees_with_report",
        ),
    ],
)
def test_known_mistakes_of_4_1_are_not_ours(repo: str, results: list[str], exit_code: int, signal: str) -> None:
    row = classic("c" * 40, repo=repo, version="4.2")
    raw = log(*results, exit_code=exit_code)
    official = SweBench(verdict="official")
    assert judge_run(official, official.parse(row, where="row"), raw).status == VerdictStatus.RESOLVED
    verdict = judge_run(SweBench(), SweBench().parse(row, where="row"), raw)
    assert verdict.status == VerdictStatus.UNRESOLVED
    assert signal in verdict.signals


@with_tables
def test_with_real_results_it_is_resolved() -> None:
    row = classic("c" * 40, repo="django/django", version="4.2")
    raw = log(*(f"{name} ... ok" for name in (*FAIL_TO_PASS, *PASS_TO_PASS)), exit_code=0)
    assert judge_run(SweBench(), SweBench().parse(row, where="row"), raw).status == VerdictStatus.RESOLVED
