"""The `swerebench_v2` protocol: rows of SWE-rebench V2, twenty languages, judged by the parser each row names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rollwright.errors import GradingFailed
from rollwright.graders import RawRun, TestPlan
from rollwright.graders.rows import Row, fields, statement, whole_lines, workdir
from rollwright.graders.swebench import paths_of_tests
from rollwright.graders.swebench_log import END, START, parse_pytest_summary
from rollwright.graders.swebench_package import INSTALL, installed_version, load_parser, parser_names, problem
from rollwright.graders.swebench_script import ScriptOptions, judge_script, plan_script, script_folder
from rollwright.types import AgentView, GraderView, Task, Verdict

__all__ = ["SweRebenchV2", "without_time"]

_APPLY = "git apply -v --3way --recount --ignore-space-change --whitespace=nowarn"
_TIMES = (
    re.compile(r"\s*\[\s*\d+(?:\.\d+)?\s*m?s\s*\]\s*$", re.IGNORECASE),
    re.compile(r"\s+in\s+\d+(?:\.\d+)?\s+m?sec\b", re.IGNORECASE),
    re.compile(r"\s*\(\s*\d+(?:\.\d+)?\s*m?s\s*\)\s*$", re.IGNORECASE),
)
_OWN: dict[str, Callable[[str], dict[str, str]]] = {"parse_log_pytest": parse_pytest_summary}
"""Parsers that need no package."""
_NOT_APPLIED = 3


class SweRebenchV2:
    """Options of the run file's `[grading.swerebench_v2]` table: `seconds`, `protect`, `canaries`, `network` and
    `prompt` as in `[grading.swebench]`."""

    name = "swerebench_v2"

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

    @property
    def version(self) -> str:
        return f"1+swebench-{installed_version() or 'missing'}"

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        reader.must_be(self.name, "install_config")
        repo = reader.require(*fields("repo"))
        owner, slash, name = repo.partition("/")
        if not owner or not slash or not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
            raise reader.error("repo", f"is not owner/name: {repo!r}")
        gold = reader.text(*fields("patch"))
        payload = {
            "repo": repo,
            "fail_to_pass": _names(reader, "FAIL_TO_PASS"),
            "pass_to_pass": _names(reader, "PASS_TO_PASS"),
            "test_patch": reader.require(*fields("test_patch")),
            "test_cmd": _commands(reader),
            "log_parser": reader.require(*fields("install_config.log_parser")),
        }
        return Task(
            agent=AgentView(
                id=reader.digest(),
                image=reader.require(*fields("image_name"), *fields("image")),
                workdir=workdir(reader, f"/{name}"),
                prompt=self._options.prompt_for(statement(reader)),
                pre_commands=reader.lines(*fields("pre_commands")),
            ),
            grader=GraderView(
                source_id=reader.require(*fields("instance_id")),
                protocol=self.name,
                payload=payload,
                gold_patch=None if gold is None else whole_lines(gold),
            ),
        )

    def preflight(self) -> list[str]:
        found = problem()
        return [] if found is None else [found]

    def check(self, task: Task) -> list[str]:
        payload = task.grader.payload
        problems: list[str] = []
        if not payload["fail_to_pass"]:
            problems.append("FAIL_TO_PASS: is empty, so any patch would be resolved")
        parser = payload["log_parser"]
        if parser not in _OWN and problem() is None and parser not in parser_names():
            problems.append(
                f"install_config.log_parser: {parser!r} is none of swebench {installed_version()}; {INSTALL}"
            )
        return problems

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        folder = script_folder(nonce)
        return plan_script(
            _script(payload, task.agent.workdir, f"{folder}/test.patch"),
            nonce=nonce,
            workdir=task.agent.workdir,
            taken=[*payload["fail_to_pass"], *payload["pass_to_pass"]],
            options=self._options,
            files={f"{folder}/test.patch": whole_lines(payload["test_patch"])},
            # What tells git how to apply the test patch is not the agent's to say.
            protected=(*paths_of_tests(payload["test_patch"], ""), "**/.gitattributes"),
            env={"_JAVA_OPTIONS": "-Djava.net.preferIPv6Addresses=false"},
            user="root",
            network=self._network,
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        payload = task.grader.payload
        if (
            raw.state == "exited"
            and raw.exit_code == _NOT_APPLIED
            and f"{raw.nonce} begin" not in raw.log.decode("utf-8", "replace")
        ):
            raise GradingFailed(
                "the tests' own patch does not apply", evidence=raw.log[-2000:].decode("utf-8", "replace")
            )
        read = _OWN.get(payload["log_parser"]) or load_parser(payload["log_parser"])

        def parse(log: str) -> dict[str, str]:
            return {without_time(name): status for name, status in read(log).items()}

        return judge_script(
            _script(payload, task.agent.workdir, "test.patch"),
            raw=raw,
            grader=self.name,
            version=self.version,
            options=self._options,
            parse=parse,
            fail_to_pass=payload["fail_to_pass"],
            pass_to_pass=payload["pass_to_pass"],
        )


def without_time(name: str) -> str:
    """A test's name without the seconds that some runners put into it."""
    for pattern in _TIMES:
        name = pattern.sub("", name)
    return name.strip()


def _script(payload: Mapping[str, Any], folder: str, test_patch: str) -> str:
    """As upstream's evaluation has it: any command that fails ends it. A subshell, so that our marks come after it."""
    return "\n".join(
        [
            f"cd {shlex.quote(folder)}",
            "set +u +o pipefail",
            "git update-index -q --refresh",
            f"{_APPLY} {shlex.quote(test_patch)} || exit {_NOT_APPLIED}",
            f": '{START}'",
            *(payload["test_cmd"] if len(payload["test_cmd"]) == 1 else ["( set -e", *payload["test_cmd"], ")"]),
            f": '{END}'",
        ]
    )


def _names(row: Row, field: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(without_time(name) for name in row.ids(*fields(field))))


def _commands(row: Row) -> tuple[str, ...]:
    """`install_config.test_cmd`: one command or a list of them."""
    name, value = row.find(*fields("install_config.test_cmd"))
    if value is None:
        raise row.error(name, "is missing")
    found = (row.require(name),) if isinstance(value, str) else row.ids(name)
    lines = tuple(line for line in found if line.strip())
    if not lines:
        raise row.error(name, "is empty")
    return lines
