"""The boxes of this machine on disk, so that another process can list them and remove what a dead one left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rollwright.errors import StoreError

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that cannot be taken for a later one of the same number."""

    pid: int
    started: int
    """Field 22 of /proc/PID/stat, in clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this pid now. None: there is none, or it is a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = text[text.rindex(b")") + 2 :].split()
        return None if fields[0] in (b"Z", b"X") else cls(pid=pid, started=int(fields[19]))

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One box. Times are CLOCK_BOOTTIME seconds of the boot named by `boot`."""

    id: str
    key: str
    labels: Mapping[str, str]
    boot: str
    owner: Process
    init: Process | None
    created: float
    lease_until: float
    cgroups: tuple[str, ...]
    survives: float = 0
    """Seconds that it waits to be attached to by another process when its owner is dead."""
    door: str | None = None
    """Where the server that has the box is reached; None for one that dies with the owner."""
    inside: Mapping[str, Any] | None = None
    """What a process needs to know to use the box it did not make."""

    @property
    def running(self) -> bool:
        return self.init is not None and self.init.alive

    @property
    def waits(self) -> bool:
        """Whether its owner is dead and it waits for another."""
        return self.survives > 0 and self.running and not self.owner.alive and self.lease_until > now()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def now() -> float:
    """Seconds since boot, also counting suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Registry:
    """One JSON file for each box under `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, box: str) -> Path:
        """Where the record of a box is. The server of one that survives moves its lease there."""
        return self._folder / f"{box}.json"

    def write(self, record: Record) -> None:
        """Store a record, replacing the box's older one. Raises `StoreError`."""
        path = self.path(record.id)
        temporary = path.with_suffix(f".{os.getpid()}.new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Its environment may hold secrets.
            temporary.touch(mode=0o600)
            temporary.write_bytes(orjson.dumps({"schema": _SCHEMA} | asdict(record)))
            temporary.rename(path)
        except OSError as e:
            raise StoreError(f"cannot write the box registry {path}: {e}", path=str(path)) from e

    def renew(self, box: str, lease_until: float) -> None:
        record = self._read(self.path(box))
        if record is not None:
            self.write(replace(record, lease_until=lease_until))

    def remove(self, box: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path(box).unlink()

    def records(self) -> list[Record]:
        """All records, oldest first. Raises `StoreError` for one that is not ours."""
        found = [self._read(path) for path in self._folder.glob("*.json")] if self._folder.is_dir() else []
        return sorted((r for r in found if r is not None), key=lambda r: r.created)

    def _read(self, path: Path) -> Record | None:
        try:
            data = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as e:
            raise StoreError(f"{path} is not a box record; remove it", path=str(path)) from e
        init = data["init"]
        return Record(
            id=data["id"],
            key=data["key"],
            labels=data["labels"],
            boot=data["boot"],
            owner=Process(**data["owner"]),
            init=None if init is None else Process(**init),
            created=data["created"],
            lease_until=data["lease_until"],
            cgroups=tuple(data["cgroups"]),
            survives=data.get("survives", 0),
            door=data.get("door"),
            inside=data.get("inside"),
        )
