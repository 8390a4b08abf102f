"""The one door to the official SDK: is it there and new enough, and what do its errors mean."""

from __future__ import annotations

import importlib.metadata
import json
import re
from typing import TYPE_CHECKING, Any

from rollwright.errors import (
    AmbiguousOutcome,
    ConfigError,
    LimitError,
    PathNotFound,
    ProvisionFailed,
    RateLimited,
    RollwrightError,
    SandboxBroken,
    SandboxGone,
    Transient,
    Unreachable,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from e2b import AsyncSandbox as AsyncSandbox
    from e2b import SandboxInfo as SandboxInfo

_OLDEST = (2, 63)
_NO_END = "Command ended without an end event"
_UNSUPPORTED_BY_SERVER = 501


def load() -> Any:
    """The package `e2b`. Raises `Unsupported`."""
    try:
        check_version(importlib.metadata.version("e2b"))
        import e2b
    except (ImportError, importlib.metadata.PackageNotFoundError) as e:
        raise Unsupported("the E2B backend needs the official SDK: pip install 'rollwright[e2b]'") from e
    return e2b


def check_version(installed: str) -> None:
    """Raises `Unsupported` for an SDK whose errors and keys are not those this backend was written for."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if numbers < _OLDEST:
        raise Unsupported(
            f"e2b {installed} is installed, and the E2B backend needs 2.63 or newer: older ones cannot ask twice for "
            "one box without making two, and hide how a connection failed. pip install 'e2b>=2.63'",
            installed=installed,
        )


def classify(error: Exception, operation: str, *, box: str | None = None) -> RollwrightError:
    """Our error for one of the SDK's. One that is in no row is an `AmbiguousOutcome` with `details["unclassified"]`."""
    if isinstance(error, RollwrightError):
        return error
    kind, more = _row(error)
    where = {} if box is None else {"box": box}
    return kind(f"{operation}: {str(error) or type(error).__name__}", operation=operation, **where, **more)


def _row(error: Exception) -> tuple[type[RollwrightError], dict[str, Any]]:
    import connectrpc.errors
    import e2b
    import httpx

    rows: list[tuple[tuple[type[Exception], ...], type[RollwrightError], dict[str, Any]]] = [
        ((e2b.AuthenticationException,), ConfigError, {"field": "sandbox.e2b.api_key"}),
        ((e2b.SandboxNotRunningException, e2b.SandboxNotFoundException), SandboxGone, {"reason": "unknown"}),
        ((e2b.RateLimitException,), RateLimited, {}),
        # The SDK promises that nothing was changed.
        ((e2b.ServiceBusyException,), Transient, {"sent": False}),
        # Of every kind: a request's, a command's, and a stream that was cut or a 502 while the box may be well.
        ((e2b.TimeoutException,), Unreachable, {}),
        ((e2b.FileNotFoundException,), PathNotFound, {}),
        ((e2b.NotEnoughSpaceException,), LimitError, {}),
        ((e2b.InvalidArgumentException,), UsageError, {}),
        ((e2b.TemplateException,), ProvisionFailed, {}),
        ((httpx.ConnectError, httpx.ConnectTimeout), Unreachable, {"sent": False}),
        # The connection broke after the request had left.
        ((connectrpc.errors.ConnectError, httpx.TransportError, OSError), AmbiguousOutcome, {}),
        # A reply without its body.
        ((json.JSONDecodeError,), AmbiguousOutcome, {}),
    ]
    for kinds, ours, more in rows:
        if isinstance(error, kinds):
            return ours, dict(more)
    if isinstance(error, e2b.SandboxException):
        return (Transient if _server_failed(error) else SandboxBroken), {}
    if str(error) == _NO_END:
        return AmbiguousOutcome, {}
    return AmbiguousOutcome, {"unclassified": f"{type(error).__module__}.{type(error).__qualname__}"}


def _server_failed(error: Any) -> bool:
    """Whether it stands for a 5xx. Of the control API the SDK keeps the status, of the box's own API only the text."""
    found = re.match(r"(\d{3}): ", str(error))
    status = error.status_code or (int(found[1]) if found else 0)
    return status >= 500 and status != _UNSUPPORTED_BY_SERVER
