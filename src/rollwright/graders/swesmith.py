"""The `swesmith` protocol: rows of SWE-smith, whose `patch` is the bug.

The image holds the code without the bug, so the bug is planted in both sandboxes, and the history below it, which is
the answer, is scrubbed. The files of the tests that the bug breaks are hidden from the agent, as upstream does. Tests
run as SWE-smith's Python profile runs them; repositories with another test runner are refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from rollwright.graders import RawRun, TestPlan
from rollwright.graders.rows import Row, fields, statement, whole_lines, workdir
from rollwright.graders.swebench_log import END, START, parse_pytest_summary, parse_pytest_verbose
from rollwright.graders.swebench_script import ScriptOptions, judge_script, plan_script
from rollwright.types import AgentView, GraderView, Task, Verdict

__all__ = ["SweSmith", "reverse_patch"]

_PYTEST = "pytest --disable-warnings --color=no --tb=no --verbose"
_COMMANDS = {
    "HIPS__autograd": None,
    "mido__mido": f"{_PYTEST} -rs -c /dev/null",
    "paramiko__paramiko": "pytest -rA --color=no --disable-warnings",
    "pydantic__pydantic": f"/root/.local/bin/uv run {_PYTEST}",
    "python__mypy": None,
    "tornadoweb__tornado": None,
    "un33k__python-slugify": None,
}
"""Where it is not `_PYTEST`, by owner__repo; None: not pytest with node ids."""
_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)")
_SWAPPED = {
    "new file mode ": "deleted file mode ",
    "deleted file mode ": "new file mode ",
    "old mode ": "new mode ",
    "new mode ": "old mode ",
    "rename from ": "rename to ",
    "rename to ": "rename from ",
}


class SweSmith:
    """Options of the run file's `[grading.swesmith]` table: `seconds` of the tests, `protect`, `canaries` and `prompt`
    as in `[grading.swebench]`."""

    name = "swesmith"
    version = "1"

    def __init__(
        self,
        *,
        seconds: float = 600,
        protect: Literal["official", "tests"] = "tests",
        canaries: bool = True,
        prompt: str = "{problem_statement}",
    ) -> None:
        self._options = ScriptOptions(
            protocol=self.name, seconds=seconds, protect=protect, canaries=canaries, prompt=prompt
        )

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        reader.must_be(self.name, "image_name")
        folder = workdir(reader, "/testbed")
        bug_name, _ = reader.find(*fields("patch"))
        bug = reader.require(*fields("patch"))
        try:
            gold = reverse_patch(bug)
        except ValueError as e:
            raise reader.error(bug_name, f"cannot be turned round: {e}") from e
        fail_to_pass = reader.ids(*fields("FAIL_TO_PASS"))
        payload = {
            "repo": reader.require(*fields("repo")),
            "fail_to_pass": fail_to_pass,
            "pass_to_pass": reader.ids(*fields("PASS_TO_PASS")),
        }
        image = reader.require(*fields("image_name"), *fields("image"))
        if "/" not in image:
            image = f"jyangballin/{image.replace('__', '_1776_')}".lower()
        return Task(
            agent=AgentView(
                id=reader.digest(),
                image=image,
                workdir=folder,
                prompt=self._options.prompt_for(statement(reader)),
                pre_commands=reader.lines(*fields("pre_commands")),
            ),
            grader=GraderView(
                source_id=reader.require(*fields("instance_id")),
                protocol=self.name,
                payload=payload,
                gold_patch=gold,
                base_patch=whole_lines(bug),
                hidden_paths=tuple(f"{folder}/{file}" for file in _files(reader, fail_to_pass)),
            ),
        )

    def preflight(self) -> list[str]:
        return []

    def check(self, task: Task) -> list[str]:
        payload = task.grader.payload
        problems: list[str] = []
        if not payload["fail_to_pass"]:
            problems.append("FAIL_TO_PASS: is empty, so any patch would be resolved")
        strange = [i for i in (*payload["fail_to_pass"], *payload["pass_to_pass"]) if ".py" not in i.partition("::")[0]]
        if strange or _command(payload["repo"]) is None:
            which = f" ({strange[0]!r} is not a pytest node id)" if strange else ""
            problems.append(f"repo: {payload['repo']} is not tested by SWE-smith's pytest profile{which}")
        return problems

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        command = _command(payload["repo"]) or _PYTEST
        return plan_script(
            self._script(task),
            nonce=nonce,
            workdir=task.agent.workdir,
            taken=[*payload["fail_to_pass"], *payload["pass_to_pass"]],
            options=self._options,
            protected=_test_files(payload),
            user="root" if command.startswith("/root/") else "agent",
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        payload = task.grader.payload
        summary = "-rA" in (_command(payload["repo"]) or _PYTEST)
        return judge_script(
            self._script(task),
            raw=raw,
            grader=self.name,
            version=self.version,
            options=self._options,
            parse=parse_pytest_summary if summary else parse_pytest_verbose,
            fail_to_pass=payload["fail_to_pass"],
            pass_to_pass=payload["pass_to_pass"],
        )

    def _script(self, task: Task) -> str:
        payload = task.grader.payload
        files = " ".join(shlex.quote(file) for file in _test_files(payload))
        return "\n".join(
            [
                "source /opt/miniconda3/bin/activate",
                "conda activate testbed",
                f"cd {shlex.quote(task.agent.workdir)}",
                f": '{START}'",
                f"{_command(payload['repo']) or _PYTEST} {files}",
                f": '{END}'",
            ]
        )


def reverse_patch(patch: str) -> bytes:
    """The patch that undoes a git patch of text files. Raises `ValueError` for one with binary hunks or copies."""
    out: list[str] = []
    old = new = 0
    for line in whole_lines(patch).decode().split("\n")[:-1]:
        if old > 0 or new > 0 or line.startswith("\\"):
            mark = line[:1]
            old -= mark in (" ", "-", "")
            new -= mark in (" ", "+", "")
            out.append({"-": "+", "+": "-"}.get(mark, mark) + line[1:])
            continue
        out.append(_reverse_header(line))
        hunk = _HUNK.fullmatch(line)
        if hunk is not None:
            old, new = (int(part.partition(",")[2] or 1) for part in hunk.groups()[:2])
    return ("\n".join(_in_order(out)) + "\n").encode()


def _reverse_header(line: str) -> str:
    if line.startswith(("GIT binary patch", "Binary files ", "copy from ")):
        raise ValueError(f"it has {line.split(' ')[0].lower()} parts")
    hunk = _HUNK.fullmatch(line)
    if hunk is not None:
        return f"@@ -{hunk.group(2)} +{hunk.group(1)} @@{hunk.group(3)}"
    if line.startswith("--- "):
        return "+++ " + line[4:].replace("a/", "b/", 1) if line[4:].startswith("a/") else "+++ " + line[4:]
    if line.startswith("+++ "):
        return "--- " + line[4:].replace("b/", "a/", 1) if line[4:].startswith("b/") else "--- " + line[4:]
    if line.startswith("diff --git a/"):
        old, _, new = line[len("diff --git a/") :].partition(" b/")
        return f"diff --git a/{new} b/{old}"
    if line.startswith("index "):
        blobs, _, mode = line[len("index ") :].partition(" ")
        old, _, new = blobs.partition("..")
        return f"index {new}..{old}" + (f" {mode}" if mode else "")
    for start, swapped in _SWAPPED.items():
        if line.startswith(start):
            return swapped + line[len(start) :]
    return line


def _in_order(lines: list[str]) -> list[str]:
    """Pairs of headers that git wants in one order: the old side first."""
    for index in range(len(lines) - 1):
        for second, first in (("+++ ", "--- "), ("new mode ", "old mode "), ("rename to ", "rename from ")):
            if lines[index].startswith(second) and lines[index + 1].startswith(first):
                lines[index], lines[index + 1] = lines[index + 1], lines[index]
    return lines


def _command(repo: str) -> str | None:
    return _COMMANDS.get(repo.rpartition("/")[2].rpartition(".")[0], _PYTEST)


def _test_files(payload: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted({i.partition("::")[0] for i in (*payload["fail_to_pass"], *payload["pass_to_pass"])}))


def _files(row: Row, ids: tuple[str, ...]) -> list[str]:
    files = sorted({name.partition("::")[0] for name in ids})
    for file in files:
        if file.startswith("/") or ".." in file.split("/") or not file:
            raise row.error("FAIL_TO_PASS", f"names a file outside of the repository: {file!r}")
    return files
