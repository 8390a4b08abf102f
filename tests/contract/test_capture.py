"""Whatever an agent does to its working folder arrives byte for byte in the grading sandbox, or is refused by name.

Each case is a shell script that the agent user runs in a copy of one small repository. The two folders are compared by
a walk of our own, not by git.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from rollwright.errors import GradingFailed, LimitError
from rollwright.graders.patch import CaptureLimits, Patch, apply, capture, take_baseline
from rollwright.sandboxes import Sandbox, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider

pytestmark = pytest.mark.anyio

ROOT = "/work"

TEMPLATE = r"""
set -e
mkdir -p "$1" && cd "$1"
git init -q . && git symbolic-ref HEAD refs/heads/main
git config user.name t && git config user.email t@localhost
printf 'readme\n' >README.md
mkdir -p src bin deep/er build
i=0; while [ $i -lt 100 ]; do echo "line $i"; i=$((i+1)); done >src/long.txt
printf 'def f():\n    return 1\n' >src/app.py
printf 'x = 1\n' >src/other.py
head -c 2000 /dev/zero | tr '\0' 'a' >bin/data.bin && printf '\0\1\2\377' >>bin/data.bin
printf 'caf\351\n' >latin1.txt
printf 'one\r\ntwo\r\n' >crlf.txt
printf 'no end' >noeol.txt
printf '#!/bin/sh\n' >run.sh && chmod +x run.sh
ln -s README.md link
printf 'deep\n' >deep/er/a.txt
printf 'space\n' >'name with space.txt'
printf '*.log\nbuild/\n' >.gitignore
printf 'kept\n' >tracked.log
printf 'old\n' >build/old.o
git add -A && git add -f tracked.log && git commit -q -m one
echo more >>README.md && git commit -q -a -m two
"""

MANIFEST = r"""
import hashlib, os, sys
skip = {".git", "__pycache__", ".pytest_cache", "node_modules", "build"}
for base, dirs, names in os.walk(os.fsencode(sys.argv[1])):
    dirs[:] = sorted(d for d in dirs if os.fsdecode(d) not in skip)
    for name in sorted(names + [d for d in dirs if os.path.islink(os.path.join(base, d))]):
        path = os.path.join(base, name)
        if os.fsdecode(name) in skip or name.endswith(b".pyc"):
            continue
        info = os.lstat(path)
        if os.path.islink(path):
            what = b"link " + os.readlink(path)
        elif os.path.isfile(path):
            mode = b"x" if info.st_mode & 0o100 else b"-"
            what = mode + hashlib.sha256(open(path, "rb").read()).hexdigest().encode()
        else:
            continue
        sys.stdout.buffer.write(os.path.relpath(path, os.fsencode(sys.argv[1])) + b"\0" + what + b"\0")
"""

TOO_DEEP = "python3 -c \"import os\nfor n in range(100):\n    os.mkdir('d' * 60)\n    os.chdir('d' * 60)"
SAME = "same"
"""The grading folder equals the agent's."""
EMPTY = "empty"
"""Nothing to carry."""

