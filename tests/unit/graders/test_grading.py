"""Which changes of a patch are undone before the tests run, and what is no verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollwright.errors import GradingFailed
from rollwright.graders import RawRun, TestPlan
from rollwright.graders.command import Command
from rollwright.graders.diff import FileChange
from rollwright.graders.grading import judge_run, protected_changes
from rollwright.graders.pytest_run import PROTECTED
from rollwright.types import Task, Verdict


def protected(path: str, plan: TestPlan) -> bool:
    change = FileChange(path=path.encode(), kind="modified", mode=0o100644)
    return protected_changes(plan, "/repo", (change,)) == (change,)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("conftest.py", True),
        ("a/b/conftest.py", True),
        ("tests/helpers/data.json", True),
        ("pkg/tests/util.py", True),
        ("pkg/test_x.py", True),
        ("pkg/x_test.py", True),
        ("src/x.egg-info/entry_points.txt", True),
        ("sitecustomize.py", True),
        ("src/app.py", False),
        ("src/testing.py", False),
        ("contests/app.py", False),
        ("myconftest.py", False),
        ("src/testdata.py", False),
        ("tests", False),
    ],
)
def test_tests_and_what_steers_them_are_protected_and_sources_are_not(path: str, expected: bool) -> None:
    assert protected(path, TestPlan(argv=("true",), protected=PROTECTED)) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("t/new.py", True),
        ("t/new.py/inside", True),
        ("t", True),
        ("t/other.py", False),
        ("spec/x", True),
        ("spec/y", False),
    ],
)
def test_what_the_plan_writes_is_protected_with_all_that_could_stand_in_its_way(path: str, expected: bool) -> None:
    patch = b"--- /dev/null\n+++ b/spec/x\n@@ -0,0 +1 @@\n+x\n"
    plan = TestPlan(argv=("true",), files={"/repo/t/new.py": b"", "/elsewhere/z": b""}, test_patch=patch)
    assert protected(path, plan) == expected


def test_names_that_are_not_text_match_too() -> None:
    change = FileChange(path=b"tests/\xff\n.py", kind="added", mode=0o100644)
    assert protected_changes(TestPlan(argv=("true",), protected=PROTECTED), "/repo", (change,)) == (change,)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_grader_that_gives_no_finite_reward_has_not_judged(reward: float) -> None:
    class Odd(Command):
        def judge(self, task: Task, raw: RawRun) -> Verdict:
            return replace(super().judge(task, raw), reward=reward)

    row = {"metadata": {"image": "i", "workdir": "/w", "problem_statement": "p", "command": "make test"}}
    raw = RawRun(state="exited", exit_code=0, log=b"", reports={}, seconds=1, nonce="5f" * 16)
    with pytest.raises(GradingFailed, match=f"gave {reward}"):
        judge_run(Odd(), Odd().parse(row, where="row"), raw)
