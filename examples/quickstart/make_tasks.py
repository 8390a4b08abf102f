"""Make `tasks.jsonl` from `tasks.toml`, the code and the hidden tests. Run again, it writes the same bytes.

    python examples/quickstart/make_tasks.py

Each task's hidden and visible tests are run on the broken and on the fixed code, so the row's FAIL_TO_PASS and
PASS_TO_PASS are what was seen. For a real package, both the fix and its tests are taken from the release that has them.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepare import (
    CACHE,
    HERE,
    PrepareError,
    Source,
    check_out,
    images,
    interpreter,
    main,
    say,
    site_packages,
    sources,
    unpack,
)

TEST_FILE = "test_fail_to_pass.py"
"""Where the grader puts `f2p_script` in the workdir."""

REPORTER = """
import json, os

seen = {}

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        seen[report.nodeid] = report.outcome

def pytest_sessionfinish():
    with open(os.environ["SEEN"], "w") as file:
        json.dump(seen, file)
"""


def patched(text: str, fixes: list[Mapping[str, str]], where: str) -> str:
    """The file with each fix's one line (or lines) replaced. Each must be there exactly once."""
    for fix in fixes:
        old, new = (fix[key].strip("\n") + "\n" for key in ("old", "new"))
        if f"\n{text}".count(f"\n{old}") != 1:
            raise PrepareError(f"{where}: the line to fix is not there exactly once: {fix['old']!r}")
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    return text


def unified_diff(path: str, old: str, new: str) -> str:
    """A diff of one file, as `git apply` reads it."""
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def outcomes(folder: Path, files: list[str], site: Path) -> dict[str, str]:
    """Test id → outcome of a pytest run in this folder, by an interpreter with the packages in `site` and no others."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "quickstart_reporter.py").write_text(REPORTER)
        seen = Path(name) / "seen.json"
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{site}:{name}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "SEEN": str(seen),
        }
        options = ["-q", "-o", "addopts=", "--rootdir=.", "-c", os.devnull, "-p", "quickstart_reporter"]
        argv = [str(interpreter()), "-S", "-m", "pytest", *options, "-p", "no:cacheprovider", *files]
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode not in (0, 1) or not seen.exists():
            raise PrepareError(f"the tests of {folder.name} did not run:\n{done.stdout}{done.stderr}")
        return json.loads(seen.read_text())


def hidden_tests(source: Source, cache: Path) -> str:
    """The file of tests that the fix makes pass."""
    if source.fixed is None:
        return (HERE / "hidden_tests" / f"{source.name}.py").read_text()
    sdist = source.table["sdist"]
    tests = sdist["tests"]
    with tempfile.TemporaryDirectory() as name:
        unpack(source.fixed, Path(name), cache)
        text = (Path(name) / tests["file"]).read_text()
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if missing := [test for test in tests["names"] if test not in found]:
        raise PrepareError(f"{source.name}: {tests['file']} of {source.fixed.version} does not have {missing}")
    origin = f"# From {sdist['package']} {source.fixed.version}, {tests['file']} ({sdist['licence']})."
    parts = [f"{origin}\n{tests['preamble'].strip()}", *(lines_of(found[test], text) for test in tests["names"])]
    return "\n\n\n".join(parts) + "\n"


def lines_of(node: ast.FunctionDef | ast.ClassDef, text: str) -> str:
    """The source of a definition with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def gold(source: Source, base: Path, cache: Path) -> tuple[str, str]:
    """The reference patch and the fixed file. A real package's fix must lead to its next release's lines."""
    file = source.table["start"]["file"]
    old = (base / file).read_text()
    new = patched(old, source.table["fix"], f"{source.name}: {file}")
    if source.fixed is not None:
        with tempfile.TemporaryDirectory() as name:
            unpack(source.fixed, Path(name), cache)
            released = (Path(name) / file).read_text()
        for fix in source.table["fix"]:
            if fix["new"].strip("\n") not in released or fix["old"] in released.splitlines():
                raise PrepareError(f"{source.name}: {source.fixed.version} does not have this fix: {fix['new']!r}")
    return unified_diff(file, old, new), new


def row(source: Source, cache: Path, site: Path) -> dict[str, Any]:
    """One task in the shape of slime's coding-agent example. `site`: where pytest is."""
    table = source.table
    start = table["start"]
    script = hidden_tests(source, cache)
    with tempfile.TemporaryDirectory() as name:
        broken, fixed = Path(name) / "broken", Path(name) / "fixed"
        check_out(source, broken, cache)
        patch, mended = gold(source, broken, cache)
        (broken / TEST_FILE).write_text(script)
        shutil.copytree(broken, fixed)
        (fixed / start["file"]).write_text(mended)
        tests = [TEST_FILE, *table["visible_tests"]]
        before, after = outcomes(broken, tests, site), outcomes(fixed, tests, site)
    passing = sorted(test for test, outcome in after.items() if outcome == "passed")
    failing = sorted(set(after) - set(passing))
    if failing:
        raise PrepareError(f"{source.name}: these tests do not pass with the fix: {', '.join(failing)}")
    f2p = [test for test in passing if before.get(test) != "passed"]
    if not f2p or not all(test.startswith(TEST_FILE) for test in f2p):
        raise PrepareError(
            f"{source.name}: the hidden tests, and they alone, must fail without the fix; failing: {f2p}"
        )
    statement = f"{table['report'].strip()}\n\nStart with `{start['function']}` in `{start['file']}`."
    return {
        "prompt": statement,
        "label": "",
        "metadata": {
            "image": f"quickstart/{source.name}",
            "workdir": source.workdir,
            "problem_statement": statement,
            "remote_env_info": {
                "instance_id": source.name,
                "f2p_script": script,
                "FAIL_TO_PASS": f2p,
                "PASS_TO_PASS": [test for test in passing if test not in f2p],
                "patch": patch,
            },
        },
    }


def make() -> int:
    """Write `tasks.jsonl`, after the images that the tests run with."""
    if status := main():
        return status
    try:
        rows = [row(source, CACHE, site_packages(images(CACHE) / "_python")) for source in sources()]
    except PrepareError as error:
        print(f"make_tasks: {error}", file=sys.stderr)
        return 1
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
    (HERE / "tasks.jsonl").write_text(text)
    say(f"{len(rows)} tasks in {HERE / 'tasks.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(make())
