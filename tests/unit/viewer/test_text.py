"""What others wrote becomes text that hides nothing and is never too much."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.viewer.text import clean, clip, decode, excerpt_of, read_capped

HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


@given(st.text(st.characters(codec=None)))
def test_nothing_hidden_is_left_and_cleaning_twice_changes_nothing(text: str) -> None:
    once = clean(text)
    assert not HIDDEN.search(once)
    assert clean(once) == once
    once.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07", "link"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x9b31mred", "red"),
        ("a\x1b", "a␛"),
        ("50%\r100%\r\ndone", "50%\n100%\ndone"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("a\x00b\x7f", "a␀b␡"),
        ("tab\tand\nline", "tab\tand\nline"),
    ],
)
def test_codes_go_and_hidden_characters_are_named(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(st.binary())
def test_all_bytes_can_be_shown(data: bytes) -> None:
    clean(decode(data)).encode()


@given(st.text(), st.integers(1, 20), st.integers(1, 5))
def test_what_is_clipped_says_how_much_is_gone(text: str, columns: int, lines: int) -> None:
    shown = clip(text, columns=columns, lines=lines).split("\n")
    rows = text.split("\n")
    assert len(shown) <= lines + 1
    if len(rows) > lines:
        assert shown.pop() == f"… {len(rows) - lines:,} more lines"
    for row, told in zip(rows, shown, strict=False):
        assert told == row if len(row) <= columns else told.startswith(row[:columns] + " … ")


def test_an_excerpt_is_the_beginning_and_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"begin\n" + b"x" * 5_000_000 + b"\nend\xff")
    found = excerpt_of(path, head=100, tail=100)
    assert found is not None
    assert (found.head[:6], found.tail[-7:], found.skipped) == ("begin\n", "end\\xff", 5_000_011 - 200)
    whole = excerpt_of(path)
    assert whole is not None
    assert len(whole.head) + len(whole.tail) < 10_000


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    assert excerpt_of(tmp_path / "none") is None
    os.mkfifo(tmp_path / "pipe")
    assert excerpt_of(tmp_path / "pipe") is None
    assert read_capped(tmp_path, 10) is None
