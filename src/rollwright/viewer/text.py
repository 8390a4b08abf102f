"""Untrusted bytes and strings as text that is safe to show: no escape codes, no hidden characters, never too much."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Excerpt", "clean", "clip", "decode", "excerpt_of", "read_capped"]

_ANSI = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"  # colours, cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)"  # titles, hyperlinks
    r"|\x1b[PX^_][^\x1b]{0,4096}\x1b\\"
    r"|\x1b[ -/]{0,4}[0-~]"
)
_LINE_ENDS = re.compile(r"\r\n?")
# Controls, direction overrides, invisible marks, and halves of characters, which no encoder takes.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_LONG_LINE = 2000
"""Characters of one line that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The beginning and the end of something long."""

    head: str
    tail: str
    """Empty when `head` is all there is."""
    total: int
    """Bytes there are."""
    skipped: int
    """Bytes between `head` and `tail`."""


def decode(data: bytes) -> str:
    """UTF-8; what is not is shown as `\\xff`."""
    return data.decode("utf-8", "backslashreplace")


def clean(text: str) -> str:
    """Without terminal codes; what would hide or reorder text is shown by name."""
    if "\x1b" in text or "\x9b" in text or "\x9d" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        text = _LINE_ENDS.sub("\n", text)
    return _HIDDEN.sub(_named, text)


def clip(text: str, *, columns: int = _LONG_LINE, lines: int | None = None) -> str:
    """Long lines, and all lines beyond `lines`, replaced by how much was left out."""
    if lines is None and len(text) <= columns:
        return text
    rows = text.split("\n")
    left_out = 0 if lines is None else len(rows) - lines
    if left_out > 0:
        rows = rows[:lines]
    rows = [row if len(row) <= columns else f"{row[:columns]} … {len(row) - columns:,} more characters" for row in rows]
    if left_out > 0:
        rows.append(f"… {left_out:,} more lines")
    return "\n".join(rows)


def read_capped(path: Path, limit: int) -> tuple[bytes, int] | None:
    """The first `limit` bytes and the size; None when there is no such regular file. Raises `OSError`."""
    opened = _open(path)
    if opened is None:
        return None
    descriptor, size = opened
    with os.fdopen(descriptor, "rb") as file:
        return file.read(limit), size


def excerpt_of(path: Path, *, head: int = 24 << 10, tail: int = 48 << 10) -> Excerpt | None:
    """The beginning and the end of a file as clean text; None when there is no such regular file. Raises `OSError`."""
    opened = _open(path)
    if opened is None:
        return None
    descriptor, size = opened
    with os.fdopen(descriptor, "rb") as file:
        if size <= head + tail:
            return Excerpt(head=_shown(file.read(head + tail)), tail="", total=size, skipped=0)
        first = file.read(head)
        file.seek(size - tail)
        last = file.read(tail)
    return Excerpt(head=_shown(first), tail=_shown(last), total=size, skipped=size - head - tail)


def _open(path: Path) -> tuple[int, int] | None:
    """A pipe in the place of a log must not hang the page, so: regular files only."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return None
    return descriptor, status.st_size


def _shown(data: bytes) -> str:
    return clip(clean(decode(data)))


def _named(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