CASES: dict[str, tuple[str, str]] = {
    # plain edits
    "modify_text": ("echo new >>src/app.py", SAME),
    "new_text": ("echo new >src/new.py", SAME),
    "delete_text": ("rm src/long.txt", SAME),
    "git_rm": ("git rm -q src/long.txt", SAME),
    "rename": ("mv src/long.txt src/longer.txt", SAME),
    "git_mv": ("git mv src/long.txt src/longer.txt", SAME),
    "rename_and_edit": ("mv src/long.txt l.txt; echo x >>l.txt", SAME),
    "case_only_rename": ("mv README.md readme.md", SAME),
    "copy": ("cp src/long.txt src/copy.txt", SAME),
    "swap_two_files": ("mv src/app.py t; mv src/other.py src/app.py; mv t src/other.py", SAME),
    "truncate": (": >src/long.txt", SAME),
    "new_empty_file": (": >src/__init__.py", SAME),
    "delete_everything": ("rm -rf ./* .gitignore", SAME),
    "same_size_and_time": (
        "touch -r src/other.py t; printf 'x = 2\\n' >src/other.py; touch -r t src/other.py; rm t",
        SAME,
    ),
    "hard_link": ("ln src/app.py src/hard.py; echo y >>src/hard.py", SAME),
    "text_that_looks_like_a_patch": (
        "git diff HEAD~1 >notes.txt; printf 'diff --git a/../x b/../x\\n--- a/../x\\n+++ /etc/passwd\\n' >>notes.txt",
        SAME,
    ),
    "nothing": ("true", EMPTY),
    "edit_and_undo": ("echo x >>src/app.py; git checkout -q src/app.py", EMPTY),
    "touch": ("touch src/*.py", EMPTY),
    "empty_folder": ("mkdir -p src/nothing", EMPTY),
    # the agent's own git
    "staged": ("echo new >src/new.py; echo x >>src/app.py; git add -A", SAME),
    "staged_then_edited": ("echo a >>src/app.py; git add -A; echo b >>src/app.py", SAME),
    "staged_new_then_removed": ("echo a >n.py; git add n.py; rm n.py", EMPTY),
    "staged_deletion_kept_file": ("git rm -q --cached src/app.py", EMPTY),
    "committed": ("echo x >>src/app.py; rm src/long.txt; git add -A; git commit -q -m fix", SAME),
    "committed_then_edited": ("echo x >>src/app.py; git commit -q -am fix; echo y >>src/app.py", SAME),
    "amended": ("echo x >>src/app.py; git commit -q -a --amend -m fix", SAME),
    "committed_on_a_branch": ("git checkout -q -b fix; echo x >>src/app.py; git commit -q -am fix", SAME),
    "branch_left_behind": (
        "git checkout -q -b fix; echo x >>src/app.py; git commit -q -am fix; git checkout -q main",
        EMPTY,
    ),
    "detached_commit": ("git checkout -q --detach; echo x >>src/app.py; git commit -q -am fix", SAME),
    "stashed": ("echo x >>src/app.py; git stash -q", EMPTY),
    "stash_popped": ("echo x >>src/app.py; git stash -q; git stash pop -q", SAME),
    "merge_conflict": (
        "git checkout -q -b a; echo a >README.md; git commit -q -am a; git checkout -q main; echo b >README.md;"
        "git commit -q -am b; git merge a || true",
        SAME,
    ),
    "reset_to_parent": ("git reset -q --hard HEAD~1", SAME),
    "index_lock": ("echo x >>src/app.py; : >.git/index.lock", SAME),
    "broken_index": ("echo x >>src/app.py; echo junk >.git/index", SAME),
    "removed_git": ("echo x >>src/app.py; rm -rf .git", SAME),
    "new_git": ("echo x >>src/app.py; rm -rf .git; git init -q .; git add -A", SAME),
    "git_is_a_file": ("echo x >>src/app.py; rm -rf .git; echo gitdir: /nowhere >.git", SAME),
    "git_is_a_link": ("echo x >>src/app.py; mv .git /tmp/g$$; ln -s /tmp/g$$ .git", SAME),
    "assume_unchanged": ("git update-index --assume-unchanged src/app.py; echo x >>src/app.py", SAME),
    "skip_worktree": ("git update-index --skip-worktree src/app.py; echo x >>src/app.py", SAME),
    "sparse_checkout": (
        "echo x >>src/app.py; git sparse-checkout set src -q 2>/dev/null || true; echo y >>src/app.py",
        SAME,
    ),
    "file_mode_off": ("git config core.fileMode false; chmod +x src/app.py", SAME),
    "no_prefix": ("git config diff.noprefix true; echo x >>src/app.py", SAME),
    "colour_always": ("git config color.ui always; echo x >>src/app.py", SAME),
    "external_diff": ("git config diff.external 'echo pwned'; echo x >>src/app.py", SAME),
    "other_worktree": ("git config core.worktree /tmp; echo x >>src/app.py", SAME),
    "file_monitor": ("git config core.fsmonitor 'touch /tmp/pwned; false'; echo x >>src/app.py", SAME),
    "hooks": (
        "printf '#!/bin/sh\\necho hooked >>src/app.py\\n' >.git/hooks/post-index-change; chmod +x .git/hooks/*;"
        "echo x >>src/app.py",
        SAME,
    ),
    "ignore_everything": ("git config core.excludesFile .all; echo '*' >.all; echo x >new.py", SAME),
    # attributes
    "attribute_no_diff": ("echo '*.py -diff' >.gitattributes; echo x >>src/app.py", SAME),
    "attribute_crlf": (
        "echo '* text eol=crlf' >.gitattributes; printf 'a\\r\\nb\\n' >src/mixed.txt; echo x >>src/app.py",
        SAME,
    ),
    "attribute_binary": ("echo '*.py binary' >.gitattributes; echo x >>src/app.py", SAME),
    "attribute_filter": (
        "git config filter.f.clean 'sed s/x/y/'; echo '* filter=f ident' >.gitattributes; echo 'x $Id$' >>src/app.py",
        SAME,
    ),
    "attribute_encoding": ("echo '*.py working-tree-encoding=UTF-16' >.gitattributes; echo x >>src/app.py", SAME),
    "attribute_macro": ("printf '[attr]text -diff filter=f\\n*.py text\\n' >.gitattributes; echo x >>src/app.py", SAME),
    "attribute_in_info": ("mkdir -p .git/info; echo '* -diff' >.git/info/attributes; echo x >>src/app.py", SAME),
    # bytes
    "binary_new": ("head -c 3000 /dev/urandom >bin/new.bin", SAME),
    "binary_modified": ("printf 'zz\\0' >>bin/data.bin", SAME),
    "binary_deleted": ("rm bin/data.bin", SAME),
    "binary_to_text": ("echo text >bin/data.bin", SAME),
    "latin1_edited": ("printf 'th\\351\\n' >>latin1.txt", SAME),
    "latin1_new": ("printf 'na\\357ve\\n' >latin1_new.txt", SAME),
    "utf16_new": ("printf '\\377\\376a\\0\\n\\0' >utf16.txt", SAME),
    "crlf_edited": ("printf 'three\\r\\n' >>crlf.txt", SAME),
    "crlf_to_lf": ("printf 'one\\ntwo\\n' >crlf.txt", SAME),
    "lone_cr": ("printf 'a\\rb\\r' >>src/long.txt", SAME),
    "trailing_blanks": ("printf 'x = 1   \\n\\t \\n\\n\\n' >>src/app.py", SAME),
    "end_of_line_added": ("printf '\\n' >>noeol.txt", SAME),
    "end_of_line_removed": ("printf 'readme' >README.md", SAME),
    "text_of_30_megabytes": ("yes 'a line of text that repeats itself' | head -c 30000000 >big.txt", SAME),
    "three_thousand_files": ("mkdir many; cd many; i=0; while [ $i -lt 3000 ]; do echo $i >$i; i=$((i+1)); done", SAME),
    # modes, links, kinds
    "made_executable": ("chmod +x src/app.py", SAME),
    "made_plain": ("chmod -x run.sh", SAME),
    "edited_and_made_executable": ("echo x >>src/app.py; chmod +x src/app.py", SAME),
    "unreadable_new_file": ("echo secret >locked.txt; chmod 000 locked.txt", SAME),
    "unreadable_folder": ("mkdir locked; echo a >locked/a; chmod 000 locked", SAME),
    "private_modes": ("echo a >a.txt; chmod 600 a.txt; chmod 4755 run.sh", SAME),
    "link_new": ("ln -s src/app.py l; ln -s ../README.md src/up", SAME),
    "link_absolute_inside": ('ln -s "$PWD/src" l', SAME),
    "link_dangling": ("ln -s not/there l", SAME),
    "link_retargeted": ("ln -sfn src link", SAME),
    "link_to_file": ("rm link; echo file >link", SAME),
    "file_to_link": ("rm README.md; ln -s src/app.py README.md", SAME),
    "folder_to_link": ("mv deep other; ln -s other deep", SAME),
    "folder_to_file": ("rm -rf deep; echo file >deep", SAME),
    "file_to_folder": ("rm README.md; mkdir README.md; echo z >README.md/z", SAME),
    "file_to_repository": (
        "rm README.md; git init -q README.md; cd README.md; echo z >z; git add z;"
        "git -c user.name=a -c user.email=a commit -qm z",
        SAME,
    ),
    "pipe": ("mkfifo p; echo x >>src/app.py", SAME),
    # names
    "unicode_names": ("echo a >'ü ñ 漢字.txt'; mv 'name with space.txt' 'ünï.txt'", SAME),
    "name_not_utf8": ("echo a >\"$(printf 'b\\377d')\"", SAME),
    "name_with_newline": ("echo a >\"$(printf 'two\\nlines')\"", SAME),
    "name_with_quotes": ("echo a >'q\"u'\\''o.txt'; echo b >'back\\slash'; echo c >\"$(printf 'ta\\tb')\"", SAME),
    "name_with_glob": ("echo a >'*'; echo b >'[x]'; echo c >'!not'; echo d >'#hash'", SAME),
    "name_with_dash": ("echo a >./-rf; echo b >./--; echo c >' lead'; echo d >'trail '", SAME),
    "name_that_looks_like_a_header": ("mkdir -p 'a/x b'; echo 1 >'a/x b/y'; mkdir -p 'x b'; echo 2 >'x b/x'", SAME),
    "deep_path": ("d=$(printf 'folder%.0s/' 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16); mkdir -p $d; echo a >$d/f", SAME),
    "name_of_200_bytes": ("echo a >$(printf 'n%.0s' $(seq 200))", SAME),
    # ignored files
    "ignored_new": ("echo a >debug.log", SAME),
    "ignored_but_tracked": ("echo more >>tracked.log", SAME),
    "ignored_but_tracked_deleted": ("rm tracked.log", SAME),
    "hidden_by_own_ignore": ("echo new.py >>.gitignore; echo a >new.py", SAME),
    "hidden_by_info_exclude": ("mkdir -p .git/info; echo new.py >>.git/info/exclude; echo a >new.py", SAME),
    "ignore_file_deleted": ("rm .gitignore; echo a >a.log", SAME),
    "ignored_folder_was_there": ("echo changed >build/old.o", EMPTY),
    "caches": (
        "mkdir -p src/__pycache__ .pytest_cache; echo a >src/__pycache__/app.pyc; echo b >.pytest_cache/x",
        EMPTY,
    ),
    # repositories inside
    "path_too_long_to_be_named": (TOO_DEEP + "\nopen('f', 'w').close()\"; echo a >>src/app.py", "unstorable_path"),
    "repository_too_deep_to_be_named": (TOO_DEEP + "\nos.mkdir('.git')\"; git init -q src/x", "unstorable_path"),
    "nested_init": ("git init -q vendored; echo a >vendored/a", SAME),
    "nested_commit": (
        "git init -q vendored; cd vendored; echo a >a; git add a; git -c user.name=a -c user.email=a commit -qm a",
        SAME,
    ),
    "nested_in_existing_folder": ("git -C src init -q; echo x >>src/app.py", SAME),
    "nested_git_file": ("mkdir sub; echo 'gitdir: /nowhere' >sub/.git; echo a >sub/a", SAME),
    "nested_worktree": ("git worktree add -q wt 2>/dev/null; echo x >>wt/src/app.py", SAME),
    "submodule": (
        "git -c protocol.file.allow=always clone -q . /tmp/s$$;"
        "git -c protocol.file.allow=always submodule --quiet add /tmp/s$$ sub; git commit -qm sub",
        SAME,
    ),
    # what no patch may do
    "link_to_root": ("ln -s /etc/passwd l", "link_outside"),
    "link_upwards": ("ln -s ../../etc l", "link_outside"),
    "link_through_a_link": ("ln -s deep/er d; ln -s d/../../.. l", "link_outside"),
    "git_in_other_case": ("mkdir -p sub/.GIT/hooks; echo a >sub/.GIT/hooks/x", "unstorable_path"),
}


