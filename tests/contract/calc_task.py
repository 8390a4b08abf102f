"""One tiny task, its images and the two sandboxes it needs, for the tests of grading."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollwright.graders.grading import Grading, grade
from rollwright.graders.patch import Baseline, Patch, capture
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.sandboxes import Sandbox, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.types import Task

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


def python(code: str, path: str = "calc.py") -> str:
    return f"cat >{path} <<'END'\n{code}\nEND\n"


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


def images(folder: Path) -> None:
    """Three images: `calc` has the repository (on the import path) and pytest, `bare` the repository alone, `plain` a
    folder that is no repository."""
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
