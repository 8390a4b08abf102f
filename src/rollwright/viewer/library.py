"""Which runs are shown, under which names, and how far each has come."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rollwright.errors import ConfigError, RollwrightError
from rollwright.store import RunDir
from rollwright.viewer.index import RunIndex

__all__ = ["InFlight", "Library", "ShownRun"]

_IN_FLIGHT_SHOWN = 64
_LOOK_SECONDS = 1.0
"""How old the answer to whether a run is going on may be: the kernel's list of locks can take 50 ms to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A rollout that has begun and is not stored yet."""

    rollout: str
    step: str
    turns: int


@dataclass(slots=True)
class ShownRun:
    """One run folder and its index."""

    name: str
    """In URLs: the folder's name, with a number where two are called alike."""
    run: RunDir
    index: RunIndex
    resolved: dict[str, Any]
    problem: str = ""
    """Why `resolved` is empty."""
    _held: bool = False
    _looked: float = -math.inf

    @property
    def planned(self) -> int | None:
        """How many rollouts the run is to have, as far as resolved.json tells."""
        count, limit, attempts = (
            self.setting("tasks.count", top=True),
            self.setting("run.limit"),
            self.setting("run.attempts"),
        )
        if not isinstance(count, int) or not isinstance(attempts, int):
            return None
        return (min(count, limit) if isinstance(limit, int) else count) * attempts

    def setting(self, dotted: str, *, top: bool = False) -> Any:
        """A value of resolved.json's `config` (or of its top), None where there is none."""
        value: Any = self.resolved if top else self.resolved.get("config")
        for part in dotted.split("."):
            if not isinstance(value, dict):
                return None
            value = cast("dict[str, Any]", value).get(part)
        return value

    @property
    def running(self) -> bool:
        """Whether a process holds the folder's lock, as of a second ago. Never takes it: a `resume` may want it."""
        if not self.run.work.is_dir():  # gone when a run is complete
            return False
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._held, self._looked = self._is_held(), now
        return self._held

    def _is_held(self) -> bool:
        try:
            status = (self.run.path / ".lock").stat()
            held = Path("/proc/locks").read_text()
        except OSError:
            return False
        # The device in that list is not the one `stat` tells on btrfs and some overlays; the inode is.
        return any(" FLOCK " in line and f":{status.st_ino} " in line for line in held.splitlines())

    def in_flight(self) -> list[InFlight]:
        """What is in `work/`, by name; at most some dozens."""
        try:
            folders = sorted(entry.name for entry in os.scandir(self.run.work) if entry.is_dir())
        except OSError:
            return []
        return [self._in_flight(name) for name in folders[:_IN_FLIGHT_SHOWN]]

    def _in_flight(self, name: str) -> InFlight:
        folder = self.run.work / name
        if (folder / "grade.json").exists():
            step = "judged"
        elif (folder / "patch.json").exists():
            step = "grading"
        elif (folder / "turns.log").exists():
            step = "agent at work"
        else:
            step = "booting"
        return InFlight(rollout=name, step=step, turns=_turns(folder / "turns.log"))

    def state(self) -> str:
        """Changes whenever a page about this run may look different."""
        parts = [str(self.index.sync()), str(int(self.running))]
        try:
            for entry in sorted(os.scandir(self.run.work), key=lambda entry: entry.name)[:_IN_FLIGHT_SHOWN]:
                parts.append(f"{entry.name}{_size(Path(entry.path) / 'turns.log')}")
        except OSError:
            pass
        return "-".join(parts)


def _turns(path: Path) -> int:
    """Without reading what is in them: there may be dozens of logs of some megabytes."""
    try:
        return path.read_bytes().count(b'\n{"kind":"turn",')
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass(slots=True)
class Library:
    """The runs of a viewer. Thread-safe. `roots`: run folders, or folders of them; looked at again each time."""

    roots: Sequence[Path]
    cache: Path | None
    """Where indexes go; None: memory."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _known: dict[str, ShownRun] = field(default_factory=dict[str, ShownRun])
    _names: dict[Path, str] = field(default_factory=dict[Path, str])

    def check(self) -> None:
        """Raises `ConfigError` when a root is neither."""
        for root in self.roots:
            if not _folders(root):
                raise ConfigError(f"{root} is not a run folder and holds none (a run folder has a resolved.json)")

    def runs(self) -> list[ShownRun]:
        """All runs, in the order of the roots."""
        found: dict[str, ShownRun] = {}
        with self._lock:
            for root in self.roots:
                for path in _folders(root):
                    name = self._name(path)
                    if name not in found:
                        found[name] = self._shown(name, path)
        return list(found.values())

    def run(self, name: str) -> ShownRun | None:
        shown = self._known.get(name)
        if shown is None:
            shown = next((run for run in self.runs() if run.name == name), None)
        if shown is not None and not shown.resolved:
            _resolve(shown)
        return shown

    def close(self) -> None:
        for shown in self._known.values():
            shown.index.close()

    def _name(self, path: Path) -> str:
        place = path.resolve()
        if place not in self._names:
            base = place.name or "run"
            taken = set(self._names.values())
            name, number = base, 1
            while name in taken:
                number += 1
                name = f"{base}-{number}"
            self._names[place] = name
        return self._names[place]

    def _shown(self, name: str, path: Path) -> ShownRun:
        if name not in self._known:
            run = RunDir(path.resolve())
            self._known[name] = ShownRun(name=name, run=run, index=RunIndex(run, cache=self.cache), resolved={})
        shown = self._known[name]
        if not shown.resolved:
            _resolve(shown)
        return shown


def _resolve(shown: ShownRun) -> None:
    try:
        shown.resolved = shown.run.resolved()
        shown.problem = ""
    except RollwrightError as error:
        shown.problem = error.message


def _folders(root: Path) -> list[Path]:
    """The run folders of a root, newest first; a link to one of them (`latest`) is not another one."""
    if (root / "resolved.json").is_file():
        return [root]
    try:
        inside = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    found = [path for path in inside if (path / "resolved.json").is_file()]
    return sorted(found, key=lambda path: (-(path / "resolved.json").stat().st_mtime, path.name))
