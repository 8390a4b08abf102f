"""Memory and process limits of a box, by cgroup v1 or v2, whichever is there and writable."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import anyio

_PREFIX = "rollwright"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where the controllers live. `memory` and `pids` are the same folder on version 2."""

    version: int
    memory: Path | None = None
    pids: Path | None = None

    def groups(self, box: str) -> list[Path]:
        """Where the box's groups are, or would be."""
        return sorted({folder / box for folder in (self.memory, self.pids) if folder is not None})

    def create(self, box: str, *, memory_mb: int | None, pids: int | None) -> None:
        """Make the box's groups and set its limits. Raises `OSError`."""
        for group in self.groups(box):
            group.mkdir()
        if memory_mb is not None and self.memory is not None:
            name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (self.memory / box / name).write_text(str(memory_mb << 20))
        if pids is not None and self.pids is not None:
            (self.pids / box / "pids.max").write_text(str(pids))

    def oom_file(self, box: str) -> Path | None:
        """The file that counts the box's out-of-memory kills, in lines like `oom_kill 1`."""
        if self.memory is None:
            return None
        return self.memory / box / ("memory.events" if self.version == 2 else "memory.oom_control")


def find(mounts: str | None = None) -> Hierarchy | None:
    """Look for usable controllers and prepare our parent group. None: no limits can be set here."""
    table = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    found: dict[str, Path] = {}
    for line in table.splitlines():
        _, target, kind, options, *_ = line.split(" ")
        if kind == "cgroup2" and _usable_v2(Path(target)):
            parent = Path(target) / _PREFIX
            return Hierarchy(version=2, memory=parent, pids=parent)
        if kind == "cgroup":
            for controller in ("memory", "pids"):
                if controller in options.split(","):
                    with contextlib.suppress(OSError):
                        parent = Path(target) / _PREFIX
                        parent.mkdir(exist_ok=True)
                        if os.access(parent, os.W_OK):
                            found[controller] = parent
    return Hierarchy(version=1, memory=found.get("memory"), pids=found.get("pids")) if found else None


def _usable_v2(root: Path) -> bool:
    """Enable memory and pids for a group of ours below the root of version 2."""
    try:
        if not {"memory", "pids"} <= set((root / "cgroup.controllers").read_text().split()):
            return False
        parent = root / _PREFIX
        (root / "cgroup.subtree_control").write_text("+memory +pids")
        parent.mkdir(exist_ok=True)
        (parent / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return False
    return True


def kill(groups: list[Path]) -> None:
    """Kill whatever is still in the groups."""
    for group in groups:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)


async def remove(groups: list[Path]) -> None:
    """Remove emptied groups; the kernel may need a moment to let go. Raises `TimeoutError` after 5 seconds."""
    with anyio.fail_after(5):
        for group in groups:
            while True:
                try:
                    group.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    kill([group])
                    await anyio.sleep(0.005)
                else:
                    break
