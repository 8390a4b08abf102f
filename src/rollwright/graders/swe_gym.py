"""The `swe_gym` protocol: rows of SWE-Gym (SWE-bench's columns, other repositories), tested with pytest.

The script is the row's own where it brings one (`eval_script`, or `setup_script` and `test_script`), else pytest over
the files of its tests.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal

from rollwright.graders import RawRun, TestPlan
from rollwright.graders.diff import touched_paths
from rollwright.graders.rows import Row, fields, statement, whole_lines, workdir
from rollwright.graders.swebench import paths_of_tests
from rollwright.graders.swebench_log import END, START, has_markers, parse_pytest_summary
from rollwright.graders.swebench_script import ScriptOptions, judge_script, plan_script
from rollwright.types import AgentView, GraderView, Task, Verdict

__all__ = ["SweGym"]

_IMAGE = "xingyaoww/sweb.eval.x86_64.{id}:latest"
_HEREDOC = "EOF_114329324912"


class SweGym:
    """Options of the run file's `[grading.swe_gym]` table: `seconds`, `protect`, `canaries`, `network` and `prompt` as
    in `[grading.swebench]`."""

    name = "swe_gym"
    version = "1"

    def __init__(
        self,
        *,
        seconds: float = 1800,
        protect: Literal["official", "tests"] = "tests",
        canaries: bool = True,
        network: bool = False,
        prompt: str = "{problem_statement}",
    ) -> None:
        self._options = ScriptOptions(
            protocol=self.name, seconds=seconds, protect=protect, canaries=canaries, prompt=prompt
        )
        self._network = network

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        reader.must_be(self.name, "repo")
        instance_id = reader.require(*fields("instance_id"))
        folder = workdir(reader, "/testbed")
        payload: dict[str, Any] = {
            "repo": reader.require(*fields("repo")),
            "fail_to_pass": reader.ids(*fields("FAIL_TO_PASS")),
            "pass_to_pass": reader.ids(*fields("PASS_TO_PASS")),
            "test_patch": reader.require(*fields("test_patch")),
        }
        own = _own_script(reader)
        payload["script"] = own or _made_script(folder, payload["test_patch"], payload["fail_to_pass"])
        payload["script_applies_test_patch"] = own is not None
        image = reader.text(*fields("image"), *fields("image_url"), *fields("docker_image"))
        gold = reader.text(*fields("patch"))
        return Task(
            agent=AgentView(
                id=reader.digest(),
                image=image or _IMAGE.replace("{id}", instance_id.lower().replace("__", "_s_")),
                workdir=folder,
                prompt=self._options.prompt_for(statement(reader)),
                pre_commands=reader.lines(*fields("pre_commands")),
            ),
            grader=GraderView(
                source_id=instance_id,
                protocol=self.name,
                payload=payload,
                gold_patch=None if gold is None else whole_lines(gold),
            ),
        )

    def preflight(self) -> list[str]:
        return []

    def check(self, task: Task) -> list[str]:
        payload = task.grader.payload
        problems: list[str] = []
        if not payload["fail_to_pass"]:
            problems.append("FAIL_TO_PASS: is empty, so any patch would be resolved")
        if not has_markers(payload["script"]):
            problems.append("eval_script: it cannot be told where its tests begin and end")
        return problems

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        return plan_script(
            payload["script"],
            nonce=nonce,
            workdir=task.agent.workdir,
            taken=[*payload["fail_to_pass"], *payload["pass_to_pass"]],
            options=self._options,
            protected=paths_of_tests(payload["test_patch"], payload["script"]),
            user="root",
            needs_history=payload["script_applies_test_patch"],
            test_patch=b"" if payload["script_applies_test_patch"] else whole_lines(payload["test_patch"]),
            network=self._network,
            env={} if self._network else {"PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        payload = task.grader.payload
        return judge_script(
            payload["script"],
            raw=raw,
            grader=self.name,
            version=self.version,
            options=self._options,
            parse=parse_pytest_summary,
            fail_to_pass=payload["fail_to_pass"],
            pass_to_pass=payload["pass_to_pass"],
        )


def _own_script(row: Row) -> str | None:
    """The row's script, with markers around its tests."""
    setup, tests = row.text(*fields("setup_script")), row.text(*fields("test_script"))
    if setup is not None and tests is not None:
        *before, command = [line for line in tests.strip().split("\n") if not line.startswith("#!")]
        return "\n".join([setup.strip(), *before, f": '{START}'", command, f": '{END}'"])
    script = row.text(*fields("eval_script"))
    if script is None or has_markers(script):
        return script
    # SWE-bench's older scripts: the tests stand between the test patch and the last checkout.
    lines = script.strip().split("\n")
    begin = max((i for i, line in enumerate(lines) if line == _HEREDOC), default=-1) + 1
    end = max((i for i, line in enumerate(lines) if line.startswith("git checkout ")), default=-1)
    if not 0 < begin < end:
        return script
    return "\n".join([*lines[:begin], f": '{START}'", *lines[begin:end], f": '{END}'", *lines[end:]])


def _made_script(folder: str, test_patch: str, fail_to_pass: tuple[str, ...]) -> str:
    """Pytest over the files of the test patch and of the tests to fix. The patch itself is applied before."""
    touched = (path.decode("utf-8", "replace") for path in touched_paths(test_patch.encode()))
    files = sorted({path for path in touched if path.endswith(".py")} | {i.partition("::")[0] for i in fail_to_pass})
    return "\n".join(
        [
            "source /opt/miniconda3/bin/activate",
            "conda activate testbed",
            f"cd {shlex.quote(folder)}",
            f": '{START}'",
            f"pytest -rA --color=no {shlex.join(files)}",
            f": '{END}'",
        ]
    )
