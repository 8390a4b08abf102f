"""SWE-smith, SWE-Gym, SWE-rebench V2, R2E-Gym end to end on a tiny repository: gold, nothing, traces of the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from contract.calc_task import FIX, python
from contract.swebench_task import (
    FAIL_TO_PASS,
    GOLD,
    PASS_TO_PASS,
    REPOSITORY,
    TEST_PATCH,
    Rig,
    image,
    layer,
    repository,
    rig,
)
from rollwright.errors import WorkspaceFailed
from rollwright.graders import Grader
from rollwright.graders.r2e_gym import R2eGym
from rollwright.graders.swe_gym import SweGym
from rollwright.graders.swerebench_v2 import SweRebenchV2
from rollwright.graders.swesmith import SweSmith, reverse_patch
from rollwright.graders.validation import Validation, validate_task
from rollwright.sandboxes import SandboxSpec
from rollwright.types import Task, VerdictStatus

pytestmark = pytest.mark.anyio

RESOLVED, UNRESOLVED, TAMPERED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED, VerdictStatus.TAMPERED
FULL_TESTS = """from calc import add
def test_zero():
    assert add(2, 0) == 2
def test_add():
    assert add(2, 3) == 5
"""
HIDDEN = FULL_TESTS + "def test_wrong():\n    assert add(1, 1) == 3\n"
FIXED_REPOSITORY = r"""
set -e
mkdir -p tests
git init -q . && git symbolic-ref HEAD refs/heads/main
git config user.name t && git config user.email t@localhost
printf 'def add(a, b):\n    return a + b\n' >calc.py
printf '%s' "$TESTS" >tests/test_calc.py
printf 'def test_other():\n    assert True\n' >tests/test_other.py
git add -A && git commit -q -m 'without the bug'
"""


@pytest.fixture(scope="module")
async def place(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    images = tmp_path_factory.mktemp("images")
    async with rig(images, tmp_path_factory.mktemp("state")) as made:
        repository(images, "fixed", f"TESTS='{FULL_TESTS}'\n{FIXED_REPOSITORY}")
        image(images, "smith", "fixed", "conda")
        repository(images, "plain", REPOSITORY, "/calc")
        image(images, "rebench", "plain", "conda", workdir="/calc")
        run = "#!/bin/bash\npython3 -m pytest -rA r2e_tests\n"
        layer(images, "r2e", {"/r2e_tests/test_1.py": HIDDEN, "/testbed/run_tests.sh": run})
        image(images, "r2e", "repository", "r2e")
        yield made


async def validated(place: Rig, grader: Grader, row: dict[str, Any]) -> tuple[Task, Validation]:
    task = grader.parse(row, where="row")
    spec = SandboxSpec(image=task.agent.image)
    checked = await validate_task(provider=place.provider, spec=spec, task=task, grader=grader, key=grader.name)
    return task, checked


def why(checked: Validation) -> tuple[object, ...]:
    raws = [checked.noop.raw, *(gold.raw for gold in checked.golds)]
    return (checked.problems, *(raw and raw.log.decode() for raw in raws))


async def test_swesmith_plants_the_bug_and_leaves_the_agent_no_trace_of_it(place: Rig) -> None:
    row = {
        "instance_id": "o__calc.0123abcd.lm_rewrite__x",
        "repo": "swesmith/o__calc.0123abcd",
        "image_name": "smith",
        "patch": reverse_patch(GOLD).decode(),
        "problem_statement": "add subtracts",
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero", "tests/test_other.py::test_other"],
    }
    smith = SweSmith().parse(row, where="row")
    task = Task(agent=_with_image(smith, "smith"), grader=smith.grader)
    checked = await validate_task(
        provider=place.provider, spec=SandboxSpec(image="smith"), task=task, grader=SweSmith(), key="smith"
    )
    assert checked.ok, why(checked)
    async with place.agent(task, "smith.desk") as desk:
        assert "a - b" in await desk.run("cat calc.py")
        assert await desk.run("git status --porcelain; git log --oneline | wc -l") == "1\n"
        assert await desk.run("git ls-files; ls tests") == "calc.py\ntests/test_other.py\ntest_other.py\n"
        assert await desk.run("git rev-list --all --objects | wc -l; grep -rl 'a + b' . || :") == "5\n"
        await desk.run("touch calc.py tests/mine.py")
        taken = await desk.patch(FIX + python("def test_add(): pass", "tests/test_calc.py"))
        fixed = await place.grade(SweSmith(), task, taken, "smith.fixed")
        assert fixed.verdict.status == RESOLVED, fixed.raw
        assert fixed.verdict.dropped_paths == ("tests/test_calc.py",)
        below = python("import subprocess\nexec(subprocess.check_output(['git', 'show', 'HEAD~1:calc.py']))")
        looked = await place.grade(SweSmith(), task, await desk.patch(below), "smith.history")
        assert looked.verdict.status == UNRESOLVED, looked.raw
        cheat = await desk.patch(python("def test_add(): pass\ndef test_zero(): pass", "tests/test_calc.py"))
        assert (await place.grade(SweSmith(), task, cheat, "smith.cheat")).verdict.status == UNRESOLVED


def _with_image(task: Task, name: str) -> Any:
    from dataclasses import replace

    return replace(task.agent, image=name)


async def test_a_bug_that_does_not_fit_the_image_is_our_failure(place: Rig) -> None:
    row = {
        "instance_id": "o__calc.0123abcd.x",
        "repo": "swesmith/o__calc.0123abcd",
        "image_name": "local/testbed",
        "patch": reverse_patch(GOLD).decode(),
        "problem_statement": "p",
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
    }
    parsed = SweSmith().parse(row, where="row")
    task = Task(agent=_with_image(parsed, "testbed"), grader=parsed.grader)
    with pytest.raises(WorkspaceFailed, match="does not apply to the image's files"):
        await place.grade(SweSmith(), task, None, "misfit")


async def test_a_hidden_path_that_the_image_lacks_is_our_failure(place: Rig) -> None:
    row = {"docker_image": "testbed", "problem_statement": "p", "expected_output_json": {"test_zero": "PASSED"}}
    task = R2eGym().parse(row, where="row")
    with pytest.raises(WorkspaceFailed, match="the image has no /r2e_tests"):
        await place.grade(R2eGym(), task, None, "lacking")


async def test_swe_gym_runs_pytest_over_the_files_of_its_tests(place: Rig) -> None:
    row = {
        "instance_id": "dask__dask-1",
        "repo": "dask/dask",
        "version": "1",
        "base_commit": place.base,
        "image": "testbed",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "add subtracts",
        "FAIL_TO_PASS": FAIL_TO_PASS,
        "PASS_TO_PASS": PASS_TO_PASS,
    }
    _, checked = await validated(place, SweGym(), row)
    assert checked.ok, why(checked)


async def test_swerebench_runs_the_rows_commands_after_both_patches(place: Rig) -> None:
    row = {
        "instance_id": "tiny__calc-7",
        "repo": "tiny/calc",
        "image_name": "rebench",
        "base_commit": place.base,
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "add subtracts",
        "FAIL_TO_PASS": FAIL_TO_PASS,
        "PASS_TO_PASS": PASS_TO_PASS,
        "install_config": {"log_parser": "parse_log_pytest", "test_cmd": ["true", "python3 -m pytest -rA tests"]},
    }
    _, checked = await validated(place, SweRebenchV2(), row)
    assert checked.ok, why(checked)


async def test_r2e_hides_its_tests_from_the_agent_and_wants_every_status(place: Rig) -> None:
    row = {
        "docker_image": "r2e",
        "patch": GOLD,
        "problem_statement": "[ISSUE]add subtracts[/ISSUE]",
        "expected_output_json": {"test_zero": "PASSED", "test_add": "PASSED", "test_wrong": "FAILED"},
    }
    task, checked = await validated(place, R2eGym(), row)
    assert checked.ok, why(checked)
    async with place.agent(task, "r2e.desk") as desk:
        assert await desk.run("ls / /testbed | grep -E 'r2e|run_tests' || echo none") == "none\n"
        own = python("echo 'PASSED r2e_tests/t.py::test_add'", "run_tests.sh") + "mkdir r2e_tests; echo >r2e_tests/x.py"
        cheat = await desk.patch(own)
        found = await place.grade(R2eGym(), task, cheat, "r2e.cheat")
        assert found.verdict.status == UNRESOLVED
        assert set(found.verdict.dropped_paths) == {"run_tests.sh", "r2e_tests/x.py"}
        hook = await desk.patch(
            python(
                "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
                "    out = yield\n    out.get_result().outcome = 'failed' if 'wrong' in item.name else 'passed'",
                "conftest.py",
            )
        )
        assert (await place.grade(R2eGym(), task, hook, "r2e.hook")).verdict.status in (TAMPERED, UNRESOLVED)