@dataclass
class Boxes:
    agent: Sandbox
    grading: Sandbox


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def boxes(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Boxes]:
    async with NamespacesProvider(state_dir=tmp_path_factory.mktemp("state")) as provider:
        agent = await provider.create(SandboxSpec(image="host"), key="agent")
        grading = await provider.create(SandboxSpec(image="host"), key="grading")
        for box in (agent, grading):
            await must(box, "install", "-d", "-o", "agent", ROOT)
            await must(box, "sh", "-c", TEMPLATE, "_", f"{ROOT}/template", user="agent")
            await box.put(f"{ROOT}/manifest.py", MANIFEST.encode())
        yield Boxes(agent, grading)


async def must(box: Sandbox, *argv: str, user: str = "root", cwd: str = "/") -> bytes:
    done = await box.exec(argv, user=user, cwd=cwd)
    assert done.exit_code == 0, done.stderr.decode(errors="replace")
    return done.stdout


async def fresh(box: Sandbox, name: str) -> str:
    workdir = f"{ROOT}/{name}"
    await must(box, "cp", "-a", f"{ROOT}/template", workdir)
    return workdir


async def manifest(box: Sandbox, workdir: str) -> bytes:
    return await must(box, "python3", "-I", "-S", f"{ROOT}/manifest.py", workdir)


