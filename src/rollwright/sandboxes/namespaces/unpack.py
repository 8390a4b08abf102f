"""The lean process that reads an image file, or unpacks one of its layers into a folder that boxes then share.

What is in a layer is untrusted: it is unpacked by the root of a user namespace like that of a box, with the folder as
its root directory, so no name and no link leads out of it. Whiteouts become what an overlay in a box understands.

Each request is one JSON object on stdin, the answer one on stdout: `describe` or `unpack`.
"""

# A lean process, which does not load pathlib.
# ruff: noqa: PTH101, PTH102, PTH103, PTH108, PTH118, PTH120, PTH211

from __future__ import annotations

import contextlib
import ctypes
import gzip
import hashlib
import json
import os
import resource
import shutil
import stat
import sys
import tarfile
from collections.abc import Generator
from typing import IO, Any, NoReturn, Protocol, cast

from rollwright.sandboxes.namespaces import boot
from rollwright.sandboxes.namespaces.oci import ImageError, describe, to_json

_MEMORY = 2 << 30
"""Of this process: long before, a tar header that asks for so much is no honest one."""
_ENTRIES = 4_000_000
_BYTES = 128 << 30
"""Of one layer, unpacked."""
_PIECE = 1 << 20
_STEP = 1 << 16
"""Read from a tar at a time: tarfile copies what it has not used of it for each entry."""
_IDS = 65535
_NOBODY = 65534
_LATEST = 1 << 33
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_OPAQUE_ATTRIBUTE = "user.overlay.opaque"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def main() -> None:
    """Entry point of the process."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > _MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, hard))
    request = json.load(sys.stdin)
    os.umask(0o022)
    try:
        answer = _OPERATIONS[request["op"]](request)
    except boot.BootError as e:
        answer = {"error": str(e), "step": e.step}
    except (ImageError, tarfile.TarError, EOFError, OSError, ValueError, OverflowError, MemoryError) as e:
        answer = {"error": str(e) or type(e).__name__}
    json.dump(answer, sys.stdout)


def _describe(request: dict[str, Any]) -> dict[str, Any]:
    return to_json(describe(request["path"], request["name"], request["machine"]))


def _unpack(request: dict[str, Any]) -> dict[str, Any]:
    fd = os.open(request["path"], os.O_RDONLY | os.O_CLOEXEC)
    os.lseek(fd, request["offset"], os.SEEK_SET)
    stream = _Hashed(_decompressed(fd, request["size"]))
    os.chdir(request["folder"])
    boot.enter_user_namespace(request["uid_map"], request["gid_map"])
    os.chroot(".")
    sys.meta_path.clear()  # from here on a module that is not loaded yet would be the image's
    _clear_here()
    layer = _Unpacking(single=request["single"])
    try:
        source = cast("IO[bytes]", stream)
        with tarfile.open(fileobj=source, mode="r|", bufsize=_STEP, encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                # Or it would keep all of them.
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - typeshed does not know it
                layer.add(tar, member)
        while stream.read(_PIECE):
            pass
        if stream.digest() != request["digest"]:
            raise ImageError(f"it is damaged: the content of layer {request['digest']} is another")
        layer.finish()
    except BaseException:
        _clear_here()
        raise
    return {"entries": layer.entries, "devices": layer.devices, "strangers": layer.strangers}


def _clear_here() -> None:
    """Here, because files may belong to ids that only the namespace has power over."""
    for entry in os.scandir("/"):
        _remove(entry.path)


_OPERATIONS = {"describe": _describe, "unpack": _unpack}


# ----------------------------------------------------------------------------- the stream


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Range:
    """The next `size` bytes of a file."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int, /) -> bytes:
        data = self._file.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(data)
        return data


class _Hashed:
    """Counts and hashes what is read."""

    def __init__(self, stream: _Readable) -> None:
        self._stream = stream
        self._sum = hashlib.sha256()
        self._total = 0

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self._sum.update(data)
        self._total += len(data)
        if self._total > _BYTES:
            raise ImageError(f"a layer is larger than {_BYTES >> 30} GiB")
        return data

    def digest(self) -> str:
        return f"sha256:{self._sum.hexdigest()}"


def _decompressed(fd: int, size: int) -> _Readable:
    magic = os.pread(fd, 4, os.lseek(fd, 0, os.SEEK_CUR))
    if magic == _ZSTD:
        return _from_zstd(fd, size)
    plain = _Range(os.fdopen(fd, "rb"), size)
    return gzip.GzipFile(fileobj=cast("IO[bytes]", plain), mode="rb") if magic.startswith(_GZIP) else plain


