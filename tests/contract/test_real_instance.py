"""A real instance of SWE-bench (pytest-dev__pytest-11143), on released sources: gold, nothing, a cheat.

Its base commit was never released, so the base is 7.4.3, which has the bug, and gold is what 7.4.4 changed there. Test
patch and test lists are the row's. (The data set and pytest are MIT-licensed.)
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from contract.calc_task import python
from contract.swebench_task import ACTIVATE, Rig, image, layer, repository
from rollwright.graders.swebench import SweBench
from rollwright.graders.swebench_package import installed_version, problem
from rollwright.graders.validation import validate_task
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.types import VerdictStatus

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.network,
    pytest.mark.timeout(600),
    pytest.mark.skipif("ROLLWRIGHT_SWEBENCH" not in os.environ, reason="some minutes: make test-swebench"),
    pytest.mark.skipif(problem() is not None, reason="the swebench package is not installed"),
]

ROW: dict[str, Any] = json.loads((Path(__file__).parent / "pytest_11143.json").read_text())
TESTS = "testing/test_assertrewrite.py"
FIXED = "src/_pytest/assertion/rewrite.py"
COMMIT = "git init -q . && git add -A -f && git -c user.name=t -c user.email=t@localhost commit -q -m base"


def eval_script(base: str) -> str:
    """As the data set has it."""
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
python -m pip install -e .
git checkout {base} {TESTS}
git apply -v - <<'EOF_114329324912'
{ROW["test_patch"]}
EOF_114329324912
: '>>>>> Start Test Output'
pytest -rA {TESTS}
: '>>>>> End Test Output'
git checkout {base} {TESTS}
"""


def release(folder: Path, version: str) -> Path:
    """pytest's source archive, unpacked."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    if subprocess.run([*download, f"pytest=={version}"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the package registry does not answer")
    with tarfile.open(folder / f"pytest-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"pytest-{version}"


def between(old: Path, new: Path) -> str:
    """How the fixed file changed, as a patch."""
    lines = [(path / FIXED).read_text().splitlines(keepends=True) for path in (old, new)]
    return f"diff --git a/{FIXED} b/{FIXED}\n" + "".join(difflib.unified_diff(*lines, f"a/{FIXED}", f"b/{FIXED}"))


async def test_a_real_instance(tmp_path: Path) -> None:
    images = tmp_path / "images"
    buggy, fixed = release(tmp_path, "7.4.3"), release(tmp_path, "7.4.4")
    base = repository(images, "pytest", f"cp -R {buggy}/. . && {COMMIT}")
    run = '#!/bin/sh\nexec python3 -m pytest "$@"\n'
    layer(images, "conda", {"/opt/miniconda3/bin/activate": ACTIVATE, "/opt/miniconda3/bin/pytest": run})
    image(images, "real", "pytest", "conda", workdir="/testbed/src")
    gold = {"patch": between(buggy, fixed)}
    row = ROW | gold | {"base_commit": base, "image": "real", "environment_setup_commit": None}
    if not (installed_version() or "").startswith("4.1."):
        row |= {"eval_script": eval_script(base), "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    grader = SweBench()
    task = grader.parse(row, where="row")
    assert grader.check(task) == []
    async with NamespacesProvider(state_dir=tmp_path / "state", images=images) as provider:
        checked = await validate_task(
            provider=provider, spec=SandboxSpec(image="real"), task=task, grader=grader, key="real"
        )
        logs = [grading.raw.log[-3000:].decode() for grading in (checked.noop, *checked.golds) if grading.raw]
        assert checked.ok, (checked.problems, *logs)
        assert checked.fail_to_pass == tuple(ROW["FAIL_TO_PASS"])
        assert set(checked.pass_to_pass) == set(ROW["PASS_TO_PASS"])
        assert len(checked.pass_to_pass) == 114
        place = Rig(provider, base, images)
        async with place.agent(task, "desk") as desk:
            skips = python("import pytest\npytest.skip('no', allow_module_level=True)", TESTS)
            hook = python(
                "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
                "    out = yield\n    out.get_result().outcome = 'passed'",
                "conftest.py",
            )
            cheat = await place.grade(grader, task, await desk.patch(skips + hook), "cheat")
    assert cheat.verdict.status is VerdictStatus.UNRESOLVED
    assert set(cheat.verdict.dropped_paths) == {"conftest.py", TESTS}