async def taken(box: Sandbox, name: str, script: str, limits: CaptureLimits | None = None) -> Patch:
    workdir = await fresh(box, name)
    baseline = await take_baseline(box, workdir)
    await must(box, "sh", "-c", script, user="agent", cwd=workdir)
    return await capture(box, baseline, limits=limits)


@pytest.mark.parametrize("name", CASES)
async def test_what_the_agent_left_arrives_or_is_refused_by_name(boxes: Boxes, name: str) -> None:
    script, expected = CASES[name]
    patch = await taken(boxes.agent, name, script)
    if expected not in (SAME, EMPTY):
        assert patch.refusal is not None
        assert patch.refusal.reason == expected
        return
    assert patch.refusal is None
    assert patch.empty == (expected == EMPTY)
    if expected == EMPTY:
        return
    workdir = await fresh(boxes.grading, name)
    await apply(boxes.grading, await take_baseline(boxes.grading, workdir), patch)
    assert await manifest(boxes.grading, workdir) == await manifest(boxes.agent, workdir)


async def test_a_capture_can_be_repeated_and_gives_the_same_patch(boxes: Boxes) -> None:
    workdir = await fresh(boxes.agent, "twice")
    baseline = await take_baseline(boxes.agent, workdir)
    await must(boxes.agent, "sh", "-c", "git init -q n; echo a >n/a; rm README.md", user="agent", cwd=workdir)
    first = await capture(boxes.agent, baseline)
    assert await capture(boxes.agent, baseline) == first
    assert await must(boxes.agent, "ls", f"{workdir}/n/.git/HEAD")


