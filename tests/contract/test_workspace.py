"""The working folder before the agent: prepared the same way twice, its history out of sight."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from contract.calc_task import WORKDIR, Place, task
from rollwright.errors import WorkspaceFailed
from rollwright.graders.patch import capture, take_baseline
from rollwright.graders.workspace import prepare, scrub_history
from rollwright.sandboxes import SandboxSpec

pytestmark = pytest.mark.anyio


async def test_the_agent_sees_one_commit_and_nothing_of_the_history(place: Place) -> None:
    async def git(*args: str) -> str:
        done = await place.agent.exec(("git", *args), user="agent", cwd=WORKDIR)
        return (done.stdout + done.stderr).decode()

    await place.patch("true")
    assert (await git("log", "--all", "--oneline")).count("\n") == 1
    assert await git("tag") == ""
    assert "not a valid object" in (await git("cat-file", "-t", "v1")).lower()
    objects = await git("cat-file", "--batch-all-objects", "--batch-check=%(objecttype)")
    assert objects.split().count("commit") == 1
    assert "answer" not in await git("log", "--all", "--reflog", "--format=%B")
    assert await git("status", "--porcelain") == ""


async def test_a_folder_without_a_repository_becomes_one(place: Place) -> None:
    box = await place.provider.create(SandboxSpec(image="plain"), key="plain")
    try:
        await prepare(box, task().agent)
        await scrub_history(box, WORKDIR)
        baseline = await take_baseline(box, WORKDIR)
        done = await box.exec(
            ("sh", "-c", "echo 2 >a && git diff --stat && git commit -qam x"), user="agent", cwd=WORKDIR
        )
        assert done.exit_code == 0, done.stderr
        assert b"a | 2 +-" in done.stdout
        assert (await capture(box, baseline)).paths == ("a",)
    finally:
        await box.close()


@pytest.mark.parametrize(
    ("lines", "says"),
    [(["false"], "exit code 1"), (["echo hi", "exit 7"], "exit code 7"), (["rm -rf /workspace"], "workspace")],
)
async def test_pre_commands_that_fail_are_an_error_with_their_words(
    place: Place, lines: Sequence[str], says: str
) -> None:
    of = task(pre_commands=lines)
    with pytest.raises(WorkspaceFailed, match=says) as caught:
        await place.grade(None, "pre" + says, of=of)
    assert caught.value.details["step"] == "prepare"


HISTORIES = {
    "packed": "git gc -q; git pack-refs --all",
    "detached": "git checkout -q --detach",
    "annotated_tag": "git tag -a -m x v2 v1",
    "stash_and_notes": "echo x >>calc.py; git stash -q; git notes add -m note v1",
    "remote": "git remote add origin /nowhere; git update-ref refs/remotes/origin/fix v1",
    "alternates": "git clone -q --bare --no-hardlinks . /tmp/alt; echo /tmp/alt/objects >.git/objects/info/alternates",
    "linked_worktree": "mv .git /tmp/main.git; git --git-dir=/tmp/main.git worktree add -q -f /tmp/wt;"
    "cp /tmp/wt/.git .git; git --git-dir=/tmp/main.git config core.bare true;"
    "echo /workspace/calc/.git >/tmp/main.git/worktrees/wt/gitdir",
    "submodule": "git clone -q --no-hardlinks . /tmp/sub; git config protocol.file.allow always;"
    "git -c protocol.file.allow=always submodule --quiet add /tmp/sub lib; git commit -q -m sub",
    "no_commit_yet": "rm -rf .git; git init -q .",
    "dirty": "echo x >>calc.py; echo y >new.py; git add new.py",
    "hooks": "echo exit 1 >.git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; git config core.hooksPath .git/hooks",
}


@pytest.mark.parametrize("name", HISTORIES)
async def test_whatever_the_history_was_one_commit_is_left(place: Place, name: str) -> None:
    box = await place.provider.create(place.spec, key=name)
    try:
        await prepare(box, task(pre_commands=[HISTORIES[name]]).agent)
        before = await box.exec(("sh", "-c", "find . -name .git -prune -o -type f -exec sha256sum {} +"), cwd=WORKDIR)
        commit = await scrub_history(box, WORKDIR)
        after = await box.exec(("sh", "-c", "find . -name .git -prune -o -type f -exec sha256sum {} +"), cwd=WORKDIR)
        assert sorted(before.stdout.splitlines()) == sorted(after.stdout.splitlines())
        script = (
            "git rev-list --all --count; git log -1 --format=%H; git status >&2; echo z >z; git add z; git commit -qm z"
        )
        done = await box.exec(("sh", "-c", script), user="agent", cwd=WORKDIR)
        assert done.exit_code == 0, done.stderr
        assert done.stdout.decode().split() == ["1", commit]
        hidden = await box.exec(
            ("sh", "-c", "git log --all --format=%B; git cat-file -p v1"), user="agent", cwd=WORKDIR
        )
        assert b"answer" not in hidden.stdout
    finally:
        await box.close()
