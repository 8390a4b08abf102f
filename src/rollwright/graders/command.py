"""The `command` protocol: any command. Its exit code decides, which is too weak to train on, unless the row names a
report (JUnit XML, CTRF or TAP), which then decides together with the exit code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from rollwright.errors import ConfigError
from rollwright.graders import RawRun, TestPlan
from rollwright.graders.command_reports import ReportFormat, read_report
from rollwright.graders.junit import BadReport, Case, case_key
from rollwright.graders.pytest_run import PROTECTED, SETTINGS
from rollwright.graders.rows import Row, fields, statement, whole_lines, workdir
from rollwright.types import AgentView, GraderView, Task, TestOutcome, Verdict, VerdictStatus

__all__ = ["Command"]

REPORT_VARIABLE = "ROLLWRIGHT_REPORT"
_MAX_REPORTED = 5000
_LOG_BYTES = 32 << 20
_RUN_WITH_BASH = b'if command -v bash >/dev/null; then exec bash "$1"; fi\nexec sh "$1"\n'


class Command:
    """Options of the run file's `[grading.command]` table.

    `seconds`: the tests' time. `trust_exit_code`: let rewards of rows without a report be trained on. `prompt`: what
    the CLI is told, around `{problem_statement}`.
    """

    name = "command"
    version = "1"

    def __init__(
        self, *, seconds: float = 600, trust_exit_code: bool = False, prompt: str = "{problem_statement}"
    ) -> None:
        if not seconds > 0:
            raise ConfigError(f"grading.command.seconds: {seconds!r} is not a positive number")
        if "{problem_statement}" not in prompt:
            raise ConfigError("grading.command.prompt: it has no {problem_statement}")
        self._seconds = seconds
        self._trust_exit_code = trust_exit_code
        self._prompt = prompt

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        if reader.find(*fields("command"))[1] is None:
            reader.must_be(self.name, "metadata.command")
        gold = reader.text(*fields("patch"), *fields("gold_patch"))
        test_patch = reader.text(*fields("test_patch"))
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
                payload={
                    "command": _command(reader),
                    "report": _report(reader),
                    "files": _files(reader),
                    "test_patch": None if test_patch is None else whole_lines(test_patch),
                    "protected": reader.ids(*fields("protected")),
                    "fail_to_pass": reader.ids(*fields("FAIL_TO_PASS"), *fields("fail_to_pass")),
                    "pass_to_pass": reader.ids(*fields("PASS_TO_PASS"), *fields("pass_to_pass")),
                },
                gold_patch=None if gold is None else whole_lines(gold),
            ),
        )

    def preflight(self) -> list[str]:
        return []

    def check(self, task: Task) -> list[str]:
        payload = task.grader.payload
        if payload["report"] is None and (payload["fail_to_pass"] or payload["pass_to_pass"]):
            return ["it names tests (FAIL_TO_PASS, PASS_TO_PASS) but no report to find them in"]
        return []

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        folder = f"/var/rollwright-tests/{nonce}"
        ours = f"{folder}/report"
        report: tuple[ReportFormat, str] | None = payload["report"]
        path = "" if report is None or report[1] == "-" else report[1] or ours
        command: tuple[str, ...] | str = payload["command"]
        files = {f"{task.agent.workdir}/{name}": data for name, data in payload["files"].items()}
        if isinstance(command, str):
            files |= {f"{folder}/run.sh": _RUN_WITH_BASH, f"{folder}/command.sh": command.encode() + b"\n"}
            command = ("sh", f"{folder}/run.sh", f"{folder}/command.sh")
        return TestPlan(
            argv=tuple(word.replace("{report}", ours) for word in command),
            files=files,
            env={REPORT_VARIABLE: path} if path else {},
            reports=(path,) if path == ours else (),
            outputs=(path,) if path not in ("", ours) else (),
            test_patch=payload["test_patch"] or b"",
            protected=(*PROTECTED, *payload["protected"]),
            settings=SETTINGS,
            hide_history=True,
            seconds=self._seconds,
            log_bytes=_LOG_BYTES,
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        payload = task.grader.payload
        report: tuple[ReportFormat, str] | None = payload["report"]
        signals: list[str] = []
        outcomes: list[TestOutcome] = []
        solved = raw.state == "exited" and raw.exit_code == 0
        if raw.state != "exited":
            signals.append(f"run_ended_as_{raw.state}")
        if report is None:
            signals.append("exit_code_only")
        else:
            required = [*payload["fail_to_pass"], *payload["pass_to_pass"]]
            outcomes = _outcomes(report, raw, required, signals)
            mine = [o for o in outcomes if o.expected]
            passed = bool(mine) and all(o.status == "passed" for o in mine)
            broken = any(o.status in ("failed", "error") for o in outcomes)
            # A run may end badly over tests that nobody asked for, and only over them.
            agrees = raw.exit_code == 0 or (bool(required) and broken)
            if raw.state == "exited" and (not agrees or (raw.exit_code == 0 and broken)):
                signals.append("exit_code_disagrees_with_report")
            solved = raw.state == "exited" and passed and not signals
        status = VerdictStatus.RESOLVED if solved else VerdictStatus.UNRESOLVED
        if raw.state == "timeout":
            status = VerdictStatus.TEST_TIMEOUT
        return Verdict(
            status=status,
            reward=1.0 if status is VerdictStatus.RESOLVED else 0.0,
            grader=self.name,
            grader_version=self.version,
            tests=tuple(outcomes[:_MAX_REPORTED]),
            exit_code=raw.exit_code,
            signals=tuple(signals),
            trainable=report is not None or self._trust_exit_code,
        )


def _command(reader: Row) -> tuple[str, ...] | str:
    """An argv list, or the lines of a shell script."""
    name, value = reader.find(*fields("command"))
    if isinstance(value, list):
        words = reader.ids(name)
        if any("\0" in word for word in words):
            raise reader.error(name, "holds a NUL character")
        return words
    return reader.require(*fields("command"))


def _report(reader: Row) -> tuple[ReportFormat, str] | None:
    """Format and path: empty for a secret path of ours (in `$ROLLWRIGHT_REPORT` and `{report}`), `-` for stdout."""
    name, value = reader.find(*fields("report"))
    if value is None:
        return None
    if isinstance(value, str):
        value = {"format": value}
    if not isinstance(value, Mapping):
        raise reader.error(name, "is neither a format nor a table of format and path")
    table = cast("Mapping[str, Any]", value)
    format, path = table.get("format"), table.get("path", "")
    if format not in get_args(ReportFormat):
        raise reader.error(f"{name}.format", f"is {format!r}; it may be {', '.join(get_args(ReportFormat))}")
    if not isinstance(path, str) or (path not in ("", "-") and not path.startswith("/")) or ".." in path.split("/"):
        raise reader.error(f"{name}.path", f"is neither an absolute path nor '-': {path!r}")
    if path == "-" and format != "tap":
        raise reader.error(f"{name}.path", "is '-': only tap can be read from the tests' output")
    return cast("ReportFormat", format), path


def _files(reader: Row) -> dict[str, bytes]:
    """Hidden files: path in the workdir → text."""
    name, value = reader.find(*fields("files"))
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise reader.error(name, "is not a table of path and text")
    found: dict[str, bytes] = {}
    for path, text in cast("Mapping[Any, Any]", value).items():
        if not isinstance(path, str) or not path or path.startswith("/") or {"..", ".git"} & set(path.split("/")):
            raise reader.error(name, f"names no place in the workdir: {path!r}")
        if not isinstance(text, str):
            raise reader.error(f"{name}.{path}", "is not a string")
        found[path] = text.encode("utf-8", "surrogatepass")
    return found


def _outcomes(
    report: tuple[ReportFormat, str], raw: RawRun, required: list[str], signals: list[str]
) -> list[TestOutcome]:
    data = raw.log if report[1] == "-" else next(iter(raw.reports.values()), None)
    if data is None:
        signals.append("no_report")
        return [TestOutcome(id=name, status="missing") for name in required]
    try:
        cases = read_report(data, report[0])
    except BadReport as e:
        signals.append(f"unreadable_report: {e}")
        return [TestOutcome(id=name, status="missing") for name in required]
    outcomes: list[TestOutcome] = []
    for name in dict.fromkeys(required):
        case = cases.pop(name, None) or cases.pop("::".join(filter(None, case_key(name))), None)
        outcomes.append(_outcome(name, case, expected=True))
    return outcomes + [_outcome(name, case, expected=not required) for name, case in cases.items()]


def _outcome(name: str, case: Case | None, *, expected: bool) -> TestOutcome:
    if case is None:
        return TestOutcome(id=name, status="missing", expected=expected)
    return TestOutcome(id=name, status=case.status, expected=expected, seconds=case.seconds, message=case.message)
