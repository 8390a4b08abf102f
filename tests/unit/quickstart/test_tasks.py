"""The rows of examples/quickstart/tasks.jsonl: their shape, their proof, and that they give nothing away."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import make_tasks
import prepare
import pytest
from policy_corpus import SWAPS

from rollwright.graders.scaleswe import ScaleSwe

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (prepare.HERE / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
]
SOURCES = {source.name: source for source in prepare.sources()}
OWN = [name for name, source in SOURCES.items() if source.base is None]
REAL = [name for name in SOURCES if name not in OWN]
SITE = Path(pytest.__file__).parents[1]
START = re.compile(r"Start with `(\w+)` in `([\w./-]+)`\.")
SHOWN = 14
"""Lines after the `def` that the demo's policy looks at."""


def name_of(row: dict[str, Any]) -> str:
    return row["metadata"]["remote_env_info"]["instance_id"]


BY_NAME = {name_of(row): row for row in ROWS}
each_row = pytest.mark.parametrize("row", ROWS, ids=name_of)


def changed_lines(patch: str) -> tuple[list[str], list[str]]:
    """The lines a patch takes out and puts in."""
    body = [line for line in patch.splitlines() if not line.startswith(("---", "+++"))]
    return [s[1:] for s in body if s.startswith("-")], [s[1:] for s in body if s.startswith("+")]


def swap(patch: str) -> tuple[str, str] | None:
    """The one operator that the fix swaps for its partner, if sed's first match on the line is that operator."""
    removed, added = changed_lines(patch)
    if (len(removed), len(added)) != (1, 1):
        return None
    return next(((old, new) for old, new in SWAPS.items() if removed[0].replace(old, new, 1) == added[0]), None)


def test_names_are_unique_and_in_the_order_of_their_sources() -> None:
    assert [name_of(row) for row in ROWS] == list(SOURCES)


def test_the_first_eight_tasks_mix_real_packages_and_our_own() -> None:
    first = [name_of(row) for row in ROWS[:8]]
    assert sum(name in REAL for name in first) >= 4
    assert sum(name in OWN for name in first) >= 4


@each_row
def test_a_row_has_the_shape_of_slimes_example(row: dict[str, Any]) -> None:
    assert set(row) == {"prompt", "label", "metadata"}
    metadata = row["metadata"]
    assert set(metadata) == {"image", "workdir", "problem_statement", "remote_env_info"}
    assert metadata["image"] == f"quickstart/{name_of(row)}"
    assert metadata["workdir"] == f"/workspace/{name_of(row)}"
    hidden = metadata["remote_env_info"]
    assert set(hidden) == {"instance_id", "f2p_script", "FAIL_TO_PASS", "PASS_TO_PASS", "patch"}
    assert hidden["FAIL_TO_PASS"]
    assert all(test.startswith("test_fail_to_pass.py::") for test in hidden["FAIL_TO_PASS"])
    assert not set(hidden["FAIL_TO_PASS"]) & set(hidden["PASS_TO_PASS"])


@each_row
def test_a_row_is_read_by_its_grader_without_a_complaint(row: dict[str, Any]) -> None:
    grader = ScaleSwe()
    task = grader.parse(row, where=name_of(row))
    assert grader.check(task) == []
    assert task.agent.prompt == row["prompt"]
    assert task.grader.gold_patch == row["metadata"]["remote_env_info"]["patch"].encode()


@each_row
def test_a_prompt_is_short_and_ends_with_where_to_start(row: dict[str, Any]) -> None:
    start = SOURCES[name_of(row)].table["start"]
    assert len(row["prompt"].split()) <= 90
    found = START.fullmatch(row["prompt"].splitlines()[-1])
    assert found is not None
    assert found.groups() == (start["function"], start["file"])


@each_row
def test_a_prompt_gives_neither_the_fix_nor_the_tests_away(row: dict[str, Any]) -> None:
    hidden = row["metadata"]["remote_env_info"]
    told = row["prompt"] + row["metadata"]["problem_statement"]
    _, added = changed_lines(hidden["patch"])
    tests = hidden["f2p_script"].splitlines()
    secrets = {line.strip() for line in [*added, *tests] if len(line.strip()) > 8}
    secrets |= {test.partition("::")[2].partition("[")[0] for test in hidden["FAIL_TO_PASS"]}
    assert [secret for secret in secrets if secret in told] == []


@pytest.mark.parametrize("name", OWN)
def test_a_row_of_our_own_is_what_its_sources_make(name: str, tmp_path: Path) -> None:
    """Making it runs its tests: all pass with the gold patch; of the hidden ones those in FAIL_TO_PASS fail without."""
    assert make_tasks.row(SOURCES[name], tmp_path, SITE) == BY_NAME[name]


@pytest.mark.parametrize("name", OWN)
def test_the_repository_shows_nothing_of_the_hidden_tests(name: str) -> None:
    hidden = set(re.findall(r"def (test_\w+)", BY_NAME[name]["metadata"]["remote_env_info"]["f2p_script"]))
    shown = "".join(path.read_text() for path in (prepare.HERE / "repos" / name).rglob("*.py"))
    assert hidden
    assert not hidden & set(re.findall(r"def (test_\w+)", shown))


@pytest.mark.parametrize("name", OWN)
def test_one_sed_on_a_line_the_policy_looks_at_is_the_gold_patch(name: str, tmp_path: Path) -> None:
    start = SOURCES[name].table["start"]
    patch = BY_NAME[name]["metadata"]["remote_env_info"]["patch"]
    operators = swap(patch)
    assert operators is not None
    by_git, by_sed = (shutil.copytree(prepare.HERE / "repos" / name, tmp_path / tool) for tool in ("git", "sed"))
    subprocess.run(["git", "apply", "-"], cwd=by_git, input=patch.encode(), check=True)

    lines = (by_sed / start["file"]).read_text().splitlines()
    definitions = [number for number, line in enumerate(lines, 1) if f"def {start['function']}" in line]
    buggy = lines.index(changed_lines(patch)[0][0]) + 1
    assert len(definitions) == 1
    assert 0 < buggy - definitions[0] <= SHOWN
    subprocess.run(["sed", "-i", f"{buggy}s/{operators[0]}/{operators[1]}/", start["file"]], cwd=by_sed, check=True)
    assert (by_sed / start["file"]).read_text() == (by_git / start["file"]).read_text()


def test_some_fixes_of_real_packages_are_one_swapped_operator_and_some_are_not() -> None:
    swaps = [swap(BY_NAME[name]["metadata"]["remote_env_info"]["patch"]) for name in REAL]
    assert None in swaps
    assert any(swaps)


@pytest.fixture(scope="module")
def images() -> Path:
    """The folder that `make demo` uses, built when it is not."""
    prepare.prepare(prepare.CACHE)
    return prepare.images(prepare.CACHE)


@pytest.mark.network
@pytest.mark.parametrize("name", REAL)
def test_a_row_of_a_real_package_is_what_the_two_releases_make(name: str, images: Path) -> None:
    site = prepare.site_packages(images / "_python")
    assert make_tasks.row(SOURCES[name], prepare.CACHE, site) == BY_NAME[name]
