"""The `scaleswe` protocol: rows of slime's coding-agent example and of Scale-SWE, judged by pytest's report.

A row names its tests by `f2p_script` (a pytest file), by `FAIL_TO_PASS`/`PASS_TO_PASS` ids, or by `eval_cmd` (a command
whose exit code decides, which is too weak to train on).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Literal

from rollwright.errors import ConfigError
from rollwright.graders import RawRun, TestPlan
from rollwright.graders.junit import Case, Key, case_key
from rollwright.graders.mutants import Mutants, mutants_of
from rollwright.graders.pytest_run import PROTECTED, SETTINGS, plan_pytest, read_pytest
from rollwright.graders.rows import Row, fields, looks_like, statement, whole_lines, workdir
from rollwright.types import AgentView, GraderView, Task, TestOutcome, Verdict, VerdictStatus

__all__ = ["ScaleSwe"]

_SCRIPT = "test_fail_to_pass.py"
_ENV = "metadata.remote_env_info"
_RUN_WITH_BASH = b'if command -v bash >/dev/null; then exec bash "$1"; fi\nexec sh "$1"\n'
_MAX_REPORTED = 5000


class ScaleSwe:
    """Options of the run file's `[grading.scaleswe]` table.

    `seconds`: the tests' time. `pytest_config`: `none` runs pytest without any configuration file; `base` with the one
    of the task's base, for repositories whose tests need theirs. `mutants`: run tests of `f2p_script` once more with
    another expectation, which they must fail. `trust_exit_code`: let rewards of `eval_cmd` rows be
    trained on. `prompt`: what the CLI is told, around `{problem_statement}`. `compat = "slime"`: decide like slime's
    example (`eval_cmd`, else `f2p_script` as a program; exit code 0 is solved), for comparing the two.
    """

    name = "scaleswe"
    version = "2"

    def __init__(
        self,
        *,
        compat: Literal["slime"] | None = None,
        seconds: float = 600,
        pytest_config: Literal["none", "base"] = "none",
        mutants: bool = True,
        trust_exit_code: bool = False,
        prompt: str = "{problem_statement}",
    ) -> None:
        if compat not in (None, "slime"):
            raise ConfigError(f"grading.scaleswe.compat: {compat!r} is not known; leave it out or say 'slime'")
        if pytest_config not in ("none", "base"):
            raise ConfigError(f"grading.scaleswe.pytest_config: {pytest_config!r} is neither 'none' nor 'base'")
        if not seconds > 0:
            raise ConfigError(f"grading.scaleswe.seconds: {seconds!r} is not a positive number")
        if "{problem_statement}" not in prompt:
            raise ConfigError("grading.scaleswe.prompt: it has no {problem_statement}")
        self._compat = compat
        self._seconds = seconds
        self._config: Literal["none", "base"] = pytest_config
        self._use_mutants = mutants
        self._trust_exit_code = trust_exit_code
        self._prompt = prompt

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        _, swepro = reader.find(*fields("swepro"))
        if swepro is not None:
            raise reader.error("metadata.swepro", "makes this a row of the swebench_pro protocol")
        payload = {
            "f2p_script": reader.text(*fields("f2p_script")),
            "f2p_patch": reader.text(*fields("f2p_patch")),
            "fail_to_pass": reader.ids(*fields("FAIL_TO_PASS"), *fields("fail_to_pass")),
            "pass_to_pass": reader.ids(*fields("PASS_TO_PASS"), *fields("pass_to_pass")),
            "eval_cmd": reader.text(*fields("eval_cmd")),
        }
        if not (payload["f2p_script"] or payload["eval_cmd"] or (payload["fail_to_pass"] and payload["f2p_patch"])):
            other = looks_like(row)
            if other is not None:
                raise reader.error(f"{_ENV}.f2p_script", f"is missing; this looks like a row of the {other} protocol")
            raise reader.error(
                f"{_ENV}.f2p_script", "is missing, and so are eval_cmd and FAIL_TO_PASS with f2p_patch: nothing to run"
            )
        gold = reader.text(*fields("patch"), *fields("gold_patch"))
        return Task(
            agent=AgentView(
                id=reader.digest(),
                image=reader.require(*fields("image"), *fields("image_url")),
                workdir=workdir(reader),
                prompt=self._prompt.replace("{problem_statement}", statement(reader)),
                pre_commands=reader.lines(*fields("pre_commands")),
            ),
            grader=GraderView(
                source_id=reader.text(*fields("instance_id"), "label") or where,
                protocol=self.name,
                payload=payload,
                gold_patch=None if gold is None else whole_lines(gold),
            ),
        )

    def preflight(self) -> list[str]:
        return []

    def check(self, task: Task) -> list[str]:
        problems: list[str] = []
        payload = task.grader.payload
        for field in ("fail_to_pass", "pass_to_pass"):
            problems += [f"{field}: {i!r} is not a pytest node id" for i in payload[field] if ".py" not in i][:3]
        script = payload["f2p_script"]
        if script and not payload["fail_to_pass"] and _tests_in(script) == frozenset():
            problems.append("f2p_script: no test function in it")
        return problems

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        if self._exit_code_decides(payload):
            return self._plan_command(payload, nonce)
        workdir = task.agent.workdir
        script = payload["f2p_script"]
        files = {f"{workdir}/{_SCRIPT}": script.encode()} if script else {}
        ids, targets = _expected_ids(payload), _targets(payload)
        mutants = self._mutants(payload, nonce)
        if mutants is not None:
            files[f"{workdir}/{mutants.path}"] = mutants.source
            targets = [*targets, mutants.path]
            ids = [*ids, *mutants.ids] if ids else []
        return plan_pytest(
            nonce=nonce,
            workdir=workdir,
            targets=targets,
            select=ids or None,
            files=files,
            test_patch=whole_lines(payload["f2p_patch"]) if payload["f2p_patch"] else b"",
            seconds=self._seconds,
            config=self._config,
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        payload = task.grader.payload
        if self._exit_code_decides(payload):
            return self._judge_command(raw)
        evidence = read_pytest(raw, _targets(payload))
        cases = dict(evidence.cases)
        mutants = self._mutants(payload, raw.nonce)
        ended = {} if mutants is None else {name: cases.pop(case_key(i), None) for i, name in mutants.ids.items()}
        survived = [name for name, case in ended.items() if case is not None and case.status == "passed"]
        required, outcomes = _judge_cases(payload, cases)
        if raw.state == "timeout":
            status = VerdictStatus.TEST_TIMEOUT
        elif evidence.tampered or survived:
            status = VerdictStatus.TAMPERED
        elif evidence.trusted and required:
            status = VerdictStatus.RESOLVED
        else:
            status = VerdictStatus.UNRESOLVED
        return Verdict(
            status=status,
            reward=1.0 if status is VerdictStatus.RESOLVED else 0.0,
            grader=self.name,
            grader_version=self.version,
            tests=outcomes[:_MAX_REPORTED],
            exit_code=raw.exit_code,
            signals=(*evidence.signals, *(f"equal_to_anything: {name}" for name in survived)),
        )

    def _mutants(self, payload: Mapping[str, Any], nonce: str) -> Mutants | None:
        script = payload["f2p_script"]
        return mutants_of(script, nonce, _targets(payload)) if self._use_mutants and script else None

    def _exit_code_decides(self, payload: Mapping[str, Any]) -> bool:
        if self._compat == "slime":
            return bool(payload["eval_cmd"] or payload["f2p_script"])
        return not payload["f2p_script"] and not payload["fail_to_pass"]

    def _plan_command(self, payload: Mapping[str, Any], nonce: str) -> TestPlan:
        folder = f"/var/rollwright-tests/{nonce}"
        if payload["eval_cmd"]:
            files = {f"{folder}/run.sh": _RUN_WITH_BASH, f"{folder}/eval.sh": payload["eval_cmd"].encode() + b"\n"}
            argv = ("sh", f"{folder}/run.sh", f"{folder}/eval.sh")
        else:
            files = {f"{folder}/f2p.py": payload["f2p_script"].encode()}
            argv = ("python3", f"{folder}/f2p.py")
        if self._compat == "slime":
            return TestPlan(argv=argv, files=files, seconds=self._seconds)
        return TestPlan(argv=argv, files=files, protected=PROTECTED, settings=SETTINGS, seconds=self._seconds)

    def _judge_command(self, raw: RawRun) -> Verdict:
        status = VerdictStatus.RESOLVED if raw.exit_code == 0 else VerdictStatus.UNRESOLVED
        if raw.state != "exited":
            status = VerdictStatus.TEST_TIMEOUT if raw.state == "timeout" else VerdictStatus.UNRESOLVED
        return Verdict(
            status=status,
            reward=1.0 if status is VerdictStatus.RESOLVED else 0.0,
            grader=self.name,
            grader_version=self.version,
            exit_code=raw.exit_code,
            signals=("exit_code_only",),
            trainable=self._trust_exit_code,
        )


def _expected_ids(payload: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*payload["fail_to_pass"], *payload["pass_to_pass"]]))


def _targets(payload: Mapping[str, Any]) -> list[str]:
    """The files that are run."""
    files = [i.partition("::")[0] for i in _expected_ids(payload)]
    return list(dict.fromkeys([*([_SCRIPT] if payload["f2p_script"] else []), *files]))


def _tests_in(script: str) -> frozenset[str] | None:
    """Ids of the tests a pytest file plainly defines; None when this Python cannot read it."""
    try:
        tree = ast.parse(script)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.add(f"{_SCRIPT}::{node.name}")
        if isinstance(node, ast.ClassDef) and _collected(node):
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test"):
                    found.add(f"{_SCRIPT}::{node.name}::{item.name}")
    return frozenset(found)


def _collected(node: ast.ClassDef) -> bool:
    if any("TestCase" in ast.unparse(base) for base in node.bases):
        return True
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return node.name.startswith("Test") and not methods & {"__init__", "__new__"}


def _judge_cases(payload: Mapping[str, Any], found: Mapping[Key, Case]) -> tuple[bool, tuple[TestOutcome, ...]]:
    """Whether every required test passed, and all outcomes. A test that is not in the report is missing."""
    ids = _expected_ids(payload)
    module = _SCRIPT.removesuffix(".py")
    cases = dict(found)
    outcomes: list[TestOutcome] = []
    if ids:
        for node_id in ids:
            outcomes.append(_outcome(node_id, cases.pop(case_key(node_id), None), expected=True))
    else:
        seen: set[str] = set()
        for key in [k for k in cases if k[0] == module or k[0].startswith(f"{module}.")]:
            node_id = "::".join([_SCRIPT, *key[0].split(".")[1:], key[1]])
            seen.add(node_id.partition("[")[0])
            outcomes.append(_outcome(node_id, cases.pop(key), expected=True))
        for node_id in sorted((_tests_in(payload["f2p_script"]) or frozenset()) - seen):
            outcomes.append(_outcome(node_id, None, expected=True))
    passed = bool(outcomes) and all(o.status == "passed" for o in outcomes)
    outcomes += [_outcome("::".join(filter(None, key)), case, expected=False) for key, case in cases.items()]
    return passed, tuple(outcomes)


def _outcome(node_id: str, case: Case | None, *, expected: bool) -> TestOutcome:
    if case is None:
        return TestOutcome(id=node_id, status="missing", expected=expected)
    return TestOutcome(id=node_id, status=case.status, expected=expected, seconds=case.seconds, message=case.message)
