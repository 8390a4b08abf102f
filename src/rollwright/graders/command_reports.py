"""Reports that any test runner can be made to write (JUnit XML, CTRF, TAP), read as untrusted bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from rollwright.graders.junit import BadReport, Case, read_junit
from rollwright.types import TestStatus

__all__ = ["ReportFormat", "read_report"]

ReportFormat = Literal["junit", "ctrf", "tap"]

_TAP_TEST = re.compile(r"(not )?ok\b[ \t]*(\d+)?[ \t]*(?:- )?(.*)")
_TAP_DIRECTIVE = re.compile(r"(?<!\\)#[ \t]*(skip|todo)\b", re.IGNORECASE)
_TAP_PLAN = re.compile(r"1\.\.(\d+)[ \t]*(?:#.*)?")
_CTRF: Mapping[str, TestStatus] = {"passed": "passed", "failed": "failed", "skipped": "skipped", "pending": "skipped"}
_ORDER: tuple[TestStatus, ...] = ("passed", "xfailed", "skipped", "failed", "error")


def read_report(data: bytes, format: ReportFormat) -> dict[str, Case]:
    """Test id → result; the worst of several results of one id counts. Ids: JUnit `classname::name`, CTRF `suite.name`
    (both `name` alone without the first part), TAP the description, or the number without one.

    Raises `BadReport`.
    """
    if format == "junit":
        return {"::".join(filter(None, key)): case for key, case in read_junit(data).items()}
    return _ctrf(data) if format == "ctrf" else _tap(data)


def _ctrf(data: bytes) -> dict[str, Case]:
    try:
        report: Any = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise BadReport(f"it is not JSON: {e}") from e
    results: Any = cast("dict[str, Any]", report).get("results") if isinstance(report, dict) else None
    tests: Any = cast("dict[str, Any]", results).get("tests") if isinstance(results, dict) else None
    if not isinstance(tests, list):
        raise BadReport("it has no results.tests")
    cases: dict[str, Case] = {}
    for item in cast("list[Any]", tests):
        entry = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        name, status, suite = entry.get("name"), entry.get("status"), entry.get("suite")
        if not isinstance(name, str) or not isinstance(status, str):
            raise BadReport("a test has no name or no status")
        parts = cast("list[Any]", suite) if isinstance(suite, list) else [suite]
        full = ".".join([*(part for part in parts if isinstance(part, str) and part), name])
        message = entry.get("message")
        duration: Any = entry.get("duration")
        _put(
            cases,
            full,
            Case(
                status=_CTRF.get(status, "error"),
                seconds=duration / 1000 if isinstance(duration, int | float) else 0.0,
                message=message[:500] if isinstance(message, str) else "",
            ),
        )
    return cases


def _tap(data: bytes) -> dict[str, Case]:
    """Indented lines belong to subtests, whose outcome their parent carries."""
    cases: dict[str, Case] = {}
    planned: int | None = None
    count = 0
    for line in data.decode("utf-8", "replace").splitlines():
        if line.startswith("Bail out!"):
            raise BadReport(f"the tests bailed out: {line[9:200].strip()}")
        if match := _TAP_PLAN.fullmatch(line):
            if planned is not None:
                raise BadReport("it has two plans")
            planned = int(match[1][:9])
        elif match := _TAP_TEST.fullmatch(line):
            count += 1
            rest = match[3]
            directive = _TAP_DIRECTIVE.search(rest)
            name = (rest[: directive.start()] if directive else rest).strip() or match[2] or str(count)
            status: TestStatus = "failed" if match[1] else "passed"
            if directive:
                status = "xfailed" if directive[1].lower() == "todo" and match[1] else "skipped"
            _put(cases, name, Case(status=status, seconds=0.0, message=""))
    if planned is None:
        raise BadReport("it has no plan")
    if planned != count:
        raise BadReport(f"{planned} tests were planned and {count} reported")
    return cases


def _put(cases: dict[str, Case], name: str, case: Case) -> None:
    before = cases.get(name)
    if before is None or _ORDER.index(case.status) > _ORDER.index(before.status):
        cases[name] = case
