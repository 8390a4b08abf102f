"""Patches as rows: true for git's own, and never an exception for anything else."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from rollwright.viewer.diff import read_diff


def test_a_patch_of_git_is_read_with_names_notes_counts_and_line_numbers(tmp_path: Path) -> None:
    def git(*args: str) -> bytes:
        argv = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, check=True).stdout

    git("init", "-q")
    (tmp_path / "a.py").write_text("".join(f"line {n}\n" for n in range(1, 21)))
    (tmp_path / "gone.txt").write_text("old\n")
    git("add", "-A")
    git("commit", "-qm", "base")
    (tmp_path / "a.py").write_text("".join(f"line {n}\n" for n in range(1, 21) if n != 10) + "no end")
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "new file.txt").write_text("one\ntwo\n")
    git("add", "-A")
    files, left_out = read_diff(git("diff", "--cached"))
    assert left_out == 0
    assert [(file.name, file.note, file.added, file.removed) for file in files] == [
        ("a.py", "", 1, 1),
        ("gone.txt", "deleted", 0, 1),
        ("new file.txt", "new", 2, 0),
    ]
    rows = {(row.kind, row.old, row.new, row.text) for row in files[0].rows}
    assert ("del", 10, None, "line 10") in rows
    assert ("same", 11, 10, "line 11") in rows
    assert ("add", None, 20, "no end") in rows
    assert any(row.kind == "meta" and "No newline" in row.text for row in files[0].rows)


PIECES = st.sampled_from(
    [
        b"diff --git a/x b/x\n",
        b"@@ -1,2 +3,4 @@\n",
        b"+a\n",
        b"-b\n",
        b" c\n",
        b"\\ No newline\n",
        b"new file mode 100644\n",
    ]
)


@given(st.lists(PIECES | st.binary(max_size=40), max_size=30).map(b"".join))
@example(b"@@ -1 +1 @@")
@example(b"diff --git \n+")
def test_any_bytes_are_rows_of_text(data: bytes) -> None:
    files, _ = read_diff(data)
    assert sum(len(file.rows) for file in files) <= data.count(b"\n") + 1
    for file in files:
        file.name.encode()
        for row in file.rows:
            row.text.encode()
            assert "\n" not in row.text


def test_long_lines_and_many_rows_are_cut() -> None:
    patch = b"diff --git a/x b/x\n@@ -0,0 +1,9 @@\n+" + b"x" * 5_000_000 + b"\n" + b"+y\n" * 100
    files, left_out = read_diff(patch, most_rows=50)
    assert (len(files[0].rows), left_out) == (50, 52)
    assert max(len(row.text) for row in files[0].rows) < 1100
    assert files[0].added == 101
