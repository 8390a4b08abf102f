"""The layers of image files, each unpacked once into the cache and shared read-only by all boxes that need it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError, StoreError
from rollwright.sandboxes.namespaces import lean, oci
from rollwright.sandboxes.namespaces.idmap import Maps

log = logging.getLogger(__name__)

_ANSWER_LIMIT = 16 << 20


class Layers:
    """The unpacked layers under `folder`. Everything here blocks, so it is called in a thread.

    Files belong to ids as the boxes of this machine have them, so a user that has other ids has other layers.
    """

    def __init__(self, folder: Path, *, maps: Callable[[], Maps]) -> None:
        self._folder = folder
        self._maps = maps
        self._described: dict[tuple[str, int, int, str], oci.Description] = {}

    def describe(self, file: Path, name: str) -> oci.Description:
        """What an image file holds under this name. Raises `ConfigError`."""
        try:
            status = (file / "index.json" if file.is_dir() else file).stat()
        except OSError as e:
            raise ConfigError(f"image {name!r}: {file} is no image file: {e.strerror}", image=name) from e
        seen = (str(file), status.st_mtime_ns, status.st_size, name)
        if seen not in self._described:
            request = {"op": "describe", "path": str(file), "name": name, "machine": platform.machine()}
            self._described[seen] = oci.from_json(_ask(request, what=f"image {name!r} ({file})"))
        return self._described[seen]

    def ready(self, image: oci.Description) -> bool:
        """Whether all of its layers are unpacked."""
        return all(self._place(layer).is_dir() for layer in image.layers)

    def unpacked(self, image: oci.Description, name: str) -> tuple[Path, ...]:
        """The folders of its layers, lowest first. Unpacks those that are not. Raises `ConfigError`, `StoreError`."""
        return tuple(self._unpacked(layer, name) for layer in image.layers)

    def _place(self, layer: oci.Layer) -> Path:
        maps = self._maps()
        kind = hashlib.sha256(json.dumps([maps.uid, maps.gid]).encode()).hexdigest()[:8]
        return self._folder / kind / layer.digest.removeprefix("sha256:")

    def _unpacked(self, layer: oci.Layer, name: str) -> Path:
        final = self._place(layer)
        if final.is_dir():
            return final
        try:
            # Nobody else of this machine may find programs with the setuid bit of whoever made the image.
            final.parent.mkdir(parents=True, exist_ok=True)
            final.parent.chmod(0o700)
            with _locked(final.with_suffix(".lock")) as lock:
                if not final.is_dir():
                    self._unpack(layer, final, name, lock)
        except OSError as e:
            raise StoreError(f"cannot keep layers of images in {final.parent}: {e}", path=str(final)) from e
        return final

    def _unpack(self, layer: oci.Layer, final: Path, name: str, lock: int) -> None:
        maps = self._maps()
        # What a killed process left there is cleared by the one that unpacks.
        fresh = final.with_suffix(".new")
        fresh.mkdir(exist_ok=True)
        fresh.chmod(0o755)
        answer = _ask(
            {
                "op": "unpack",
                "path": layer.blob.path,
                "offset": layer.blob.offset,
                "size": layer.blob.size,
                "digest": layer.digest,
                "folder": str(fresh),
                "single": maps.single,
                "uid_map": maps.uid,
                "gid_map": maps.gid,
            },
            what=f"image {name!r} ({layer.blob.path})",
            lock=lock,
        )
        fresh.rename(final)
        for what, count in (("device nodes", answer["devices"]), ("owners a box has not", answer["strangers"])):
            if count:
                log.warning("image %s: layer %s has %d files with %s", name, layer.digest[:19], count, what)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[int]:
    """One process, and one thread of it, at a time: whoever holds the descriptor, also when its parent is dead."""
    fd = _lock(path)
    try:
        yield fd
        path.unlink()
    finally:
        os.close(fd)


def _lock(path: Path) -> int:
    """The file is removed while it is locked, so that it is looked at again after the waiting."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _ask(request: Mapping[str, Any], *, what: str, lock: int | None = None) -> dict[str, Any]:
    """Have the lean process do it. Raises `ConfigError` with what it says against the image."""
    done = subprocess.run(
        lean.command("unpack", "-"),
        input=json.dumps(request).encode(),
        capture_output=True,
        check=False,
        env={},
        pass_fds=() if lock is None else (lock,),
    )
    try:
        if len(done.stdout) > _ANSWER_LIMIT:
            raise ValueError("too long an answer")
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as e:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"{what} cannot be read: exit {done.returncode}: {said}") from e
    if "error" in answer:
        raise ConfigError(f"{what} cannot be used: {answer['error']}")
    return answer
