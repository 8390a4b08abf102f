"""Git's patch format, read strictly: which paths a patch touches, and what no patch may do. Pure."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

__all__ = ["FileChange", "MalformedPatch", "Refusal", "read_patch", "refuse", "touched_paths"]

_SYMLINK = 0o120000
_REGULAR = (0o100644, 0o100755)
_MODE = re.compile(rb"[0-7]{6}")
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_HEADERS = (b"old mode ", b"new mode ", b"deleted file mode ", b"new file mode ", b"index ")
_ESCAPES = {
    ord("a"): 7,
    ord("b"): 8,
    ord("t"): 9,
    ord("n"): 10,
    ord("v"): 11,
    ord("f"): 12,
    ord("r"): 13,
    ord('"'): 34,
    ord("\\"): 92,
}


class MalformedPatch(ValueError):
    """Not a patch as our capture writes them. The message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One file of a patch."""

    path: bytes
    kind: Literal["added", "deleted", "modified"]
    mode: int
    """After the change; before it for a deleted file. A modified file whose mode is not told has 0o100644."""
    link: bytes | None = None
    """Where a symbolic link will point."""

    @property
    def name(self) -> str:
        """For people: what is not UTF-8 is shown as escapes."""
        return self.path.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a patch is not applied. The policy's doing, so it is a value."""

    reason: Literal[
        "path_outside", "git_folder", "submodule", "link_outside", "special_file", "unstorable_path", "too_large"
    ]
    path: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.path}"


def read_patch(data: bytes) -> tuple[FileChange, ...]:
    """All file changes in order. Empty for `b""`. Raises `MalformedPatch`."""
    reader = _Reader(data)
    changes: list[FileChange] = []
    while not reader.done:
        changes.append(reader.section())
    return tuple(changes)


def refuse(changes: tuple[FileChange, ...], *, workdir: str) -> Refusal | None:
    """The first thing in the patch that no patch may do, else None.

    Links may point to anything inside the repository, also by its absolute path.
    """
    for change in changes:
        reason = _refuse_path(change.path) or _refuse_mode(change)
        if reason is None and change.link is not None and _leaves(change.path, change.link, workdir.encode()):
            reason = "link_outside"
        if reason is not None:
            return Refusal(reason=reason, path=change.name)
    return None


def touched_paths(foreign: bytes) -> frozenset[bytes]:
    """Every path that a patch of another origin (a row's) may write. Lenient: too many rather than too few."""
    paths: set[bytes] = set()
    for line in foreign.split(b"\n"):
        for start in (b"--- a/", b"+++ b/", b"rename from ", b"rename to ", b"copy to "):
            if line.startswith(start):
                paths.add(line[len(start) :].rstrip(b"\t\r"))
        if line.startswith(b"diff --git "):
            with suppress(MalformedPatch):
                paths.add(_names_of_header(line[len(b"diff --git ") :].rstrip(b"\r")))
    return frozenset(paths)


def _refuse_path(path: bytes) -> Literal["path_outside", "git_folder"] | None:
    parts = path.split(b"/")
    if not path or b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        return "path_outside"
    if any(part.lower() == b".git" for part in parts):
        return "git_folder"
    return None


def _refuse_mode(change: FileChange) -> Literal["submodule", "special_file"] | None:
    if change.mode == 0o160000:
        return "submodule"
    if change.mode != _SYMLINK and change.mode not in _REGULAR:
        return "special_file"
    return None


def _leaves(path: bytes, target: bytes, workdir: bytes) -> bool:
    """Whether following the link could end outside. `..` is only judged at the front: after a name, which may itself be
    a link, it cannot be told where it leads."""
    depth = path.count(b"/")
    if target.startswith(b"/"):
        root = workdir.rstrip(b"/")
        if target != root and not target.startswith(root + b"/"):
            return True
        target, depth = target[len(root) :].lstrip(b"/"), 0
    named = False
    for part in target.split(b"/"):
        if part in (b"", b"."):
            continue
        if part != b"..":
            named = True
            continue
        depth -= 1
        if named or depth < 0:
            return True
    return False


def _unquote(text: bytes) -> tuple[bytes, bytes]:
    """A C-quoted name at the start of `text`, and what follows it."""
    out = bytearray()
    i = 1
    while i < len(text):
        byte = text[i]
        if byte == ord('"'):
            return bytes(out), text[i + 1 :]
        if byte != ord("\\"):
            out.append(byte)
            i += 1
            continue
        octal = text[i + 1 : i + 4]
        if re.fullmatch(rb"[0-3][0-7]{2}", octal):
            out.append(int(octal, 8))
            i += 4
        elif i + 1 < len(text) and text[i + 1] in _ESCAPES:
            out.append(_ESCAPES[text[i + 1]])
            i += 2
        else:
            break
    raise MalformedPatch(f"a quoted name that does not end: {text[:80]!r}")


