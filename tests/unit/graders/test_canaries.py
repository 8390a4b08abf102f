"""Canaries are never mistaken for the task's own tests, in any protocol, and the judge looks for those of the plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.graders import Grader, RawRun, TestPlan
from rollwright.graders.pytest_run import _FIRST, _SECOND, _THIRD, Canaries
from rollwright.graders.r2e_gym import R2eGym
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.graders.swe_gym import SweGym
from rollwright.graders.swebench import SweBench
from rollwright.graders.swebench_log import END, START
from rollwright.graders.swebench_package import problem
from rollwright.graders.swerebench_v2 import SweRebenchV2
from rollwright.graders.swesmith import SweSmith
from rollwright.types import VerdictStatus

NONCES = st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")
FILES = [f"test_{first}_{second}.py" for first in _FIRST.split() for second in _SECOND.split()]
NAMES = [f"test_{verb}" for verb in _THIRD.split()]
SCRIPT = f"cd /w\n: '{START}'\npytest -rA t/test_x.py\n: '{END}'\n"


@given(NONCES, st.sets(st.sampled_from(FILES)), st.sets(st.sampled_from(NAMES)))
def test_no_canary_has_a_name_that_the_task_uses(nonce: str, files: set[str], names: set[str]) -> None:
    canaries = Canaries.of(nonce, taken=[*(f"{file}::test_x" for file in files), *names])
    found = {canaries.passing.partition("::")[2], canaries.failing.partition("::")[2]}
    assert len(found) == 2
    assert not found & names
    assert canaries.path not in files
    source = canaries.source(nonce).decode()
    assert all(f"def {name}():" in source for name in found)


@given(NONCES)
def test_where_every_name_is_taken_there_is_still_one_more(nonce: str) -> None:
    assert Canaries.of(nonce, taken=FILES).path not in FILES


def row(tests: list[str], **more: Any) -> dict[str, Any]:
    """A row that every one of the protocols can read, whose tests are `tests`."""
    return {
        "instance_id": "dask__dask-1",
        "repo": "dask/dask",
        "version": "1",
        "base_commit": "0" * 40,
        "image": "i",
        "workdir": "/w",
        "problem_statement": "p",
        "patch": "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-a\n+b\n",
        "test_patch": "--- a/t/test_x.py\n+++ b/t/test_x.py\n@@ -1 +1 @@\n-a\n+b\n",
        "FAIL_TO_PASS": tests,
        "PASS_TO_PASS": [],
        **more,
    }


SCRIPTED = {"eval_script": SCRIPT, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
CONFIG = {"log_parser": "parse_log_pytest", "test_cmd": ["pytest -rA t/test_x.py"]}
IDS: dict[str, tuple[Grader, dict[str, Any]]] = {
    "scaleswe": (ScaleSwe(), {"f2p_patch": "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-a\n+b\n"}),
    "swe_gym": (SweGym(), {"eval_script": SCRIPT}),
    "swesmith": (SweSmith(), {"repo": "swesmith/o__calc.01234567", "image_name": "x/i"}),
    "swebench": (SweBench(), SCRIPTED),
    "swerebench_v2": (SweRebenchV2(), {"install_config": CONFIG}),
}
"""Protocols whose tests are node ids, with what their rows have beside the common fields."""


def files_of(plan: TestPlan) -> set[str]:
    return {path.removeprefix("/w/") for path in plan.files if path.startswith("/w/")}


@pytest.mark.parametrize("protocol", IDS)
@given(nonce=NONCES, folder=st.sampled_from(["", "t/"]))
def test_a_planned_canary_takes_no_file_of_the_tasks_own_tests(protocol: str, nonce: str, folder: str) -> None:
    grader, more = IDS[protocol]
    if protocol in ("swebench", "swerebench_v2") and problem() is not None:
        pytest.skip("swebench is not installed")
    task = grader.parse(row([f"{folder}{file}::test_x" for file in FILES], **more), where="row")
    written = files_of(grader.plan(task, nonce=nonce)) - {"t/test_x.py"}
    assert len(written) == 1, "the canaries' file"
    assert not written & {f"{folder}{file}" for file in FILES}


@given(NONCES, st.sets(st.sampled_from(NAMES), min_size=1))
def test_r2es_log_has_bare_names_so_the_canaries_have_others(nonce: str, names: set[str]) -> None:
    expected = dict.fromkeys(names, "PASSED")
    grader = R2eGym()
    task = grader.parse(row([], expected_output_json=json.dumps(expected)), where="row")
    plan = grader.plan(task, nonce=nonce)
    ((path, source),) = ((p, s.decode()) for p, s in plan.files.items() if p.startswith("/r2e_tests/"))
    canaries = [line[4:-3] for line in source.splitlines() if line.startswith("def ")]
    failing = canaries[0 if "max(" in source.split("def ")[1] else 1]
    assert not set(canaries) & names
    statuses = expected | {name: "FAILED" if name == failing else "PASSED" for name in canaries}
    body = "\n".join(f"{status} r2e_tests/x.py::{name}" for name, status in statuses.items())
    log = (
        f"+ : 'rollwright {nonce} script'\n+ : 'rollwright {nonce} begin'\n+ : '{START}'\n"
        f"==== short test summary info ====\n{body}\n+ : '{END}'\n+ : 'rollwright {nonce} end 1'\n"
    )
    raw = RawRun(state="exited", exit_code=0, log=log.encode(), reports={}, seconds=1.0, nonce=nonce)
    verdict = grader.judge(task, raw)
    assert verdict.status is VerdictStatus.RESOLVED, (path, verdict)
