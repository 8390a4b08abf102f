"""Host folders packed for the way to a box. What does not change is packed once for all boxes."""

from __future__ import annotations

import io
import os
import tarfile
from collections import OrderedDict
from pathlib import Path

import anyio
import anyio.to_thread

from rollwright.errors import UsageError

__all__ = ["Archives"]

_KEPT = 2
_LEVEL = 1
"""Of compression: it must not take longer than it saves."""

Fingerprint = tuple[tuple[str, int, int, int], ...]


class Archives:
    """Compressed tar archives of folders."""

    def __init__(self) -> None:
        self._made: OrderedDict[Path, tuple[Fingerprint, bytes]] = OrderedDict()
        self._making = anyio.Lock()

    async def of(self, source: Path) -> bytes:
        """The folder as `.tar.gz`, links and modes kept. Raises `UsageError` for devices and sockets."""
        async with self._making:
            now = await anyio.to_thread.run_sync(_fingerprint, source)
            known = self._made.get(source)
            if known is None or known[0] != now:
                self._made[source] = (now, await anyio.to_thread.run_sync(_pack, source))
            self._made.move_to_end(source)
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
            return self._made[source][1]


def _fingerprint(source: Path) -> Fingerprint:
    """Changes when a file does: names, modes, sizes and times of all that is below."""
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder")
    found: list[tuple[str, int, int, int]] = []
    for folder, folders, files in os.walk(source):
        for name in (*folders, *files):
            path = Path(folder, name)
            about = path.lstat()
            found.append((str(path.relative_to(source)), about.st_mode, about.st_size, about.st_mtime_ns))
    return tuple(sorted(found))


def _pack(source: Path) -> bytes:
    def check(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        if not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()):
            raise UsageError(f"{source / entry.name} is neither a file, a folder nor a link")
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.GNU_FORMAT, compresslevel=_LEVEL) as archive:
        for path in sorted(source.iterdir()):
            archive.add(path, arcname=path.name, filter=check)
    return buffer.getvalue()
