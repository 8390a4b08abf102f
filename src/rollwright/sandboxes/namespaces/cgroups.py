"""Memory, process and cpu limits of a box, by cgroup v1 or v2, whichever is there and writable."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import anyio

from rollwright.errors import SandboxBroken

_PREFIX = "rollwright"
_PERIOD = 100_000
"""Microseconds over which cpu time is handed out."""


_SHARE, _MOST_SHARES = 1024, 262144


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where the controllers live. On version 2 all are in the same folder."""

    version: int
    memory: Path | None = None
    pids: Path | None = None
    cpu: Path | None = None

    def groups(self, box: str, *, cpu: bool) -> list[Path]:
        """Where the box's groups are, or would be.

        Being in a group for `cpu` also makes a box one competitor among others, however many processes it has, so a box
        without that limit has none where the controllers are apart.
        """
        folders = {self.memory, self.pids, self.cpu if cpu else None}
        return sorted(folder / box for folder in folders if folder is not None)

    def create(self, box: str, *, memory_mb: int | None, pids: int | None, cpus: float | None) -> None:
        """Make the box's groups and set its limits. Raises `OSError`."""
        for group in self.groups(box, cpu=cpus is not None):
            group.mkdir()
        if memory_mb is not None and self.memory is not None:
            name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (self.memory / box / name).write_text(str(memory_mb << 20))
        if pids is not None and self.pids is not None:
            (self.pids / box / "pids.max").write_text(str(pids))
        if cpus is not None and self.cpu is not None:
            share = max(1000, round(cpus * _PERIOD))
            if self.version == 2:
                (self.cpu / box / "cpu.max").write_text(f"{share} {_PERIOD}")
            else:
                (self.cpu / box / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (self.cpu / box / "cpu.cfs_quota_us").write_text(str(share))
                # Or all our boxes together would compete as one.
                boxes = sum(1 for entry in self.cpu.iterdir() if entry.is_dir())
                (self.cpu / "cpu.shares").write_text(str(min(_SHARE * boxes, _MOST_SHARES)))

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
        if kind == "cgroup2" and (controllers := _usable_v2(Path(target))):
            parent = Path(target) / _PREFIX
            return Hierarchy(version=2, memory=parent, pids=parent, cpu=parent if "cpu" in controllers else None)
        if kind == "cgroup":
            for controller in ("memory", "pids", "cpu"):
                if controller in options.split(","):
                    with contextlib.suppress(OSError):
                        parent = Path(target) / _PREFIX
                        parent.mkdir(exist_ok=True)
                        if os.access(parent, os.W_OK):
                            found[controller] = parent
    return Hierarchy(version=1, **found) if found else None


def _usable_v2(root: Path) -> set[str]:
    """Enable memory, pids and, where there is one, cpu for a group of ours below the root of version 2."""
    try:
        controllers = {"memory", "pids", "cpu"} & set((root / "cgroup.controllers").read_text().split())
        if not {"memory", "pids"} <= controllers:
            return set()
        parent = root / _PREFIX
        enable = " ".join(f"+{controller}" for controller in sorted(controllers))
        (root / "cgroup.subtree_control").write_text(enable)
        parent.mkdir(exist_ok=True)
        (parent / "cgroup.subtree_control").write_text(enable)
    except OSError:
        return set()
    return controllers


def kill(groups: list[Path]) -> None:
    """Kill whatever is still in the groups."""
    for group in groups:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)


async def remove(groups: list[Path], *, seconds: float = 5) -> None:
    """Remove emptied groups; the kernel may need a moment to let go. Raises `SandboxBroken` when it does not."""
    try:
        with anyio.fail_after(seconds):
            for group in groups:
                await _remove(group)
    except TimeoutError as e:
        raise SandboxBroken(f"what is left of a box does not end: one of {', '.join(map(str, groups))}") from e


async def _remove(group: Path) -> None:
    while True:
        try:
            group.rmdir()  # noqa: ASYNC240 - takes no time
        except FileNotFoundError:
            return
        except OSError:
            kill([group])
            await anyio.sleep(0.005)
        else:
            return