def _names_of_header(rest: bytes) -> bytes:
    """The one path of `a/PATH b/PATH`; both sides must name the same file."""
    if rest.startswith(b'"'):
        old, rest = _unquote(rest)
        new = _unquote(rest[1:])[0] if rest.startswith(b' "') else rest[1:]
    else:
        half = (len(rest) - 1) // 2
        old, new = rest[:half], rest[half + 1 :]
    if not old.startswith(b"a/") or not new.startswith(b"b/") or old[2:] != new[2:]:
        raise MalformedPatch(f"a header that does not name one file: {rest[:80]!r}")
    return old[2:]


class _Reader:
    """Walks the lines of a patch, one file section at a time."""

    def __init__(self, data: bytes) -> None:
        self._lines = data.split(b"\n")
        if self._lines[-1]:
            raise MalformedPatch("the last line does not end")
        self._lines.pop()
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at >= len(self._lines)

    def _peek(self) -> bytes:
        return b"" if self.done else self._lines[self._at]

    def _next(self) -> bytes:
        if self.done:
            raise MalformedPatch("it ends in the middle of a file")
        self._at += 1
        return self._lines[self._at - 1]

    def section(self) -> FileChange:
        header = self._next()
        if not header.startswith(b"diff --git "):
            raise MalformedPatch(f"line {self._at}: expected a file header, found {header[:80]!r}")
        path = _names_of_header(header[len(b"diff --git ") :])
        fields = self._extended()
        kind: Literal["added", "deleted", "modified"] = "modified"
        if b"new file mode " in fields:
            kind = "added"
        elif b"deleted file mode " in fields:
            kind = "deleted"
        mode = self._mode(fields)
        added = self._body(path)
        link = None
        if mode == _SYMLINK and kind != "deleted":
            if added is None:
                raise MalformedPatch(f"a link without a readable target: {path[:80]!r}")
            link = added
        return FileChange(path=path, kind=kind, mode=mode, link=link)

    def _extended(self) -> dict[bytes, bytes]:
        fields: dict[bytes, bytes] = {}
        while True:
            line = self._peek()
            key = next((h for h in _HEADERS if line.startswith(h)), None)
            if key is None:
                return fields
            if key in fields:
                raise MalformedPatch(f"line {self._at + 1}: {key!r} twice")
            fields[key] = line[len(key) :]
            self._at += 1

    def _mode(self, fields: dict[bytes, bytes]) -> int:
        for key in (b"new file mode ", b"deleted file mode ", b"new mode "):
            if key in fields:
                if not _MODE.fullmatch(fields[key]):
                    raise MalformedPatch(f"not a mode: {fields[key][:20]!r}")
                return int(fields[key], 8)
        _, _, tail = fields.get(b"index ", b"").partition(b" ")
        if tail and not _MODE.fullmatch(tail):
            raise MalformedPatch(f"not a mode: {tail[:20]!r}")
        return int(tail, 8) if tail else _REGULAR[0]

    def _body(self, path: bytes) -> bytes | None:
        """Skip the content; the added text, for links (None when it is binary or absent)."""
        line = self._peek()
        if line == b"GIT binary patch":
            self._at += 1
            while not self.done and not self._peek().startswith(b"diff --git "):
                self._at += 1
            return None
        if not line.startswith(b"--- "):
            return None
        self._check_name(self._next()[4:], b"a/", path)
        plus = self._next()
        if not plus.startswith(b"+++ "):
            raise MalformedPatch(f"line {self._at}: expected +++")
        self._check_name(plus[4:], b"b/", path)
        return self._hunks()

    def _check_name(self, name: bytes, prefix: bytes, path: bytes) -> None:
        if name.startswith(b'"'):
            name = _unquote(name)[0]
        elif name.endswith(b"\t"):
            name = name[:-1]  # git ends names that hold spaces with a tab
        if name not in (b"/dev/null", prefix + path):
            raise MalformedPatch(f"line {self._at}: another name than the header's: {name[:80]!r}")

    def _hunks(self) -> bytes:
        added: list[bytes] = []
        ended = False
        while match := _HUNK.match(self._peek()):
            self._at += 1
            old, new = (1 if n is None else int(n) for n in match.groups())
            last = b""
            while old > 0 or new > 0:
                line = self._next()
                last = line[:1]
                if last in (b" ", b"-"):
                    old -= 1
                if last in (b" ", b"+"):
                    new -= 1
                if last == b"+":
                    added.append(line[1:])
                elif last == b"\\":
                    continue
                elif last not in (b" ", b"-"):
                    raise MalformedPatch(f"line {self._at}: not a line of a hunk: {line[:80]!r}")
            if self._peek().startswith(b"\\"):
                self._at += 1
                ended = last != b"-"
        return b"\n".join(added) + (b"" if ended else b"\n")
