"""Reading patches: every name git can write comes back, and nothing makes the reader crash or look away."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.graders.diff import FileChange, MalformedPatch, read_patch, refuse, touched_paths

WORKDIR = "/work/repo"

EDIT = b"""diff --git a/src/app.py b/src/app.py
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/src/app.py
+++ b/src/app.py
@@ -1,2 +1,3 @@
 one
--- a/not/a/header
+++ b/../../etc/passwd
+diff --git a/../x b/../x
"""
LINK = b"""diff --git a/l b/l
new file mode 120000
index 0000000000000000000000000000000000000000..2222222222222222222222222222222222222222
--- /dev/null
+++ b/l
@@ -0,0 +1 @@
+%s
\\ No newline at end of file
"""
NEW = b"""diff --git a/%s b/%s
new file mode %s
index 0000000000000000000000000000000000000000..e69de29bb2d1d6434b8b29ae775ad8c2e48c5391
"""


def test_lines_of_a_hunk_are_never_taken_for_headers() -> None:
    assert read_patch(EDIT) == (FileChange(path=b"src/app.py", kind="modified", mode=0o100644),)


def test_an_empty_patch_has_no_changes() -> None:
    assert read_patch(b"") == ()
    assert refuse((), workdir=WORKDIR) is None


@pytest.mark.parametrize(
    ("header", "path"),
    [
        (b"a/x y b/x y", b"x y"),
        (b"a/a/x b b/a/x b", b"a/x b"),
        (b'"a/\\303\\274" "b/\\303\\274"', "ü".encode()),
        (b'"a/q\\"\\t\\\\\\n" "b/q\\"\\t\\\\\\n"', b'q"\t\\\n'),
    ],
)
def test_names_are_unquoted(header: bytes, path: bytes) -> None:
    patch = b"diff --git " + header + b"\nold mode 100644\nnew mode 100755\n"
    assert read_patch(patch) == (FileChange(path=path, kind="modified", mode=0o100755),)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (b"../x", "path_outside"),
        (b"a/../x", "path_outside"),
        (b"/etc/passwd", "path_outside"),
        (b"a//x", "path_outside"),
        (b".git/hooks/post-checkout", "git_folder"),
        (b"sub/.GiT/config", "git_folder"),
        (b".git", "git_folder"),
    ],
)
def test_paths_that_leave_the_folder_or_enter_git_are_refused(path: bytes, reason: str) -> None:
    refusal = refuse(read_patch(NEW % (path, path, b"100644")), workdir=WORKDIR)
    assert refusal is not None
    assert refusal.reason == reason


@pytest.mark.parametrize(
    ("mode", "reason"), [(b"160000", "submodule"), (b"100600", "special_file"), (b"040000", "special_file")]
)
def test_only_files_and_links_are_let_through(mode: bytes, reason: str) -> None:
    refusal = refuse(read_patch(NEW % (b"x", b"x", mode)), workdir=WORKDIR)
    assert refusal is not None
    assert refusal.reason == reason


@pytest.mark.parametrize(
    ("path", "target", "leaves"),
    [
        (b"l", b"src/app.py", False),
        (b"l", b"./src//app.py", False),
        (b"a/b/l", b"../../README", False),
        (b"a/b/l", b"../../../README", True),
        (b"l", b"..", True),
        (b"l", b"/etc/passwd", True),
        (b"l", b"/work/repo", False),
        (b"l", b"/work/repo/src", False),
        (b"l", b"/work/repo2/src", True),
        (b"l", b"/work/repo/../other", True),
        (b"l", b"a/../b", True),
        (b"a/l", b"d/../../..", True),
    ],
)
def test_links_may_point_anywhere_inside_and_nowhere_else(path: bytes, target: bytes, leaves: bool) -> None:
    change = FileChange(path=path, kind="added", mode=0o120000, link=target)
    refusal = refuse((change,), workdir=WORKDIR)
    assert (refusal is not None) == leaves


def test_the_target_of_a_link_is_read_from_its_hunk() -> None:
    assert read_patch(LINK % b"../x")[0].link == b"../x"


@pytest.mark.parametrize(
    "patch",
    [
        b"junk\n",
        b"diff --git a/x b/y\n",
        b"diff --git a/x b/x",
        b'diff --git "a/x\n',
        b"diff --git a/x b/x\nrename from y\n",
        b"diff --git a/x b/x\nnew file mode 1006\n",
        b"diff --git a/x b/x\nnew file mode 100644\nnew file mode 100644\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/../y\n@@ -1 +1 @@\n-a\n+b\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,5 +1 @@\n-a\n+b\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n*a\n",
        b"diff --git a/l b/l\nnew file mode 120000\nGIT binary patch\nliteral 0\n\n",
    ],
)
def test_what_our_capture_would_never_write_is_malformed(patch: bytes) -> None:
    with pytest.raises(MalformedPatch):
        read_patch(patch)


def survives(data: bytes) -> None:
    try:
        changes = read_patch(data)
    except MalformedPatch:
        return
    refuse(changes, workdir=WORKDIR)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_never_crash_the_reader(data: bytes) -> None:
    survives(data)
    survives(b"diff --git " + data + b"\n")
    touched_paths(data)


@given(st.data())
def test_damaged_patches_never_crash_the_reader(data: st.DataObject) -> None:
    patch = bytearray(EDIT + LINK % b"x" + NEW % (b"y", b"y", b"100755"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(patch) - 1))
        cut = data.draw(st.integers(0, 30))
        patch[at : at + cut] = data.draw(
            st.sampled_from([b"", b"\n", b'"', b"\\", b" ", b"\xff", b"a/", b"@@ -1 +1 @@\n"])
        )
        if not patch:
            break
    survives(bytes(patch))


component = st.binary(min_size=1, max_size=8).filter(
    lambda b: b"/" not in b and b"\0" not in b and b not in (b".", b"..") and b.lower() != b".git"
)


def test_git_itself_agrees_about_names(tmp_path: Path) -> None:
    """Real files with difficult names, one real patch: the same names come back."""

    def git(*args: str) -> bytes:
        env = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": "/usr/bin:/bin", "HOME": "/"}
        return subprocess.run(["git", *args], cwd=tmp_path, env=env, check=True, capture_output=True).stdout

    git("init", "-q", ".")
    names = [
        b"plain",
        b"sp ace",
        b"a b b/a b",
        b'q"uote',
        b"ba\\ck",
        b"n\newline",
        b"t\tab",
        b"\xff\xfe",
        "ü/ñ".encode(),
        b"-rf",
    ]
    for name in names:
        path = tmp_path / name.decode("utf-8", "surrogateescape")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x\n")
    git("add", "-A")
    tree = git("write-tree").decode().strip()
    empty = git("hash-object", "-t", "tree", "/dev/null").decode().strip()
    patch = git("diff-tree", "-p", "--binary", "--full-index", empty, tree)
    assert {change.path for change in read_patch(patch)} == set(names)


@given(st.lists(component, min_size=1, max_size=3).map(b"/".join))
def test_every_name_that_git_quotes_comes_back(path: bytes) -> None:
    escapes = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}
    quoted = "".join(
        "\\" + escapes[b] if b in escapes else chr(b) if 32 <= b < 127 else f"\\{b:03o}" for b in path
    ).encode()
    patch = b'diff --git "a/' + quoted + b'" "b/' + quoted + b'"\nold mode 100755\nnew mode 100644\n'
    assert read_patch(patch)[0].path == path


def test_a_foreign_patch_touches_every_name_it_mentions() -> None:
    patch = b"diff --git a/old b/new\nsimilarity index 90%\nrename from old\nrename to new\n--- a/x y\t\n+++ b/x y\t\n"
    assert touched_paths(patch) == {b"old", b"new", b"x y"}
