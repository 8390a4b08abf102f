"""What a session needs to outlive its process and no trainer may read: a 0600 file beside the turn log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollwright.dialects.jsonio import dumps, loads
from rollwright.errors import StoreError
from rollwright.gateway.limits import SessionLimits
from rollwright.types import SCHEMA

__all__ = ["SessionKey", "forget_key", "keyed_logs", "read_key", "write_key"]

_SUFFIX = ".key"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """How a session is known, and when it ends."""

    secret: str
    """The CLI's API key."""
    routing: str
    """The engine's session key."""
    opened: float
    """Seconds since the epoch."""
    limits: SessionLimits


def write_key(log: Path, key: SessionKey) -> None:
    """Beside `log`, readable by its owner only. Raises `StoreError`; never overwrites."""
    path = _beside(log)
    try:
        # The mode is set before there is anything to read.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(dumps({"schema": SCHEMA, **asdict(key)}))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"the session key {path} cannot be written: {error.strerror}", path=str(path)) from error


def read_key(log: Path) -> SessionKey:
    """The key of the session that wrote `log`. Raises `StoreError`."""
    path = _beside(log)
    try:
        record: dict[str, Any] = loads(path.read_bytes())
        if record.pop("schema") != SCHEMA:
            raise ValueError("unknown schema")
        limits = SessionLimits(**record.pop("limits"))
        return SessionKey(limits=limits, **record)
    except OSError as error:
        raise StoreError(f"the session key {path} cannot be read: {error.strerror}", path=str(path)) from error
    except (ValueError, LookupError, TypeError) as error:
        raise StoreError(f"the session key {path} is damaged: {error}", path=str(path)) from error


def forget_key(log: Path) -> None:
    """The session is over. Raises `StoreError`."""
    path = _beside(log)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"the session key {path} cannot be removed: {error.strerror}", path=str(path)) from error


def keyed_logs(folder: Path) -> Iterator[Path]:
    """Every turn log below `folder` whose session was open when its process ended."""
    for path in sorted(folder.rglob(f"*{_SUFFIX}")):
        log = path.with_name(path.name.removesuffix(_SUFFIX))
        if log.is_file():
            yield log


def _beside(log: Path) -> Path:
    return log.with_name(log.name + _SUFFIX)
