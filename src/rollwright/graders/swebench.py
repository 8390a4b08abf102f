"""The `swebench` protocol: rows of SWE-bench (classic, Lite, Verified, 5.x), judged by the `swebench` package."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from rollwright.errors import ConfigError
from rollwright.graders import RawRun, TestPlan
from rollwright.graders.diff import touched_paths
from rollwright.graders.rows import Row, fields, statement, whole_lines, workdir
from rollwright.graders.swebench_log import (
    Claim,
    canaries_for,
    has_markers,
    judge_log,
    outcomes_of,
    read_log,
)
from rollwright.graders.swebench_package import OfficialTask, installed_version, load_package, problem
from rollwright.graders.swebench_script import ScriptOptions, plan_script
from rollwright.types import AgentView, GraderView, Task, Verdict

__all__ = ["SweBench", "paths_of_tests"]

_IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
_CHECKOUT = re.compile(r"^git checkout [0-9a-f]{7,40} (.+)$", re.MULTILINE)


class SweBench:
    """Options of the run file's `[grading.swebench]` table.

    `seconds`: the script's time. `verdict`: `strict` refuses what its own evidence contradicts; `official` is the
    package's word alone, for comparing, and not trained on. `protect`: `official` puts back the files of the test patch
    only; `tests` all tests, conftest.py files, pytest's settings and what Python loads unasked; left out, it is
    `tests` with the strict verdict and `official` with the official one. `canaries`: two tests of ours in the run,
    where it is pytest. `network`: open, as official scripts expect who install packages. `image`: of rows that name
    none, `{id}` is the instance. `prompt`: what the CLI is told, around `{problem_statement}`.
    """

    name = "swebench"

    def __init__(
        self,
        *,
        seconds: float = 1800,
        verdict: Literal["strict", "official"] = "strict",
        protect: Literal["official", "tests"] | None = None,
        canaries: bool = True,
        network: bool = False,
        image: str = _IMAGE,
        prompt: str = "{problem_statement}",
    ) -> None:
        if verdict not in ("strict", "official"):
            raise ConfigError(f"grading.swebench.verdict: {verdict!r} is neither 'strict' nor 'official'")
        if "{id}" not in image:
            raise ConfigError("grading.swebench.image: it has no {id}")
        self._official = verdict == "official"
        self._options = ScriptOptions(
            protocol=self.name,
            seconds=seconds,
            protect=protect or ("official" if verdict == "official" else "tests"),
            canaries=canaries and not self._official,
            prompt=prompt,
        )
        self._network = network
        self._image = image

    @property
    def version(self) -> str:
        return f"1+swebench-{installed_version() or 'missing'}"

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        reader.must_be(self.name, "test_patch")
        instance_id = reader.require(*fields("instance_id"))
        payload = {
            "instance_id": instance_id,
            "repo": reader.require(*fields("repo")),
            "version": reader.text(*fields("version")) or "",
            "base_commit": reader.text(*fields("base_commit")) or "",
            "test_patch": reader.text(*fields("test_patch")) or "",
            "fail_to_pass": reader.ids(*fields("FAIL_TO_PASS")),
            "pass_to_pass": reader.ids(*fields("PASS_TO_PASS")),
            "eval_script": reader.text(*fields("eval_script")) or "",
            "log_parser": reader.text(*fields("log_parser")) or "",
            "eval_type": reader.text(*fields("eval_type")) or "",
            "assets": _assets(reader),
        }
        if not payload["eval_script"]:
            for field in ("version", "base_commit", "test_patch"):
                if not payload[field]:
                    raise reader.error(field, "is missing, and so is eval_script: there is nothing to run")
        image = reader.text(*fields("image"), *fields("image_url"), *fields("docker_image"))
        gold = reader.text(*fields("patch"), *fields("gold_patch"))
        return Task(
            agent=AgentView(
                id=reader.digest(),
                image=image or self._image.replace("{id}", instance_id.lower().replace("__", "_1776_")),
                workdir=workdir(reader, "/testbed"),
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
        found = problem()
        return [] if found is None else [found]

    def check(self, task: Task) -> list[str]:
        payload = task.grader.payload
        problems: list[str] = []
        if not payload["fail_to_pass"]:
            problems.append("FAIL_TO_PASS: is empty, so any patch would be resolved")
        if payload["assets"]:
            problems.append(f"image_assets: the tests need files from the network ({payload['assets'][0]})")
        script = payload["eval_script"]
        if script and not has_markers(script):
            problems.append("eval_script: does not frame the tests with its start and end markers")
        if problem() is None:
            problems += load_package().check(_official(payload), has_script=bool(script))
        return problems

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        script = _script(payload)
        return plan_script(
            script,
            nonce=nonce,
            workdir=task.agent.workdir,
            taken=[*payload["fail_to_pass"], *payload["pass_to_pass"]],
            options=self._options,
            protected=paths_of_tests(payload["test_patch"], script),
            user="root",
            needs_history=True,
            env={} if self._network else {"PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            network=self._network,
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        payload = task.grader.payload
        evidence = read_log(raw)
        package, official = load_package(), _official(payload)
        fail_only = package.fail_only(official)
        report = package.report(official, evidence.text)
        statuses = package.parse(official, evidence.framed)
        strict, outcomes = outcomes_of(official.fail_to_pass, official.pass_to_pass, statuses, fail_only=fail_only)
        # Without a result "nothing failed" proves nothing; whether the runner ran is what the package looks for.
        strict = strict and (bool(statuses) or report.found)
        signals: list[str] = []
        outside = False
        if report.resolved and not strict:
            missing = [o for o in outcomes if o.status == "missing"]
            outside = bool(missing) or not statuses
            signals.append("results_outside_markers" if outside else "skipped_is_not_resolved")
        elif strict and not report.resolved:
            signals.append("official_verdict_is_not_resolved")
        canaries = (
            canaries_for(_script(payload), raw.nonce, [*official.fail_to_pass, *official.pass_to_pass])
            if self._options.canaries
            else None
        )
        return judge_log(
            grader=self.name,
            version=self.version,
            raw=raw,
            evidence=evidence,
            claim=Claim(
                statuses=statuses,
                official=report.resolved,
                strict=strict,
                outcomes=outcomes,
                outside=outside,
                signals=tuple(signals),
            ),
            canaries=None if canaries is None else (canaries.passing, canaries.failing),
            trust_official=self._official,
        )


def paths_of_tests(test_patch: str, script: str) -> tuple[str, ...]:
    """The files that are the tests' own: those of the test patch and those the script checks out."""
    paths = {
        path.decode("utf-8", "replace") for path in touched_paths(test_patch.encode()) | touched_paths(script.encode())
    }
    for line in _CHECKOUT.findall(script):
        try:
            paths.update(shlex.split(line))
        except ValueError:
            continue
    return tuple(sorted(path for path in paths if path != "--"))


def _script(payload: Mapping[str, Any]) -> str:
    return payload["eval_script"] or load_package().eval_script(payload)


def _official(payload: Mapping[str, Any]) -> OfficialTask:
    names = ("instance_id", "repo", "version", "fail_to_pass", "pass_to_pass", "log_parser", "eval_type")
    return OfficialTask(**{name: payload[name] for name in names})


def _assets(row: Row) -> tuple[str, ...]:
    """Paths of the binary files that the tests need and no patch can carry."""
    name, value = row.find(*fields("image_assets"))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise row.error(name, f"is not JSON: {e}") from e
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise row.error(name, "is not an object")
    found: list[str] = []
    for key in ("test_patch", "patch"):
        entries: Any = value.get(key) or []  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if not isinstance(entries, list):
            raise row.error(name, f"holds no list as {key}")
        for entry in entries:  # pyright: ignore[reportUnknownVariableType]
            path = Row({"entry": entry}, row.where).text("entry.path")
            found += [path] if path else []
    return tuple(found)
