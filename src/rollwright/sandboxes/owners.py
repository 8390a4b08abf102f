"""Which process a box belongs to: the one that made it, or the one that has taken it over since.

Backends keep the labels of a box as they were given, so they tell of its maker only. Who came after is in a file here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from rollwright.errors import StoreError, Unsupported, UsageError
from rollwright.sandboxes.namespaces.registry import Process, boot_id

__all__ = ["Holders", "Owner"]

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process of a machine."""

    host: str
    boot: str
    process: Process

    @staticmethod
    def myself() -> Owner:
        """Raises `Unsupported`."""
        process = Process.of(os.getpid())
        if process is None:
            raise Unsupported("/proc does not show this process; mount it")
        return Owner(host=socket.gethostname(), boot=boot_id(), process=process)

    @staticmethod
    def parse(text: str) -> Owner | None:
        """What `str` made of one. None: it is something else."""
        try:
            host, boot, pid, started = text.split(" ")
            return Owner(host=host, boot=boot, process=Process(pid=int(pid), started=int(started)))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.host} {self.boot} {self.process.pid} {self.process.started}"

    @property
    def alive(self) -> bool:
        """Of this machine we know it, of others we believe it."""
        if self.host != socket.gethostname():
            return True
        return self.boot == boot_id() and self.process.alive


class Holders:
    """Who has taken boxes over: one file a box under `folder`, which all processes of this installation share.

    Everything here blocks for a moment, and raises `StoreError`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> Mapping[str, Owner]:
        """Box → who took it over last."""
        found: dict[str, Owner] = {}
        with self._failing():
            for path in self._folder.glob("*.json") if self._folder.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):
                    box, owner = self._read(path)
                    found[box] = owner
        return found

    def take(self, box: str, *, maker: Owner | None) -> None:
        """This process has the box from now on. Raises `UsageError` when another one that lives has it."""
        with self._locked():
            try:
                _, owner = self._read(self._path(box))
            except FileNotFoundError:
                owner = maker
            if owner is None:
                raise UsageError(f"box {box} is in use by somebody whom its labels do not name", box=box)
            if owner.alive:
                where = "" if owner.host == socket.gethostname() else f" of {owner.host}, as far as is known here"
                raise UsageError(f"box {box} is in use by process {owner.process.pid}{where}", box=box)
            self._write(box, Owner.myself())

    def drop(self, box: str) -> None:
        """The box is no more, or was not taken over after all."""
        with self._failing():
            self._path(box).unlink(missing_ok=True)

    def drop_dead(self, living: Collection[str]) -> None:
        """Forget who held boxes that are not among the living, unless the holder itself lives: its box may be newer
        than that list."""
        for box, owner in self.all().items():
            if box not in living and not owner.alive:
                self.drop(box)

    def _path(self, box: str) -> Path:
        # A backend chose the id, so it is no name for a file.
        return self._folder / f"{hashlib.sha256(box.encode()).hexdigest()[:32]}.json"

    def _read(self, path: Path) -> tuple[str, Owner]:
        try:
            data = orjson.loads(path.read_bytes())
            owner = Owner.parse(data["owner"])
            if data["schema"] != _SCHEMA or owner is None:
                raise ValueError
            return str(data["box"]), owner
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise StoreError(f"{path} does not tell who holds a box; remove it", path=str(path)) from e

    def _write(self, box: str, owner: Owner) -> None:
        data = orjson.dumps({"schema": _SCHEMA, "box": box, "owner": str(owner)})
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as fresh:
            fresh.write(data)
            fresh.flush()
            os.fsync(fresh.fileno())  # an empty file after a power cut would stop every start until somebody looks
        Path(fresh.name).rename(self._path(box))

    @contextmanager
    def _locked(self) -> Generator[None]:
        """One process at a time looks who holds a box and takes it."""
        with self._failing():
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield

    @contextmanager
    def _failing(self) -> Generator[None]:
        try:
            yield
        except OSError as e:
            raise StoreError(f"cannot keep who holds which box in {self._folder}: {e}", path=str(self._folder)) from e
