"""The one door to the Docker SDK: its blocking calls in threads, its errors as ours, what may be repeated repeated."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from rollwright.errors import (
    AmbiguousOutcome,
    RateLimited,
    RollwrightError,
    SandboxBroken,
    SandboxError,
    SandboxGone,
    Unreachable,
    Unsupported,
)
from rollwright.sandboxes.retry import Retries, Safety

T = TypeVar("T")

_THREADS = 16
"""Calls under way at the same time. A long poll needs none: its connection is read by the event loop."""
_CALL_SECONDS = 60
_PATIENCE = 20.0
_REMOVAL_SECONDS = 30.0
_BUSY = {502, 503, 504}
_NEVER_SENT = (ConnectionRefusedError, FileNotFoundError, PermissionError, socket.gaierror)


class Conflict(SandboxError):
    """What was asked does not fit the state of the thing: a name is taken, a container does not run."""


class Daemon:
    """One daemon, reached at `url`. Nothing is opened before the first call.

    `call` raises `Unreachable`, `RateLimited`, `AmbiguousOutcome`, `SandboxGone` (no such container), `Conflict`,
    `SandboxBroken` (any other refusal), and `Unsupported` where the SDK is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.retries = Retries("docker", patience=_PATIENCE)
        self.job_retries = Retries("docker jobs")
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._opening = threading.Lock()
        self._sdk: Any = None
        self._http: Any = None
        self._client: Any = None

    async def call(self, operation: str, request: Callable[[Any], T], *, safety: Safety = Safety.SAFE) -> T:
        """Make a request through the SDK's low-level client, which `request` is given in a thread."""

        async def attempt() -> T:
            return await anyio.to_thread.run_sync(self._request, operation, request, limiter=self._threads)

        return await self.retries.call(operation, attempt, safety)

    async def connect(self) -> None:
        """Find out whether there is a daemon, at once and without trying again. Raises as `call`."""

        def ping(api: Any) -> None:
            api.ping()

        await anyio.to_thread.run_sync(self._request, "ping", ping, limiter=self._threads)

    async def inspect(self, container: str) -> Mapping[str, Any]:
        """What the daemon knows of a container, by id or name. Raises `SandboxGone`."""
        return await self.call("inspect", lambda api: api.inspect_container(container))

    async def remove(self, container: str) -> None:
        """Kill and remove a container; one that is not there is fine. Afterwards it is not there."""
        try:
            with anyio.fail_after(_REMOVAL_SECONDS):
                while True:
                    try:
                        return await self.call(
                            "remove", lambda api: api.remove_container(container, v=True, force=True)
                        )
                    except Conflict:
                        # Its removal is already under way.
                        await anyio.sleep(0.05)
        except SandboxGone:
            return
        except TimeoutError as e:
            raise Unreachable(f"the daemon does not get container {container} removed", box=container) from e

    async def attach(
        self, container: str, argv: list[str], *, user: str, env: Mapping[str, str]
    ) -> tuple[str, socket.socket]:
        """Start a command with its three streams on a connection of its own. Returns the exec's id and the socket.

        Safe to repeat only because `argv` does nothing before it is told to on its stdin.
        """

        def request(api: Any) -> tuple[str, socket.socket]:
            exec_id: str = api.exec_create(container, argv, stdin=True, user=user, environment=dict(env))["Id"]
            stream = api.exec_start(exec_id, socket=True)
            try:
                own = socket.socket(fileno=os.dup(stream.fileno()))
            finally:
                _release(stream)
            own.setblocking(False)
            return exec_id, own

        return await self.call("exec", request)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await anyio.to_thread.run_sync(client.close)

    # ------------------------------------------------------------------ in a thread

    def _request(self, operation: str, request: Callable[[Any], T]) -> T:
        client = self._opened(operation)
        try:
            self._knock()
            return request(client)
        except Exception as error:  # whatever the SDK raises ends here, and leaves as an error of ours
            raise self._classified(error, operation) from error

    def _opened(self, operation: str) -> Any:
        with self._opening:
            if self._client is None:
                self._load()
                try:
                    self._knock()
                    self._client = self._sdk.APIClient(
                        base_url=self.url, version="auto", timeout=_CALL_SECONDS, max_pool_size=_THREADS
                    )
                except Exception as error:
                    if isinstance(error, self._sdk.errors.InvalidVersion):
                        raise Unsupported(f"the daemon at {self.url} is too old for the docker SDK: {error}") from error
                    raise Unreachable(
                        f"no Docker daemon answers at {self.url}: {error}", operation=operation, sent=False
                    ) from error
            return self._client

    def _knock(self) -> None:
        """Be refused before the SDK is, which would leave an open socket to the garbage collector each time."""
        path = self.url.removeprefix("unix://")
        if path != self.url:
            with socket.socket(socket.AF_UNIX) as knock:
                knock.settimeout(_CALL_SECONDS)
                knock.connect(path)

    def _load(self) -> None:
        try:
            self._sdk = importlib.import_module("docker")
            self._http = importlib.import_module("requests").exceptions
        except ImportError as e:
            raise Unsupported("the docker backend needs the docker SDK: pip install 'rollwright[docker]'") from e

    def _classified(self, error: Exception, operation: str) -> RollwrightError:
        if isinstance(error, RollwrightError):
            return error
        if isinstance(error, self._sdk.errors.APIError):
            return _of_answer(error, operation)
        text = f"docker {operation}: {error}"
        if isinstance(error, self._http.ConnectTimeout) or any(
            isinstance(e, _NEVER_SENT) for e in (error, *_roots(error))
        ):
            return Unreachable(text, operation=operation, sent=False)
        if isinstance(error, (self._http.RequestException, OSError)):
            return AmbiguousOutcome(text, operation=operation)
        return AmbiguousOutcome(text, operation=operation, unclassified=type(error).__name__)


def _of_answer(error: Any, operation: str) -> RollwrightError:
    status = int(error.status_code or 0)
    text = f"docker {operation}: {error.explanation or error}"
    details: dict[str, Any] = {"operation": operation, "status": status}
    if status == 404:
        return SandboxGone(text, reason="unknown", **details)
    if status == 409:
        return Conflict(text, **details)
    if status == 429:
        asked = str(error.response.headers.get("Retry-After", ""))
        return RateLimited(text, retry_after=float(asked) if asked.isdecimal() else None, **details)
    return Unreachable(text, **details) if status in _BUSY else SandboxBroken(text, **details)


def _roots(error: BaseException) -> Iterator[BaseException]:
    """The errors an HTTP error was made from: the HTTP packages put them among the arguments."""
    for inner in (error.__cause__, error.__context__, *error.args):
        if isinstance(inner, BaseException):
            yield inner
            yield from _roots(inner)


def _release(stream: Any) -> None:
    """Let the SDK's objects go; the connection stays open by our own descriptor.

    The SDK keeps the response, which owns the connection, as this attribute of the stream, and closes neither.
    """
    stream._response.close()
    stream.close()