async def test_a_change_over_the_limit_is_an_error_and_never_a_cut_patch(boxes: Boxes) -> None:
    with pytest.raises(LimitError):
        await taken(boxes.agent, "large_patch", "head -c 200000 /dev/urandom >r", CaptureLimits(patch_bytes=100_000))
    with pytest.raises(LimitError):
        await taken(boxes.agent, "large_file", "truncate -s 3G r", CaptureLimits())
    with pytest.raises(LimitError):
        await taken(boxes.agent, "many", "touch a b c d", CaptureLimits(files=3))
    with pytest.raises(LimitError, match="entries>1000"):
        await taken(boxes.agent, "empty_folders", "seq 1001 | xargs mkdir", CaptureLimits(entries=1000))


async def test_ignored_build_products_beyond_the_limit_are_left_out_and_counted(boxes: Boxes) -> None:
    script = (
        "mkdir -p out build/x; echo out/ >>.gitignore; head -c 9000 /dev/zero >out/a; : >out/b; echo x >>tracked.log"
    )
    patch = await taken(boxes.agent, "products", script, CaptureLimits(ignored_bytes=8000))
    assert patch.left_out == 2
    assert patch.paths == (".gitignore", "tracked.log")


async def test_the_agent_can_neither_read_nor_write_the_shadow_repository(boxes: Boxes) -> None:
    baseline = await take_baseline(boxes.agent, await fresh(boxes.agent, "shadow"))
    for argv in (("ls", baseline.shadow), ("touch", f"{baseline.shadow}/git/config")):
        done = await boxes.agent.exec(argv, user="agent")
        assert done.exit_code != 0
        assert b"ermission denied" in done.stderr


async def test_another_base_in_the_grading_box_is_our_failure_and_not_the_patchs(boxes: Boxes) -> None:
    patch = await taken(boxes.agent, "drift", "echo x >>src/app.py")
    workdir = await fresh(boxes.grading, "drift")
    await must(boxes.grading, "sh", "-c", "echo drift >>README.md", cwd=workdir)
    with pytest.raises(GradingFailed, match="not reproducible"):
        await apply(boxes.grading, await take_baseline(boxes.grading, workdir), patch)


async def test_an_empty_patch_keeps_its_meaning_when_stored(boxes: Boxes) -> None:
    patch = await taken(boxes.agent, "stored", "rm latin1.txt")
    assert Patch.restore(patch.data, patch.record()) == patch
    assert not patch.empty
    assert Patch.nothing(patch.base_tree).empty
