"""Unpacks npm tarballs and wheels: plain files only, nothing outside the folder, bounded in size and number."""

from __future__ import annotations

import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

from rollwright.errors import AgentInstallFailed, ConfigError

MAX_BYTES = 2 << 30
MAX_FILES = 50_000
_CHUNK = 1 << 20


def unpack(
    tarball: Path,
    target: Path,
    *,
    keep: tuple[str, ...] = (),
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write the files of `tarball` (gzip, xz or bzip2) below `target`, without their first path component.

    `target` does not exist yet. `keep`: only these files, or files below these folders; each must be there. `check` is
    called between chunks and may raise to stop. Raises `ConfigError` for an archive that is broken or not what we
    accept, `AgentInstallFailed` when the disk does not take it. What was written stays for the caller to remove.
    """
    wanted = dict.fromkeys(keep, False)
    files = size = 0
    try:
        target.mkdir(parents=True)
        with tarfile.open(tarball) as archive:
            for member in archive:
                check()
                files += 1
                size += member.size
                if files > max_files or size > max_bytes:
                    raise ConfigError(f"{tarball.name} holds more than {max_files} files or {max_bytes} bytes")
                path = _inner_path(tarball, member)
                if path is None or (wanted and not _mark(wanted, path)):
                    continue
                _refuse_special(tarball, member)
                _write(archive, member, target / path, check)
        for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
            folder.chmod(0o755)  # the agent's user reads them, whatever our umask
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"{tarball.name} is not a readable npm tarball: {error}") from error
    except OSError as error:
        if error.errno is None or isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            raise ConfigError(f"{tarball.name} is not a readable npm tarball: {error}") from error
        raise AgentInstallFailed(f"{target} cannot be written: {error}") from error
    missing = [path for path, found in wanted.items() if not found]
    if missing:
        raise ConfigError(f"{tarball.name} does not hold {', '.join(missing)}")


def unpack_wheel(
    wheel: Path,
    target: Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write the modules and the metadata of `wheel` below `target`, which may hold other wheels.

    Scripts, headers and data files stay out: nothing of them is imported. Raises as `unpack` does.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            if len(members) > max_files or sum(member.file_size for member in members) > max_bytes:
                raise ConfigError(f"{wheel.name} holds more than {max_files} files or {max_bytes} bytes")
            folders = {target}
            for member in members:
                check()
                path = _module_path(wheel, member.filename)
                if path is not None:
                    with archive.open(member) as source:
                        _copy(source, target / path, check, executable=bool(member.external_attr >> 16 & 0o111))
                    folders.update(target / parent for parent in path.parents)
        for folder in folders:
            folder.chmod(0o755)  # the agent's user reads them, whatever our umask
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError) as error:
        raise ConfigError(f"{wheel.name} is not a readable wheel: {error}") from error
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
            raise ConfigError(f"{wheel.name} does not go with the others: {error}") from error
        raise AgentInstallFailed(f"{target} cannot be written: {error}") from error


def _module_path(wheel: Path, name: str) -> PurePosixPath | None:
    """Where a wheel's file goes; None for what is not on the import path."""
    path = PurePosixPath(name)
    if not path.parts or name.startswith("/") or ".." in path.parts or "\0" in name or "\\" in name:
        raise ConfigError(f"{wheel.name} holds a path outside its folder: {name!r}")
    if not path.parts[0].endswith(".data"):
        return path
    return PurePosixPath(*path.parts[2:]) if path.parts[1:2] in (("purelib",), ("platlib",)) else None


def _inner_path(tarball: Path, member: tarfile.TarInfo) -> PurePosixPath | None:
    """Where the member goes; None for a folder."""
    path = PurePosixPath(member.name)
    if member.name.startswith("/") or ".." in path.parts or "\0" in member.name:
        raise ConfigError(f"{tarball.name} holds a path outside its folder: {member.name!r}")
    if member.isdir():
        return None
    if len(path.parts) < 2:
        raise ConfigError(f"{tarball.name} holds a file outside its top folder: {member.name!r}")
    return PurePosixPath(*path.parts[1:])


def _refuse_special(tarball: Path, member: tarfile.TarInfo) -> None:
    """npm packs neither links nor devices, so whoever made one did not use npm."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise ConfigError(f"{tarball.name} holds a link or a special file: {member.name!r}")


def _mark(wanted: dict[str, bool], path: PurePosixPath) -> bool:
    hit = False
    for kept in wanted:
        if path.is_relative_to(kept):
            wanted[kept] = hit = True
    return hit


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, check: Callable[[], None]) -> None:
    source = archive.extractfile(member)
    assert source is not None  # a regular member has content
    with source:
        _copy(source, target, check, executable=bool(member.mode & 0o111))


def _copy(source: IO[bytes], target: Path, check: Callable[[], None], *, executable: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as out:
        while chunk := source.read(_CHUNK):
            check()
            out.write(chunk)
        os.fchmod(out.fileno(), 0o755 if executable else 0o644)
        out.flush()
        os.fsync(out.fileno())  # the folder's name vouches for its content, also after a power cut
