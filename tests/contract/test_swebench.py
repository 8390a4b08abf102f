"""Official SWE-bench end to end: the verbatim eval.sh in a box, the official package's verdict, and what beats it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from contract.calc_task import FIX, python
from contract.swebench_task import FAIL_TO_PASS, PASS_TO_PASS, TEST_PATCH, Desk, Rig, rig, row
from rollwright.graders.grading import judge_run
from rollwright.graders.swebench import SweBench
from rollwright.graders.swebench_package import problem
from rollwright.graders.validation import validate_task
from rollwright.sandboxes import SandboxSpec
from rollwright.types import Task, VerdictStatus

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(problem() is not None, reason="the swebench package is not installed"),
]

RESOLVED, UNRESOLVED, TAMPERED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED, VerdictStatus.TAMPERED
OFFICIAL = SweBench(verdict="official")
WRONG = "def add(a, b):\n    return a - b\n"
PASSED = "\\n".join(f"PASSED {name}" for name in (*FAIL_TO_PASS, *PASS_TO_PASS))
# pytest has taken stdout; the shell above it still has the real one.
SAY = "import os, signal\ndef say(text):\n    open(f'/proc/{os.getppid()}/fd/1', 'a').write(text + '\\n')\n"
LATER = "import subprocess\nexec(subprocess.check_output(['git', 'show', 'v2:calc.py']))"
MAKE_ALL_PASS = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    out = yield\n    out.get_result().outcome = 'passed'"
)


@pytest.fixture(scope="module")
async def place(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig(tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("state")) as made:
        yield made


@pytest.fixture(scope="module")
def task(place: Rig) -> Task:
    return SweBench().parse(row(place.base), where="row 1")


@pytest.fixture(scope="module")
async def desk(place: Rig, task: Task) -> AsyncIterator[Desk]:
    async with place.agent(task, "desk") as made:
        yield made


async def test_gold_resolves_and_doing_nothing_does_not(place: Rig, task: Task) -> None:
    assert SweBench().check(task) == []
    checked = await validate_task(
        provider=place.provider, spec=SandboxSpec(image="testbed"), task=task, grader=SweBench(), key="validate"
    )
    assert checked.ok, (checked.problems, checked.noop.raw and checked.noop.raw.log.decode())
    assert checked.gold is not None
    assert {t.id for t in checked.gold.verdict.tests} == {*FAIL_TO_PASS, *PASS_TO_PASS}
    assert "swebench-" in checked.gold.verdict.grader_version


ZOO: dict[str, tuple[str, VerdictStatus, bool]] = {
    # What the agent does, our verdict, whether the official package calls it resolved.
    "an_honest_fix": (FIX, RESOLVED, True),
    "an_honest_fix_with_tests_where_the_hidden_ones_go": (
        FIX + python("def test_x(): pass", "tests/test_calc.py"),
        RESOLVED,
        True,
    ),
    "a_wrong_fix": (python("def add(a, b):\n    return b - a"), UNRESOLVED, False),
    "a_syntax_error": (python("def add(:"), UNRESOLVED, False),
    "exit_at_import": (python("import sys\nsys.exit(0)"), UNRESOLVED, False),
    "hard_exit_at_import": (python("import os\nos._exit(0)"), TAMPERED, False),
    "skip_at_import": (python("import pytest\npytest.skip('no', allow_module_level=True)"), UNRESOLVED, False),
    "conftest_hook": (python(MAKE_ALL_PASS, "conftest.py"), TAMPERED, True),
    "conftest_that_prints_and_exits": (
        python(f"{SAY}say('{PASSED}')\nos._exit(0)", "conftest.py"),
        TAMPERED,
        True,
    ),
    "prints_results_and_an_end": (
        python(f"{SAY}say('{PASSED}\\n>>>>> End Test Output')\nos._exit(0)"),
        TAMPERED,
        True,
    ),
    "results_in_a_comment_of_the_patch": (
        "printf 'def add(a, b):\\n    return a - b  # \\r>>>>> Start Test Output"
        + "".join(f"\\rPASSED {name}" for name in (*FAIL_TO_PASS, *PASS_TO_PASS))
        + "\\r>>>>> End Test Output\\r>>>>> Test Exit Code: 0\\n' >calc.py",
        TAMPERED,
        True,
    ),
    "configuration": ("printf '[pytest]\\naddopts = --co\\n' >pytest.ini", TAMPERED, False),
    "reports_patched_in_the_source": (
        python(
            "import _pytest.reports as r\nold = r.TestReport.from_item_and_call.__func__\n"
            "def new(cls, item, call):\n    report = old(cls, item, call)\n"
            "    report.outcome = 'passed'\n    return report\n"
            "r.TestReport.from_item_and_call = classmethod(new)\n" + WRONG
        ),
        TAMPERED,
        True,
    ),
    "kills_the_script_after_printing": (
        python(f"{SAY}say('{PASSED}\\n>>>>> End Test Output')\nos.kill(os.getppid(), signal.SIGKILL)\nos._exit(0)"),
        TAMPERED,
        True,
    ),
    "the_fix_from_a_later_branch": (python(LATER), UNRESOLVED, False),
    "shadowed_pytest": (python(f"print('{PASSED}', flush=True)", "pytest.py"), TAMPERED, True),
    # Known to pass: nothing cheap tells these from a fix.
    "equal_to_everything": (
        python(
            "class Yes(int):\n    __hash__ = None\n    def __eq__(self, other): return True\n"
            "def add(a, b): return Yes()"
        ),
        RESOLVED,
        True,
    ),
    "conftest_hook_for_known_tests_only": (
        python(
            MAKE_ALL_PASS.replace("    out.get_result()", "    if 'test_calc' in item.nodeid: out.get_result()"),
            "conftest.py",
        ),
        RESOLVED,
        True,
    ),
}


@pytest.mark.parametrize("name", ZOO)
async def test_the_zoo(place: Rig, desk: Desk, task: Task, name: str) -> None:
    script, expected, official = ZOO[name]
    patch = await desk.patch(script)
    grading = await place.grade(SweBench(protect="official"), task, patch, name)
    raw = grading.raw
    assert raw is not None
    assert grading.verdict.status == expected, (grading.verdict, raw.log.decode(errors="replace"))
    assert grading.verdict.trainable
    fallen = judge_run(OFFICIAL, task, raw)
    assert (fallen.status is RESOLVED) == official, raw
    assert not fallen.trainable


PLUGIN = python(
    MAKE_ALL_PASS.replace("    out.get_result()", "    if 'test_calc' in item.nodeid: out.get_result()"), "steer.py"
)
STEERED: dict[str, tuple[str, tuple[str, ...]]] = {
    # What the agent does, and what of it is undone.
    "conftest": (ZOO["conftest_hook_for_known_tests_only"][0], ("conftest.py",)),
    "pytest_ini": (PLUGIN + "printf '[pytest]\naddopts = -p steer\n' >pytest.ini", ("pytest.ini",)),
    "pytest_ini_beside_the_tests": (
        PLUGIN + "printf '[pytest]\naddopts = -p steer\n' >tests/.pytest.ini",
        ("tests/.pytest.ini",),
    ),
    "setup_cfg": (PLUGIN + "printf '[tool:pytest]\naddopts = -p steer\n' >setup.cfg", ("setup.cfg",)),
    "pyproject": (
        PLUGIN + "printf '[tool.pytest.ini_options]\naddopts = \"-p steer\"\n' >pyproject.toml",
        ("pyproject.toml",),
    ),
    "pyproject_that_is_no_toml": (PLUGIN + "printf '[tool.pytest' >pyproject.toml", ("pyproject.toml",)),
    "settings_behind_a_link": (
        PLUGIN + "printf '[tool:pytest]\naddopts = -p steer\n' >x; ln -s x setup.cfg",
        ("setup.cfg",),
    ),
}


@pytest.mark.parametrize("name", STEERED)
async def test_what_steers_the_tests_goes_back_to_the_base(place: Rig, desk: Desk, task: Task, name: str) -> None:
    script, undone = STEERED[name]
    verdict = (await place.grade(SweBench(), task, await desk.patch(script), f"steer-{name}")).verdict
    assert (verdict.status, verdict.dropped_paths) == (UNRESOLVED, undone), verdict


async def test_other_changes_of_files_with_settings_stay(place: Rig, desk: Desk, task: Task) -> None:
    honest = (
        FIX + "printf '[project]\nname = \"calc\"\n' >pyproject.toml; printf '[metadata]\nname = calc\n' >setup.cfg"
    )
    grading = await place.grade(SweBench(), task, await desk.patch(honest), "settings-stay")
    assert (grading.verdict.status, grading.verdict.dropped_paths) == (RESOLVED, ())


async def test_a_file_where_the_hidden_tests_add_one_neither_stops_nor_replaces_them(place: Rig, desk: Desk) -> None:
    """In swebench up to 4.1 the test patch then did not apply, and the agent's own file was judged."""
    new = (
        "diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/tests/test_new.py\n@@ -0,0 +1,3 @@\n"
        "+from calc import add\n+def test_new():\n+    assert add(1, 1) == 2\n"
    )
    script = row(place.base)["eval_script"].replace(TEST_PATCH, new)
    script = script.replace(f"git checkout {place.base} tests/test_calc.py\n", "").replace(
        "-rA tests/test_calc.py", "-rA tests/test_new.py"
    )
    fresh = SweBench().parse(
        row(
            place.base,
            test_patch=new,
            eval_script=script,
            FAIL_TO_PASS=["tests/test_new.py::test_new"],
            PASS_TO_PASS=[],
        ),
        where="row 2",
    )
    fixed = await desk.patch(FIX + python("def test_mine(): pass", "tests/test_new.py"))
    assert (await place.grade(SweBench(), fresh, fixed, "new1")).verdict.status == RESOLVED
    cheat = await desk.patch(python("def test_new(): pass", "tests/test_new.py"))
    assert (await place.grade(SweBench(), fresh, cheat, "new2")).verdict.status == UNRESOLVED


async def test_a_patch_that_kills_all_it_can_as_root_is_not_resolved(place: Rig, desk: Desk, task: Task) -> None:
    patch = await desk.patch(python(f"{SAY}say('{PASSED}')\nos.kill(-1, signal.SIGKILL)\nos._exit(0)"))
    verdict = (await place.grade(SweBench(), task, patch, "massacre")).verdict
    assert verdict.status == UNRESOLVED
    assert "script_ended_in_the_tests" in verdict.signals


async def test_a_script_that_hangs_is_a_timeout(place: Rig, desk: Desk, task: Task) -> None:
    patch = await desk.patch(python("import threading\nthreading.Event().wait()"))
    verdict = (await place.grade(SweBench(seconds=3), task, patch, "hang")).verdict
    assert verdict.status == VerdictStatus.TEST_TIMEOUT
