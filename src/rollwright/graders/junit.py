"""JUnit XML as pytest writes it, read as what it is: bytes from a place where the policy's code ran."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

from rollwright.types import TestStatus

__all__ = ["BadReport", "Case", "Key", "case_key", "read_junit"]

Key = tuple[str, str]
"""Classname and name, pytest's way to write a test's id in a report."""

_ILLEGAL = re.compile("[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MESSAGE = 500
# The worst of several entries of one test counts: a failure in the call and an error in the teardown are two entries.
_ORDER: tuple[TestStatus, ...] = ("passed", "xfailed", "skipped", "failed", "error")


class BadReport(ValueError):
    """Not a report that pytest finished. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of the report."""

    status: TestStatus
    seconds: float
    message: str


def read_junit(data: bytes) -> dict[Key, Case]:
    """All tests of a report. Raises `BadReport`."""
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise BadReport("it declares entities")
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as e:
        raise BadReport(str(e)) from e
    if root.tag not in ("testsuites", "testsuite"):
        raise BadReport(f"its root is {root.tag[:40]!r}")
    cases: dict[Key, Case] = {}
    for element in root.iter("testcase"):
        key = (element.get("classname", ""), element.get("name", ""))
        case = _case(element)
        before = cases.get(key)
        if before is None or _ORDER.index(case.status) > _ORDER.index(before.status):
            cases[key] = case
    return cases


def case_key(node_id: str) -> Key:
    """How pytest's report names the test `path/to/test_x.py::Class::test_y[param]`."""
    path, bracket, params = node_id.partition("[")
    names = path.split("::")
    names[0] = re.sub(r"\.py$", "", names[0].replace("/", "."))
    names[-1] += bracket + params
    return ".".join(names[:-1]), _ILLEGAL.sub(_escape, names[-1])


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"#x{code:02X}" if code <= 0xFF else f"#x{code:04X}"


def _case(element: ElementTree.Element) -> Case:
    status: TestStatus = "passed"
    message = ""
    for child in element:
        found: TestStatus
        if child.tag == "failure":
            found = "failed"
        elif child.tag == "error":
            found = "error"
        elif child.tag == "skipped":
            found = "xfailed" if child.get("type") == "pytest.xfail" else "skipped"
        else:
            continue
        if _ORDER.index(found) > _ORDER.index(status):
            status, message = found, child.get("message", "")[:_MESSAGE]
    try:
        seconds = float(element.get("time", "0"))
    except ValueError:
        seconds = 0.0
    return Case(status=status, seconds=seconds, message=message)
