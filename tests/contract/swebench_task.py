"""A tiny repository in an official-looking image (`/testbed`, conda's activate) for protocols with test scripts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollwright.graders import Grader
from rollwright.graders.grading import Grading, grade
from rollwright.graders.patch import Baseline, Patch, capture, take_baseline
from rollwright.graders.workspace import make_base, prepare, scrub_history
from rollwright.sandboxes import Sandbox, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.types import Task

REPOSITORY = r"""
set -e
mkdir -p tests
git init -q . && git symbolic-ref HEAD refs/heads/main
git config user.name t && git config user.email t@localhost
printf 'def add(a, b):\n    return a + b\n' >calc.py
printf 'from calc import add\ndef test_zero():\n    assert add(2, 0) == 2\n' >tests/test_calc.py
git add -A && git commit -q -m 'the answer is in here'
printf 'def add(a, b):\n    return a - b\n' >calc.py
git commit -q -am base
git checkout -q -b future
printf 'def add(a, b):\n    return a + b\n' >calc.py
git commit -q -am fix && git tag v2
git checkout -q main
"""
TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,3 +1,11 @@
+import pytest
 from calc import add
 def test_zero():
     assert add(2, 0) == 2
+def test_add():
+    assert add(2, 3) == 5
+@pytest.mark.parametrize("a", [1, 2])
+def test_self(a):
+    assert add(a, a) == 2 * a
+def test_later():
+    pytest.skip("needs a network")
"""
GOLD = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
FAIL_TO_PASS = ["tests/test_calc.py::test_add", "tests/test_calc.py::test_self[1]", "tests/test_calc.py::test_self[2]"]
PASS_TO_PASS = ["tests/test_calc.py::test_zero"]
ACTIVATE = """conda() { export CONDA_DEFAULT_ENV=testbed; }
case $PATH in /opt/miniconda3/bin:*) ;; *) PATH=/opt/miniconda3/bin:$PATH ;; esac
"""


def eval_script(base: str, command: str = "pytest -rA tests/test_calc.py") -> str:
    """As SWE-bench writes it."""
    return f"""#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {base}
source /opt/miniconda3/bin/activate
conda activate testbed
git checkout {base} tests/test_calc.py
git apply -v - <<'EOF_114329324912'
{TEST_PATCH}
EOF_114329324912
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
git checkout {base} tests/test_calc.py
"""


def row(base: str, **changes: Any) -> dict[str, Any]:
    """A row of SWE-bench 5."""
    return {
        "instance_id": "tiny__calc-1",
        "repo": "tiny/calc",
        "version": "1",
        "base_commit": base,
        "image": "testbed",
        "problem_statement": "add subtracts",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
        "PASS_TO_PASS": json.dumps(PASS_TO_PASS),
        "eval_script": eval_script(base),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        **changes,
    }


@dataclass
class Rig:
    """Images, boxes, and one agent's box a task."""

    provider: NamespacesProvider
    base: str
    folder: Path

    async def grade(self, grader: Grader, task: Task, patch: Patch | None, key: str) -> Grading:
        return await grade(
            provider=self.provider,
            spec=SandboxSpec(image=task.agent.image),
            task=task,
            patch=patch,
            grader=grader,
            key=key,
        )

    @asynccontextmanager
    async def agent(self, task: Task, key: str) -> AsyncGenerator[Desk]:
        """The agent's box of `task`, as a rollout makes it."""
        box = await self.provider.create(SandboxSpec(image=task.agent.image), key=key)
        try:
            await prepare(box, task.agent)
            await make_base(box, task, for_agent=True)
            await scrub_history(box, task.agent.workdir)
            yield Desk(box, task, await take_baseline(box, task.agent.workdir))
        finally:
            await box.close()


@dataclass
class Desk:
    box: Sandbox
    task: Task
    baseline: Baseline

    async def run(self, script: str) -> str:
        done = await self.box.exec(("sh", "-c", script), user="agent", cwd=self.task.agent.workdir)
        assert done.exit_code == 0, done.stderr
        return done.stdout.decode()

    async def patch(self, script: str) -> Patch:
        """What `script` changes, from the base on."""
        await self.run("git clean -fdxq; git reset -q --hard")
        await self.run(script)
        return await capture(self.box, self.baseline)


def layer(folder: Path, name: str, files: dict[str, str]) -> None:
    """A layer of files; programs where the content begins with `#!`."""
    for path, text in files.items():
        file = folder / f"{name}-layer" / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if text.startswith("#!") else 0o644)


def image(folder: Path, name: str, *layers: str, workdir: str = "/testbed") -> None:
    """An image over the host's with pytest, `pytest` on the path of its conda."""
    site = Path(pytest.__file__).parent.parent
    names = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")
    packages = [p for n in names for p in (site / n, *site.glob(f"{n}-*.dist-info"))]
    spec = {
        "schema": 1,
        "base": "host",
        "layers": [f"../{each}-layer" for each in layers],
        "env": {"PYTHONPATH": f"{workdir}:/opt/site"},
        "mounts": [{"source": str(p), "target": f"/opt/site/{p.name}"} for p in packages if p.exists()],
    }
    (folder / name).mkdir()
    (folder / name / "image.json").write_text(json.dumps(spec))


def repository(folder: Path, name: str, script: str = REPOSITORY, workdir: str = "/testbed") -> str:
    """A layer with a repository. Returns its HEAD."""
    place = folder / f"{name}-layer" / workdir.lstrip("/")
    place.mkdir(parents=True)
    subprocess.run(["sh", "-c", script], cwd=place, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=place, check=True, capture_output=True, text=True
    ).stdout.strip()


@asynccontextmanager
async def rig(images: Path, state: Path) -> AsyncGenerator[Rig]:
    """The image `testbed`."""
    base = repository(images, "repository")
    layer(
        images,
        "conda",
        {
            "/opt/miniconda3/bin/activate": ACTIVATE,
            "/opt/miniconda3/bin/pytest": '#!/bin/sh\nexec python3 -m pytest "$@"\n',
        },
    )
    image(images, "testbed", "repository", "conda")
    async with NamespacesProvider(state_dir=state, images=images) as provider:
        yield Rig(provider, base, images)
