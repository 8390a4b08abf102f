"""What a node hands to the driver: a finished rollout's folder as bytes. Untrusted sizes are bounded by the rollout."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollwright.errors import RollwrightError, StoreError
from rollwright.rollout import RolloutPlan, not_started
from rollwright.store import RolloutDir, RolloutRecord
from rollwright.types import Failure, Sample

__all__ = ["NodeStore", "Parcel", "Withdrawal", "unbegun", "unpack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """Stored rollouts whose verdicts do not hold."""

    names: frozenset[str]
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One finished rollout on its way."""

    record: RolloutRecord
    samples: list[Sample]
    files: bytes
    """Its folder, a tar archive of plain files."""
    withdrawals: Sequence[Withdrawal] = ()
    """All of its node until now, in order: the rollout itself may be in one."""
    versions: Sequence[str] = ()
    """In what order its node knows the engine's weights."""


class NodeStore:
    """A `Store` of a node: it keeps what is finished until the driver has asked for it, and what was withdrawn for
    good, as an answer to the driver may be lost."""

    def __init__(self, work: Path) -> None:
        """`work`: a folder of this node alone, on its own disk."""
        self._work = work
        self._lock = threading.Lock()
        self._parcels: dict[str, Parcel] = {}
        self._withdrawals: list[Withdrawal] = []
        self._infra: Mapping[str, Any] = {}
        self._versions: Sequence[str] = ()

    def held(self, name: str) -> None:
        """Nothing outlives a node."""

    def begin(self, name: str) -> RolloutDir:
        folder = RolloutDir(self._work / name)
        try:
            shutil.rmtree(folder.path, ignore_errors=True)
            folder.path.mkdir(parents=True)
        except OSError as error:
            raise StoreError(f"{folder.path} cannot be made: {error.strerror or error}") from error
        return folder

    def store(self, record: RolloutRecord, folder: RolloutDir, samples: list[Sample]) -> None:
        files = io.BytesIO()
        try:
            folder.held.unlink(missing_ok=True)
            with tarfile.open(fileobj=files, mode="w") as archive:
                for path in sorted(folder.path.iterdir()):
                    archive.add(path, arcname=path.name, recursive=False)
            shutil.rmtree(folder.path)
        except OSError as error:
            raise StoreError(f"{record.rollout} cannot be packed: {error.strerror or error}") from error
        with self._lock:
            self._parcels[record.rollout] = Parcel(record=record, samples=samples, files=files.getvalue())

    def withdraw(self, names: Collection[str], failure: Failure) -> list[RolloutRecord]:
        """Which records that changes, the driver finds out."""
        with self._lock:
            self._withdrawals.append(Withdrawal(names=frozenset(names), failure=failure))
        return []

    def versions(self) -> list[str]:
        """Those of earlier processes are the driver's matter."""
        return []

    def store_versions(self, versions: Sequence[str]) -> None:
        with self._lock:
            self._versions = list(versions)

    def infra(self) -> dict[str, Any]:
        return {}

    def store_infra(self, borne: Mapping[str, Any]) -> None:
        with self._lock:
            self._infra = borne

    def take(self, name: str) -> Parcel:
        """A finished rollout; it is the driver's now."""
        with self._lock:
            parcel = self._parcels.pop(name)
            return replace(parcel, withdrawals=list(self._withdrawals), versions=self._versions)

    def so_far(self) -> tuple[list[Withdrawal], Mapping[str, Any]]:
        """All withdrawals, in order, and what this node has borne with."""
        with self._lock:
            return list(self._withdrawals), self._infra


def unbegun(plan: RolloutPlan, error: RollwrightError) -> Parcel:
    """The end of a rollout that runs on no node. Raises `StoreError`."""
    with tempfile.TemporaryDirectory(prefix="rollwright-unbegun-") as work:
        store = NodeStore(Path(work))
        finished = not_started(plan, store.begin(plan.name), error)
        store.store(finished.record, finished.folder, finished.samples)
        return store.take(plan.name)


def unpack(files: bytes, folder: RolloutDir) -> None:
    """Write a parcel's files into an empty folder. Raises `StoreError`, also for anything but plain files in it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            for member in archive:
                source = archive.extractfile(member) if member.isreg() else None
                if source is None or Path(member.name).name != member.name:
                    raise StoreError(f"a node sent {member.name!r}, which is no plain file of a rollout")
                (folder.path / member.name).write_bytes(source.read())
    except (OSError, tarfile.TarError) as error:
        raise StoreError(f"a node's rollout cannot be unpacked into {folder.path}: {error}") from error
