"""A patch as rows to show. Reads on over anything: what is no patch is shown as the text it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rollwright.viewer.text import clean, clip, decode

__all__ = ["DiffFile", "DiffRow", "read_diff"]

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,\d{1,9})? \+(\d{1,9})(?:,\d{1,9})? @@")
_LINE = 1000


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One line: its kind, its numbers before and after, its text without the sign."""

    kind: Literal["add", "del", "same", "hunk", "meta"]
    old: int | None
    new: int | None
    text: str


@dataclass(slots=True)
class DiffFile:
    """The changes of one file."""

    name: str
    note: str = ""
    """new, deleted, mode, binary."""
    added: int = 0
    removed: int = 0
    rows: list[DiffRow] = field(default_factory=list[DiffRow])


def read_diff(data: bytes, *, most_rows: int = 3000) -> tuple[list[DiffFile], int]:
    """The files of a patch, and how many rows were left out."""
    files: list[DiffFile] = []
    shown = left_out = 0
    for row in _rows(data, files):
        if shown >= most_rows:
            left_out += 1
            continue
        shown += 1
        files[-1].rows.append(row)
    return files, left_out


def _rows(data: bytes, files: list[DiffFile]) -> Iterator[DiffRow]:
    old = new = 0
    inside = False
    for raw in data.split(b"\n")[: -1 if data.endswith(b"\n") else None]:
        # No more of a line than is shown: one may have millions of characters.
        line = clip(decode(raw[: _LINE * 4]), columns=_LINE)
        if len(raw) > _LINE * 4:
            line = f"{line[:_LINE]} … {len(raw) - _LINE:,} more bytes"
        line = clean(line).replace("\n", "␊")
        if raw.startswith(b"diff --git "):
            files.append(DiffFile(name=_name(line)))
            inside = False
            continue
        if not files:
            files.append(DiffFile(name="(not a git patch)"))
        file = files[-1]
        if match := _HUNK.match(line):
            old, new, inside = int(match[1]), int(match[2]), True
            yield DiffRow("hunk", None, None, line)
        elif not inside:
            if note := _note(line):
                file.note = note
            if not line.startswith(("index ", "--- ", "+++ ")) or file.name.startswith("("):
                yield DiffRow("meta", None, None, line)
        elif line.startswith("+"):
            file.added += 1
            yield DiffRow("add", None, new, line[1:])
            new += 1
        elif line.startswith("-"):
            file.removed += 1
            yield DiffRow("del", old, None, line[1:])
            old += 1
        elif line.startswith("\\"):
            yield DiffRow("meta", None, None, line)
        else:
            yield DiffRow("same", old, new, line[1:])
            old, new = old + 1, new + 1


def _name(line: str) -> str:
    paths = line.removeprefix("diff --git ")
    after = paths[len(paths) // 2 :].strip()
    return (
        after.strip('"').removeprefix("b/")
        if paths[: len(paths) // 2].strip('" ')[2:] == after.strip('" ')[2:]
        else paths
    )


def _note(line: str) -> str:
    if line.startswith("new file mode 12") or line.startswith("new mode 12"):
        return "new link"
    for sign, note in (
        ("new file", "new"),
        ("deleted file", "deleted"),
        ("new mode", "mode"),
        ("GIT binary", "binary"),
    ):
        if line.startswith(sign):
            return note
    return ""
