"""One box, as the orchestrator holds it: what a guest can be asked, repeated until it is answered."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from rollwright.sandboxes import ExecResult, JobResult, JobSpec
from rollwright.sandboxes.e2b.archives import Archives
from rollwright.sandboxes.e2b.guest import FOLDER, Guest, absolute
from rollwright.sandboxes.jobs import DurableJob, Jobs
from rollwright.sandboxes.retry import Retries, Safety


class E2BSandbox:
    """A `Sandbox`. Made by `E2BProvider.create` and `attach`."""

    def __init__(
        self,
        guest: Guest,
        *,
        retries: Retries,
        archives: Archives,
        release: Callable[[], None],
    ) -> None:
        self._guest = guest
        self._retries = retries
        self._archives = archives
        self._release = release
        self._closing = anyio.Lock()
        self._jobs = Jobs(guest, folder=FOLDER, launch=self._launch, retries=retries)

    @property
    def id(self) -> str:
        return self._guest.id

    @property
    def gateway_socket(self) -> socket.socket | None:
        """None: the box is on another machine. It reaches the gateway at the `gateway_url` of its spec."""
        return None

    async def _launch(self, argv: Sequence[str], *, input: bytes, seconds: float) -> ExecResult:
        """The start of a supervisor, which makes the job a PID namespace where that can be."""
        nested = ("env", "ROLLWRIGHT_NEST=1", *argv) if self._guest.nests else argv
        return await self._guest.exec(nested, input=input, seconds=seconds)

    async def start(self, spec: JobSpec) -> DurableJob:
        return await self._jobs.start(spec)

    async def run(self, spec: JobSpec) -> JobResult:
        return await self._jobs.run(spec)

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        """Claimed by its id in the box, so asking again is safe and gives the same answer."""
        nonce = secrets.token_hex(16)
        ended = await self._retries.call(
            "exec",
            lambda: self._guest.attempt(argv, user=user, cwd=cwd, input=input, seconds=seconds, nonce=nonce),
            Safety.SAFE,
        )
        return ended.result(argv, seconds)

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None:
        """Write a file atomically, making parent folders. Raises `LimitError` when the box is full."""
        nonce = secrets.token_hex(16)
        await self._retries.call(
            "put", lambda: self._guest.put(path, data, user=user, mode=mode, nonce=nonce), Safety.SAFE
        )

    async def put_tree(self, source: Path, target: str, *, user: str = "root") -> None:
        """Copy a host folder in, links and modes kept. Raises `UsageError` for devices and sockets."""
        archive = await self._archives.of(source)
        nonce = secrets.token_hex(16)
        await self._retries.call(
            "put a tree", lambda: self._guest.unpack(absolute(target), archive, user=user, nonce=nonce), Safety.SAFE
        )

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        return await self._retries.call("get", lambda: self._guest.get(path, offset=offset, limit=limit), Safety.SAFE)

    async def renew(self, seconds: float) -> None:
        await self._retries.call("renew", lambda: self._guest.renew(seconds), Safety.SAFE)

    async def close(self) -> None:
        """Raises the last error when the box could not be removed in all the patience; then its lease ends it."""
        with anyio.CancelScope(shield=True):
            async with self._closing:
                if not self._guest.closed:
                    await self._retries.call("remove a box", self._guest.kill, Safety.SAFE)
                    self._release()