def _from_zstd(fd: int, size: int) -> _Readable:
    """Through the program, since Python has it only since 3.14. Two forks: it, and one that feeds it the range."""
    program = shutil.which("zstd", path="/usr/local/bin:/usr/bin:/bin")
    if program is None:
        raise ImageError("a layer is compressed with zstd, and there is no zstd program; install it (apt install zstd)")
    hungry, feed = os.pipe()
    result, out = os.pipe()
    if os.fork() == 0:
        _feed(fd, feed, size, close=(hungry, result, out))
    actions = [(os.POSIX_SPAWN_DUP2, hungry, 0), (os.POSIX_SPAWN_DUP2, out, 1)]
    os.posix_spawn(program, ["zstd", "-dcq"], {}, file_actions=actions)
    for ours in (fd, hungry, feed, out):
        os.close(ours)
    return os.fdopen(result, "rb")


def _feed(source: int, target: int, size: int, *, close: tuple[int, ...]) -> NoReturn:
    try:
        for fd in close:
            os.close(fd)
        while size and (sent := os.sendfile(target, source, None, size)):
            size -= sent
    finally:
        os._exit(0)


# ----------------------------------------------------------------------------- the folder


class _Unpacking:
    """The entries of one layer, below `/`."""

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self._bytes = 0
        self._hidden: list[str] = []
        self._opaque: set[str] = set()
        self._times: dict[str, int] = {}
        self.entries = 0
        self.devices = 0
        """Not made: a box has its own."""
        self.strangers = 0
        """Owned by ids that a box does not have; given to nobody."""

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.entries += 1
        self._bytes += member.size
        if self.entries > _ENTRIES or self._bytes > _BYTES:
            raise ImageError(f"a layer has more than {_ENTRIES} files, or more than {_BYTES >> 30} GiB")
        path = _path(member.name)
        if path == "/":
            return
        with _named(member.name):
            folder, name = os.path.split(path)
            if name.startswith(_WHITEOUT):
                self._whiteout(folder, name)
                return
            _make_folders(folder)
            self._make(tar, member, path)

    def _whiteout(self, folder: str, name: str) -> None:
        hidden = name.removeprefix(_WHITEOUT)
        if name == _OPAQUE:
            self._opaque.add(folder)
        elif hidden in ("", ".", ".."):
            raise ImageError("it is not a whiteout of anything")
        elif not hidden.startswith(_WHITEOUT):
            self._hidden.append(os.path.join(folder, hidden))

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.ischr() or member.isblk():
            self.devices += 1
            return
        if not (member.isdir() and _is_folder(path)):
            _remove(path)
        if member.isdir():
            if not _is_folder(path):
                os.mkdir(path, 0o700)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            # It has its attributes from the file it is another name of.
            os.link(_path(member.linkname), path, follow_symlinks=False)
            return
        elif member.isfifo():
            os.mkfifo(path, 0o600)
        elif member.isreg():
            self._fill(tar, member, path)
        else:
            raise ImageError(f"an entry of unknown type {member.type!r}")
        self._dress(member, path)

    def _fill(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        content = tar.extractfile(member)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            if content is not None:
                shutil.copyfileobj(content, file, _PIECE)

    def _dress(self, member: tarfile.TarInfo, path: str) -> None:
        if not self._single:
            owner = (member.uid, member.gid)
            if not all(0 <= number <= _IDS for number in owner):
                self.strangers += 1
            uid, gid = (number if 0 <= number <= _IDS else _NOBODY for number in owner)
            os.chown(path, uid, gid, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, stat.S_IMODE(member.mode))
        modified = int(max(0.0, min(float(member.mtime), float(_LATEST))))
        if member.isdir():
            self._times[path] = modified
        else:
            os.utime(path, (modified, modified), follow_symlinks=False)

    def finish(self) -> None:
        """What holds for the layers below, whatever its place among the entries; then to the disk."""
        for path in self._hidden:
            with _named(path):
                if _is_folder(path):
                    self._opaque.add(path)
                elif not os.path.lexists(path):
                    _make_folders(os.path.dirname(path))
                    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        for path in self._opaque:
            with _named(path):
                _make_folders(path)
                os.setxattr(path, _OPAQUE_ATTRIBUTE, b"y", follow_symlinks=False)
        for path, modified in reversed(self._times.items()):
            if _is_folder(path):
                os.utime(path, (modified, modified))
        fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # It is found by its name later, so it must not be there in part after a power cut.
        ctypes.CDLL(None).syncfs(fd)
        os.close(fd)


@contextlib.contextmanager
def _named(name: str) -> Generator[None]:
    try:
        yield
    except OSError as e:
        raise ImageError(f"{name!r} cannot be unpacked: {e.strerror}") from e
    except ImageError as e:
        raise ImageError(f"{name!r}: {e}") from e


def _path(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ImageError(f"{name!r} is not a name inside an image")
    return "/" + "/".join(parts)


def _make_folders(path: str) -> None:
    try:
        os.makedirs(path, 0o755, exist_ok=True)
    except FileExistsError:
        # A link to what is only in a layer below, perhaps.
        os.makedirs(os.path.realpath(path), 0o755, exist_ok=True)


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
