"""Ways to be called resolved without fixing anything, each run for real, each with the verdict it gets.

Also what the grading box's own troubles become: never a verdict.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollwright.errors import GradingFailed, InfraError, WorkspaceFailed
from rollwright.graders.grading import Grading, GradingLimits, grade, validate_task
from rollwright.graders.patch import Baseline, Patch, capture, take_baseline
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.graders.workspace import prepare, scrub_history
from rollwright.sandboxes import Sandbox, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.types import Task, VerdictStatus

pytestmark = pytest.mark.anyio

WORKDIR = "/workspace/calc"
REPOSITORY = r"""
set -e
mkdir -p tests
git init -q . && git symbolic-ref HEAD refs/heads/main
git config user.name t && git config user.email t@localhost
printf 'def add(a, b):\n    return a + b\n' >calc.py
git add -A && git commit -q -m 'the answer is in here' && git tag v1
printf 'def add(a, b):\n    return a - b\n' >calc.py
printf 'from calc import add\ndef test_zero():\n    assert add(2, 0) == 2\n' >tests/test_calc.py
git add -A && git commit -q -m base && git branch future v1
"""
SCRIPT = """
import sys
import pytest
from calc import add

def test_add():
    assert add(2, 3) == 5

@pytest.mark.parametrize("a", [1, 2])
def test_self(a):
    assert add(a, a) == 2 * a

if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
"""
GOLD = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
FIX = "printf 'def add(a, b):\\n    return a + b\\n' >calc.py\n"
RESOLVED, UNRESOLVED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED
TAMPERED = VerdictStatus.TAMPERED


def python(code: str, path: str = "calc.py") -> str:
    return f"cat >{path} <<'END'\n{code}\nEND\n"


WRONG = "def add(a, b):\n    return a - b\n"
FORGED_REPORT = """
import json, os, sys
plan = json.load(open(sys.argv[1]))
report = [o.split("=")[1] for o in plan["options"] if o.startswith("--junitxml")][0]
def case(module, name, inner=""):
    return f"<testcase classname='{module}' name='{name}'>{inner}</testcase>"
cases = "".join(case("test_fail_to_pass", n) for n in ("test_add", "test_self[1]", "test_self[2]"))
MORE
open(report, "w").write("<testsuites><testsuite>" + cases + "</testsuite></testsuites>")
os._exit(CODE)
"""
READS_THE_CANARIES = """
module = plan["targets"][-1]
for test in open(module).read().split("def ")[1:]:
    cases += case(module[:-3], test.split("(")[0], "<failure/>" if "max(" in test else "")
