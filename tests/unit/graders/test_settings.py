"""What of a file steers the test runners: that must stay the base's, the rest may change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.graders.settings import FILES, same_settings

PYPROJECT = b"""
[project]
name = "calc"
[tool.ruff]
line-length = 100
[tool.pytest.ini_options]
addopts = "-q"
"""
SETUP = b"""
[metadata]
name = calc
[tool:pytest]
addopts = -q
"""


@pytest.mark.parametrize(
    ("name", "now", "same"),
    [
        ("pyproject.toml", PYPROJECT, True),
        ("pyproject.toml", PYPROJECT.replace(b"calc", b"calc2").replace(b"100", b"120"), True),
        ("pyproject.toml", PYPROJECT.replace(b'"-q"', b"'-q'"), True),
        ("pyproject.toml", PYPROJECT.replace(b"-q", b"-q -p steer"), False),
        ("pyproject.toml", PYPROJECT + b"testpaths = []\n", False),
        ("pyproject.toml", b'[tool]\npytest = {ini_options = {addopts = "-q"}}\n', True),
        ("pyproject.toml", b'[tool]\npytest = {addopts = ["-q"]}\n', False),
        ("pyproject.toml", b'[tool."pytest".ini_options]\naddopts = "--co"\n', False),
        ("pyproject.toml", b"", False),
        ("pyproject.toml", PYPROJECT[:-3], False),
        ("pyproject.toml", b"tool = 3\n", False),
        ("setup.cfg", SETUP, True),
        ("setup.cfg", SETUP.replace(b"calc", b"calc2"), True),
        ("setup.cfg", SETUP.replace(b"-q", b"-q -p steer"), False),
        ("setup.cfg", SETUP + b"[tool:pytest]\naddopts = -p steer\n", False),
        ("setup.cfg", SETUP + b"[pytest]\naddopts = -p steer\n", False),
        ("setup.cfg", SETUP + b"[DEFAULT]\naddopts = -p steer\n", False),
        ("setup.cfg", SETUP + b"[tox:tox]\nenvlist = py\n", False),
        ("setup.cfg", b"no section\n", False),
        ("setup.cfg", b"", False),
    ],
)
def test_only_a_change_of_what_the_runners_read_counts(name: str, now: bytes, same: bool) -> None:
    assert same_settings(name, PYPROJECT if name.endswith(".toml") else SETUP, now) == same


@given(st.sampled_from(FILES), st.binary(max_size=40), st.binary(max_size=40))
def test_no_bytes_make_it_crash(name: str, base: bytes, now: bytes) -> None:
    assert isinstance(same_settings(name, base, now), bool)
    assert same_settings(name, b"", now) == same_settings(name, now, b"")


def test_what_is_too_deep_to_read_is_not_the_same() -> None:
    assert not same_settings("pyproject.toml", b"", b"x = " + b"[" * 100_000)
