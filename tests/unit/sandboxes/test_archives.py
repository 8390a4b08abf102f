"""Folders packed for the way to a box."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from rollwright.errors import UsageError
from rollwright.sandboxes.e2b.archives import Archives

pytestmark = pytest.mark.anyio


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "run").write_text("#!/bin/sh\n")
    (tree / "bin" / "run").chmod(0o755)
    (tree / "link").symlink_to("bin/run")
    return tree


async def test_what_did_not_change_is_packed_once(tree: Path) -> None:
    archives = Archives()
    first = await archives.of(tree)
    assert await archives.of(tree) is first
    (tree / "bin" / "run").chmod(0o700)
    changed = await archives.of(tree)
    assert changed is not first
    with tarfile.open(fileobj=io.BytesIO(changed)) as archive:
        entries = {entry.name: (entry.mode, entry.linkname, entry.uid) for entry in archive}
    assert entries["bin/run"] == (0o700, "", 0)
    assert entries["link"][1:] == ("bin/run", 0)


async def test_only_the_last_few_are_kept(tree: Path, tmp_path: Path) -> None:
    archives = Archives()
    first = await archives.of(tree)
    for n in range(2):
        (tmp_path / f"other{n}").mkdir()
        await archives.of(tmp_path / f"other{n}")
    assert await archives.of(tree) is not first


async def test_what_no_archive_can_carry_is_named(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with pytest.raises(UsageError, match="pipe"):
        await Archives().of(tree)
    with pytest.raises(UsageError, match="not a folder"):
        await Archives().of(tree / "bin" / "run")
