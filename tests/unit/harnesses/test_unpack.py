"""Unpacking: plain files land where they belong, and an archive that tries anything else is refused."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from rollwright.errors import AgentInstallFailed, ConfigError
from rollwright.harnesses.unpack import unpack
from support.npm_registry import tarball


def archive_of(folder: Path, *members: tarfile.TarInfo, content: bytes = b"x") -> Path:
    path = folder / "attack.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    made.linkname = linkname
    return made


def below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_land_without_the_top_folder_and_keep_only_their_execute_bit(tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    path.write_bytes(tarball({"bin/tool": b"#!", "README": b"hi"}, executable="bin/tool"))
    old = os.umask(0o077)
    try:
        unpack(path, tmp_path / "out")
    finally:
        os.umask(old)
    assert below(tmp_path / "out") == {"bin/tool": b"#!", "README": b"hi"}
    modes = {name: (tmp_path / "out" / name).stat().st_mode & 0o7777 for name in ("bin/tool", "README", "bin", ".")}
    assert modes == {"bin/tool": 0o755, "README": 0o644, "bin": 0o755, ".": 0o755}


def test_the_top_folder_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    path.write_bytes(tarball({"a": b"1"}, top="node-v22"))
    unpack(path, tmp_path / "out")
    assert below(tmp_path / "out") == {"a": b"1"}


def test_only_what_is_wanted_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    path.write_bytes(tarball({"dist/a/x": b"1", "dist/ab": b"2", "LICENSE": b"3", "docs/y": b"4"}))
    unpack(path, tmp_path / "out", keep=("dist/a", "LICENSE"))
    assert below(tmp_path / "out") == {"dist/a/x": b"1", "LICENSE": b"3"}


def test_a_wanted_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    path.write_bytes(tarball({"a": b"1"}))
    with pytest.raises(ConfigError, match="does not hold bin/node"):
        unpack(path, tmp_path / "out", keep=("a", "bin/node"))


@pytest.mark.parametrize(
    "attack",
    [
        [member("package/../../escaped")],
        [member("../escaped")],
        [member("/escaped")],
        [member("package/a/../../../escaped")],
        [member("escaped")],
        [member("package/link", tarfile.SYMTYPE, "/")],
        [member("package/link", tarfile.SYMTYPE, ".."), member("package/link/escaped")],
        [member("package/hard", tarfile.LNKTYPE, "../../escaped")],
        [member("package/hard", tarfile.LNKTYPE, "package/a")],
        [member("package/pipe", tarfile.FIFOTYPE)],
        [member("package/null", tarfile.CHRTYPE)],
        [member("package/a"), member("package/a")],
        [member("package/a"), member("package/a/b")],
    ],
    ids=lambda attack: "+".join(f"{m.name}:{m.type.decode()}" for m in attack),
)
def test_an_archive_that_leaves_its_folder_is_refused(attack: list[tarfile.TarInfo], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attack\.tgz"):
        unpack(archive_of(tmp_path, *attack), tmp_path / "deep/er/out")
    assert not list(tmp_path.rglob("escaped"))
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_an_archive_that_grows_too_large_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "bomb.tgz"
    path.write_bytes(tarball({"zeros": bytes(10 << 20)}))
    assert path.stat().st_size < 20_000
    with pytest.raises(ConfigError, match="more than"):
        unpack(path, tmp_path / "out", max_bytes=1 << 20)
    assert below(tmp_path / "out") == {}


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    path.write_bytes(tarball({f"f{number}": b"" for number in range(30)}))
    with pytest.raises(ConfigError, match="more than 20 files"):
        unpack(path, tmp_path / "out", max_files=20)


@pytest.mark.parametrize("broken", [b"", b"not a tarball", gzip.compress(b"not a tar" * 100)])
def test_what_is_no_tarball_is_refused(broken: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    path.write_bytes(broken)
    with pytest.raises(ConfigError, match="not a readable npm tarball"):
        unpack(path, tmp_path / "out")


def test_a_cut_tarball_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    data = tarball({"random": os.urandom(100_000)})
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="not a readable npm tarball"):
        unpack(path, tmp_path / "out")


def test_a_disk_that_takes_nothing_is_our_trouble(tmp_path: Path) -> None:
    path = tmp_path / "p.tgz"
    path.write_bytes(tarball({"a": bytes(1 << 20)}))
    with pytest.raises(AgentInstallFailed, match="cannot be written"):
        unpack(path, Path("/proc/self/no-such-place/out"))


def test_unpacking_stops_when_told(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def check() -> None:
        raise Stop

    path = tmp_path / "p.tgz"
    path.write_bytes(tarball({"a": b"1"}))
    with pytest.raises(Stop):
        unpack(path, tmp_path / "out", check=check)
    assert below(tmp_path / "out") == {}