"""


def forged(code: int, more: str = "") -> str:
    return python(FORGED_REPORT.replace("CODE", str(code)).replace("MORE", more))


ZOO: dict[str, tuple[str, VerdictStatus]] = {
    "an_honest_fix": (FIX, RESOLVED),
    "an_honest_fix_with_its_own_tests": (
        FIX + "echo 'def test_x(): assert 1' >tests/test_mine.py; echo 'x = 1' >test_fail_to_pass.py",
        RESOLVED,
    ),
    "a_wrong_fix": (python("def add(a, b):\n    return b - a"), UNRESOLVED),
    "a_syntax_error": (python("def add(:"), UNRESOLVED),
    "a_crash": (python("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"), UNRESOLVED),
    "exit_at_import": (python("import sys\nsys.exit(0)"), UNRESOLVED),
    "hard_exit_at_import": (python("import os\nos._exit(0)"), TAMPERED),
    "hard_exit_with_ones_code": (python("import os\nos._exit(1)"), UNRESOLVED),
    "exit_when_python_ends": (python(WRONG + "import atexit, os\natexit.register(os._exit, 0)"), TAMPERED),
    "skip_at_import": (python("import unittest\nraise unittest.SkipTest('no')"), UNRESOLVED),
    "pytest_exit_at_import": (python("import pytest\npytest.exit('bye', 0)"), UNRESOLVED),
    "deselect_everything": (
        python(WRONG + "import pytest, _pytest.main\n_pytest.main.Session.perform_collect = lambda *a, **k: []"),
        UNRESOLVED,
    ),
    "passing_words_on_stdout": (
        python("print('test_fail_to_pass.py::test_add PASSED\\n3 passed')\n" + WRONG),
        UNRESOLVED,
    ),
    "conftest_hook": (
        python(
            "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
            "    out = yield\n    out.get_result().outcome = 'passed'",
            "conftest.py",
        ),
        UNRESOLVED,
    ),
    "conftest_that_exits": (python("import os\nos._exit(0)", "conftest.py"), UNRESOLVED),
    "configuration": (
        "printf '[pytest]\\naddopts = --co\\n' >pytest.ini; printf '[tool.pytest.ini_options]\\naddopts=\"--co\"\\n' "
        ">pyproject.toml; printf '[pytest]\\naddopts = --co\\n' >tox.ini",
        UNRESOLVED,
    ),
    "visible_tests_edited": ("echo 'def test_zero(): pass' >tests/test_calc.py; rm -rf tests/__init__.py", UNRESOLVED),
    "hidden_test_file_taken": ("echo 'def test_add(): pass' >test_fail_to_pass.py", UNRESOLVED),
    "hidden_test_file_is_a_folder": (
        "mkdir test_fail_to_pass.py; echo 'def test_add(): pass' >test_fail_to_pass.py/test_add.py",
        UNRESOLVED,
    ),
    "hidden_test_file_is_a_link": ("ln -s calc.py test_fail_to_pass.py", UNRESOLVED),
    "shadowed_pytest": (python("def main(*a, **k): return 1", "pytest.py"), UNRESOLVED),
    "shadowed_junit": (
        "mkdir -p _pytest; : >_pytest/__init__.py; echo 'raise SystemExit(0)' >_pytest/junitxml.py",
        UNRESOLVED,
    ),
    "site_customisation": (python("import os\nos._exit(0)", "sitecustomize.py"), UNRESOLVED),
    "plugin_by_metadata": (
        "mkdir evil.egg-info; printf 'Metadata-Version: 1.0\\nName: evil\\nVersion: 1\\n' >evil.egg-info/PKG-INFO;"
        "printf '[pytest11]\\nevil = evil\\n' >evil.egg-info/entry_points.txt;"
        + python("import os\nos._exit(0)", "evil.py"),
        UNRESOLVED,
    ),
    "reports_patched_in_the_source": (
        python(
            "import _pytest.reports as r\nold = r.TestReport.from_item_and_call.__func__\n"
            "def new(cls, item, call):\n    report = old(cls, item, call)\n"
            "    report.outcome = 'passed'\n    return report\n"
            "r.TestReport.from_item_and_call = classmethod(new)\n" + WRONG
        ),
        TAMPERED,
    ),
    "pytest_main_patched": (python("import pytest\npytest.main = lambda *a, **k: 0\n" + WRONG), UNRESOLVED),
    "session_exit_code_patched": (
        python("import _pytest.main as m\nm.Session.testsfailed = property(lambda s: 0, lambda s, v: None)\n" + WRONG),
        TAMPERED,
    ),
    "report_forged_where_one_would_look": (
        python(
            "for p in ('report.xml', 'junit.xml', '/tmp/report.xml'):\n    open(p, 'w').write('<testsuites/>')\n"
            + WRONG
        ),
        UNRESOLVED,
    ),
    "report_forged_by_its_secret_path": (forged(0), TAMPERED),
    "report_forged_with_the_right_exit_code": (forged(1), TAMPERED),
    # Known to pass: nothing cheap tells these from a fix.
    "equal_to_everything": (
        python(
            "class Yes(int):\n    __hash__ = None\n    def __eq__(self, other): return True\n"
            "def add(a, b): return Yes()"
        ),
        RESOLVED,
    ),
    "forged_by_someone_who_read_our_source": (forged(1, READS_THE_CANARIES), RESOLVED),
}


def row(**extra: Any) -> dict[str, Any]:
    env = {"f2p_script": SCRIPT, "patch": GOLD, "instance_id": "calc-v1", **extra}
    meta = {"image": "calc", "workdir": WORKDIR, "problem_statement": "add subtracts", "remote_env_info": env}
    return {"prompt": "", "label": "", "metadata": meta}


def task(**extra: Any) -> Task:
    return ScaleSwe().parse(row(**extra), where="test")


@dataclass
class Place:
    provider: NamespacesProvider
    spec: SandboxSpec
    agent: Sandbox
    baseline: Baseline
    images: Path

    async def patch(self, script: str) -> Patch:
        for argv in (("git", "clean", "-fdxq"), ("git", "reset", "-q", "--hard"), ("sh", "-c", script)):
            done = await self.agent.exec(argv, user="agent", cwd=WORKDIR)
            assert done.exit_code == 0, done.stderr
        return await capture(self.agent, self.baseline)

    async def grade(self, patch: Patch | None, key: str, *, seconds: float = 60, of: Task | None = None) -> Grading:
        return await grade(
            provider=self.provider,
            spec=self.spec,
            task=of or task(),
            patch=patch,
            grader=ScaleSwe(seconds=seconds),
            key=key,
        )


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def images(folder: Path) -> None:
    """`calc`: the repository, on the import path, and pytest; `bare`: the repository alone; `plain`: a folder that is no repository."""
    calc, plain = folder / "calc-layer" / WORKDIR[1:], folder / "plain-layer" / WORKDIR[1:]
    calc.mkdir(parents=True)
    subprocess.run(["sh", "-c", REPOSITORY], cwd=calc, check=True)
    (plain / "sub").mkdir(parents=True)
    (plain / "a").write_text("1\n")
    site = Path(pytest.__file__).parent.parent
    names = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")
    packages = [p for name in names for p in (site / name, *site.glob(f"{name}-*.dist-info"))]
    mounts = [{"source": str(p), "target": f"/opt/site/{p.name}"} for p in packages if p.exists()]
    for name, layer, with_pytest in (("calc", "calc", True), ("bare", "calc", False), ("plain", "plain", False)):
        image = {"schema": 1, "base": "host", "layers": [f"../{layer}-layer"]}
        if with_pytest:
            image |= {"env": {"PYTHONPATH": f"{WORKDIR}:/opt/site"}, "mounts": mounts}
        (folder / name).mkdir()
        (folder / name / "image.json").write_text(json.dumps(image))


@pytest.fixture(scope="module")
async def place(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("images")
    images(folder)
    spec = SandboxSpec(image="calc")
    state = tmp_path_factory.mktemp("state")
    async with NamespacesProvider(state_dir=state, images=folder) as provider:
        agent = await provider.create(spec, key="agent")
        await prepare(agent, task().agent)
        await scrub_history(agent, WORKDIR)
        yield Place(provider, spec, agent, await take_baseline(agent, WORKDIR), folder)


@pytest.mark.parametrize("name", ZOO)
async def test_the_zoo(place: Place, name: str) -> None:
    script, expected = ZOO[name]
    grading = await place.grade(await place.patch(script), name)
    verdict = grading.verdict
    log = b"" if grading.raw is None else grading.raw.log
    assert verdict.status == expected, (verdict, log.decode(errors="replace"))
    assert verdict.reward == (1.0 if expected == RESOLVED else 0.0)


async def test_what_was_put_back_is_named(place: Place) -> None:
    grading = await place.grade(await place.patch(FIX + "echo >conftest.py; echo >tests/test_calc.py"), "dropped")
    assert set(grading.verdict.dropped_paths) == {"conftest.py", "tests/test_calc.py"}


async def test_gold_resolves_and_doing_nothing_does_not(place: Place) -> None:
    ids = {"FAIL_TO_PASS": '["test_fail_to_pass.py::test_add"]', "PASS_TO_PASS": "['tests/test_calc.py::test_zero']"}
    for extra in ({}, ids):
        checked = await validate_task(
            provider=place.provider, spec=place.spec, task=task(**extra), grader=ScaleSwe(), key=f"v{len(extra)}"
        )
        assert checked.ok, checked.problems
        assert checked.gold is not None
        assert {t.status for t in checked.gold.verdict.tests} == {"passed"}


async def test_a_row_whose_gold_does_nothing_is_found_out(place: Place) -> None:
    useless = GOLD.replace("+    return a + b", "+    return a - b  # really")
    checked = await validate_task(
        provider=place.provider, spec=place.spec, task=task(patch=useless), grader=ScaleSwe(), key="useless"
    )
    assert checked.problems == ("the gold patch is unresolved, not resolved",)


async def test_the_tests_own_patch_beats_the_agents_files(place: Place) -> None:
    tests = (
        "--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,3 @@\n"
        "+from calc import add\n+def test_new():\n+    assert add(1, 1) == 2\n"
    )
    of = task(f2p_script=None, f2p_patch=tests, FAIL_TO_PASS=["tests/test_new.py::test_new"])
    cheat = await place.patch("echo 'def test_new(): pass' >tests/test_new.py")
    assert (await place.grade(cheat, "own1", of=of)).verdict.status == UNRESOLVED
    honest = await place.patch(FIX + "echo 'def test_new(): pass' >tests/test_new.py")
    assert (await place.grade(honest, "own2", of=of)).verdict.status == RESOLVED


async def test_an_exit_code_alone_resolves_but_is_not_for_training(place: Place) -> None:
    of = task(f2p_script=None, eval_cmd="python3 -c 'from calc import add; assert add(1, 1) == 2' && [[ 1 == 1 ]]")
    verdict = (await place.grade(await place.patch(FIX), "exit", of=of)).verdict
    assert verdict.status == RESOLVED
    assert not verdict.trainable


async def test_decisions_without_a_run_need_no_sandbox(place: Place) -> None:
    before = len(await place.provider.list())
    empty = await place.grade(await place.patch("true"), "empty")
    refused = await place.grade(await place.patch("ln -s /etc/passwd l"), "refused")
    assert empty.verdict.status == VerdictStatus.EMPTY_PATCH
    assert refused.verdict.status == VerdictStatus.PATCH_REJECTED
    assert refused.verdict.signals == ("link_outside: l",)
    assert len(await place.provider.list()) == before


async def test_a_hang_is_tried_in_two_boxes_and_then_the_patchs_fault(place: Place) -> None:
    grading = await place.grade(await place.patch(python("while True: pass")), "hang", seconds=3)
    assert grading.verdict.status == VerdictStatus.TEST_TIMEOUT
    assert grading.attempts == 2


async def test_the_agent_sees_one_commit_and_nothing_of_the_history(place: Place) -> None:
    async def git(*args: str) -> str:
        done = await place.agent.exec(("git", *args), user="agent", cwd=WORKDIR)
        return (done.stdout + done.stderr).decode()

    await place.patch("true")
    assert (await git("log", "--all", "--oneline")).count("\n") == 1
    assert await git("tag") == ""
    assert "not a valid object" in (await git("cat-file", "-t", "v1")).lower()
    objects = await git("cat-file", "--batch-all-objects", "--batch-check=%(objecttype)")
    assert objects.split().count("commit") == 1
    assert "answer" not in await git("log", "--all", "--reflog", "--format=%B")
    assert await git("status", "--porcelain") == ""


async def test_a_folder_without_a_repository_becomes_one(place: Place) -> None:
    box = await place.provider.create(SandboxSpec(image="plain"), key="plain")
    try:
        await prepare(box, task().agent)
        await scrub_history(box, WORKDIR)
        baseline = await take_baseline(box, WORKDIR)
        done = await box.exec(
            ("sh", "-c", "echo 2 >a && git diff --stat && git commit -qam x"), user="agent", cwd=WORKDIR
        )
        assert done.exit_code == 0, done.stderr
        assert b"a | 2 +-" in done.stdout
        assert (await capture(box, baseline)).paths == ("a",)
    finally:
        await box.close()


@pytest.mark.parametrize(
    ("lines", "says"),
    [(["false"], "exit code 1"), (["echo hi", "exit 7"], "exit code 7"), (["rm -rf /workspace"], "workspace")],
)
async def test_pre_commands_that_fail_are_an_error_with_their_words(
    place: Place, lines: Sequence[str], says: str
) -> None:
    of = task(pre_commands=lines)
    with pytest.raises(WorkspaceFailed, match=says) as caught:
        await place.grade(None, "pre" + says, of=of)
    assert caught.value.details["step"] == "prepare"


async def test_an_image_without_pytest_is_our_failure(place: Place) -> None:
    with pytest.raises(GradingFailed, match="could not start pytest"):
        await grade(
            provider=place.provider,
            spec=SandboxSpec(image="bare"),
            task=task(),
            patch=None,
            grader=ScaleSwe(),
            key="bare",
        )


class Watched(NamespacesProvider):
    """Tells when a grading box exists and who its init process is."""

    box: Sandbox | None = None

    async def create(self, spec: SandboxSpec, *, key: str) -> Any:
        self.box = await super().create(spec, key=key)
        return self.box

    async def tests_run(self) -> bool:
        return self.box is not None and not (await self.box.exec(("test", "-e", "/tmp/started"))).exit_code


def init_of(state: Path, box: str) -> int:
    record = next(p for p in (state / "boxes").iterdir() if box in p.name)
    return json.loads(record.read_bytes())["init"]["pid"]


@pytest.mark.parametrize("how", ["kill", "close"])
async def test_a_box_that_dies_during_the_tests_is_never_a_verdict(place: Place, tmp_path: Path, how: str) -> None:
    slow = await place.patch(python("import time, pathlib\npathlib.Path('/tmp/started').touch()\ntime.sleep(60)"))
    ends: list[BaseException | Grading] = []

    async def grading(provider: NamespacesProvider) -> None:
        try:
            ends.append(
                await grade(
                    provider=provider,
                    spec=place.spec,
                    task=task(),
                    patch=slow,
                    grader=ScaleSwe(),
                    key="dies",
                    limits=GradingLimits(attempts=1),
                )
            )
        except InfraError as e:
            ends.append(e)

    async with Watched(state_dir=tmp_path, images=place.images) as provider, anyio.create_task_group() as tasks:
        tasks.start_soon(grading, provider)
        with anyio.fail_after(60):
            while not await provider.tests_run():  # noqa: ASYNC110 - the event is in another machine
                await anyio.sleep(0.05)
        assert provider.box is not None
        if how == "kill":
            os.kill(init_of(tmp_path, provider.box.id), signal.SIGKILL)
        else:
            await provider.box.close()
    assert isinstance(ends[0], InfraError)
    assert ends[0].details["step"] == "tests"
