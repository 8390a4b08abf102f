"""JUnit reports: what pytest writes is understood, what it would not write is not believed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.graders.junit import BadReport, case_key, read_junit

SUITE = """
import pytest

def test_pass(): pass
def test_fail(): assert 0
def test_skip(): pytest.skip("no")
@pytest.mark.xfail
def test_xfail(): assert 0
@pytest.mark.xfail
def test_xpass(): pass
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
@pytest.fixture
def late():
    yield
    raise OSError
def test_teardown(late): pass
class TestC:
    @pytest.mark.parametrize("p", ["a/b.c::d", "x[y]", "\\x07\\n", "ü"])
    def test_p(self, p): pass
"""


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "sub").mkdir()
    (folder / "sub" / "test_it.py").write_text(SUITE)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "/dev/null",
        "--rootdir=.",
        "-p",
        "no:cacheprovider",
        "--junitxml=r.xml",
        "sub",
    ]
    subprocess.run(argv, cwd=folder, check=False, capture_output=True)
    return Path(folder / "r.xml").read_bytes()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("test_pass", "passed"),
        ("test_fail", "failed"),
        ("test_skip", "skipped"),
        ("test_xfail", "xfailed"),
        ("test_xpass", "passed"),
        ("test_error", "error"),
        ("test_teardown", "error"),
        ("TestC::test_p[a/b.c::d]", "passed"),
        ("TestC::test_p[x[y]]", "passed"),
        ("TestC::test_p[\\x07\\n]", "passed"),
        ("TestC::test_p[\\xfc]", "passed"),
    ],
)
def test_a_real_report_names_each_test_as_its_node_id_says(golden: bytes, name: str, status: str) -> None:
    assert read_junit(golden)[case_key(f"sub/test_it.py::{name}")].status == status


@pytest.mark.parametrize("order", [("", "<failure message='x'/>"), ("<failure message='x'/>", "")])
def test_the_worst_entry_of_a_test_counts(order: tuple[str, str]) -> None:
    body = "".join(f"<testcase classname='m' name='t'>{inner}</testcase>" for inner in order)
    assert read_junit(f"<testsuites>{body}</testsuites>".encode())[("m", "t")].status == "failed"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<testsuites>",
        b"<html/>",
        b"<!DOCTYPE x [<!ENTITY a 'b'>]><testsuites>&a;</testsuites>",
        b"<testsuites/>" + b"\0",
        b"\xff\xfe",
    ],
)
def test_anything_else_is_a_bad_report(data: bytes) -> None:
    with pytest.raises(BadReport):
        read_junit(data)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_report_or_a_bad_report(data: bytes) -> None:
    for candidate in (data, b"<testsuites>" + data + b"</testsuites>"):
        try:
            read_junit(candidate)
        except BadReport:
            continue


def test_ten_megabytes_are_read_in_a_second() -> None:
    case = b"<testcase classname='tests.test_m.TestC' name='test_%d' time='0.1'><system-out>%s</system-out></testcase>"
    body = b"".join(case % (i, b"x" * 900) for i in range(10_000))
    started = time.monotonic()
    assert len(read_junit(b"<testsuites>" + body + b"</testsuites>")) == 10_000
    assert time.monotonic() - started < 2  # 1 s on an idle machine
