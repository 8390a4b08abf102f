"""A tiny SWE-bench Pro task: the image's history holds the hidden test, as the published images' does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from contract.calc_task import GOLD, WORKDIR

ID = "instance_calc__calc-0123456789abcdef0123456789abcdef01234567-v1"
HISTORY = r"""
set -e
mkdir -p tests
git init -q . && git symbolic-ref HEAD refs/heads/main
git config user.name t && git config user.email t@localhost
printf 'def add(a, b):\n    return a - b\n' >calc.py
printf 'from calc import add\ndef test_zero():\n    assert add(2, 0) == 2\n' >tests/test_calc.py
git add -A && git commit -q -m base
printf 'def add(a, b):\n    return a + b\n' >calc.py
printf 'from calc import add\ndef test_add():\n    assert add(2, 3) == 5\n' >tests/test_hidden.py
git add -A && git commit -q -m 'the solution'
git rev-parse HEAD~1 HEAD
"""
RUN_SCRIPT = """#!/bin/bash
cd "$CALC_HOME"
IFS=, read -ra tests <<<"$1"
python3 -m pytest -v -p no:cacheprovider "${tests[@]}" || true
"""
PARSER = r"""
import json, re, sys
from pathlib import Path
stdout, stderr, output = map(Path, sys.argv[1:4])
found = re.findall(r"^(\S+::\S+) (PASSED|FAILED|SKIPPED|ERROR)", stdout.read_text(), re.M)
output.write_text(json.dumps({"tests": [{"name": n, "status": s} for n, s in found]}))
"""
DOCKERFILE = f"FROM x\nENV CALC_ROOT=/workspace\nENV CALC_HOME ${{CALC_ROOT}}/{WORKDIR.rsplit('/', 1)[1]}\n"


def pro_image(folder: Path) -> tuple[str, str]:
    """Make the image `pro` beside `calc`; base and solution commit."""
    layer = folder / "pro-layer" / WORKDIR[1:]
    layer.mkdir(parents=True)
    made = subprocess.run(["sh", "-c", HISTORY], cwd=layer, check=True, capture_output=True, text=True)
    image = json.loads((folder / "calc" / "image.json").read_text())
    (folder / "pro").mkdir()
    (folder / "pro" / "image.json").write_text(json.dumps(image | {"layers": ["../pro-layer"]}))
    base, solution = made.stdout.split()[-2:]
    return base, solution


def assets(folder: Path) -> Path:
    """The benchmark's scripts, laid out as its repository has them."""
    scripts = folder / "run_scripts" / ID
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text(RUN_SCRIPT)
    (scripts / "parser.py").write_text(PARSER)
    dockerfile = folder / "dockerfiles" / "instance_dockerfile" / ID / "Dockerfile"
    dockerfile.parent.mkdir(parents=True)
    dockerfile.write_text(DOCKERFILE)
    return folder


def pro_row(commits: tuple[str, str], **extra: Any) -> dict[str, Any]:
    base, solution = commits
    return {
        "repo": "calc/calc",
        "instance_id": ID,
        "base_commit": base,
        "patch": GOLD,
        "problem_statement": "add subtracts",
        "requirements": "add adds",
        "interface": "",
        "fail_to_pass": "['tests/test_hidden.py::test_add']",
        "pass_to_pass": "['tests/test_calc.py::test_zero']",
        "before_repo_set_cmd": f"git reset --hard {base}\ngit clean -fd \ngit checkout {base} \n"
        f"git checkout {solution} -- tests/test_hidden.py",
        "selected_test_files_to_run": "['tests/test_hidden.py', 'tests/test_calc.py']",
        "image": "pro",
        "workdir": WORKDIR,
    } | extra
