"""One box: a container, as the orchestrator holds it."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from rollwright.errors import (
    AmbiguousOutcome,
    LimitError,
    PathNotFound,
    RollwrightError,
    SandboxBroken,
    SandboxError,
    UsageError,
)
from rollwright.sandboxes import ExecResult, JobResult, JobSpec
from rollwright.sandboxes.docker.command import guest_script
from rollwright.sandboxes.docker.container import Container, User
from rollwright.sandboxes.docker.daemon import Conflict
from rollwright.sandboxes.jobs import DurableJob, Jobs
from rollwright.sandboxes.namespaces.registry import Registry, now
from rollwright.sandboxes.retry import Safety

_FILE_LIMIT = 256 << 20
_PLUMBING_SECONDS = 30.0
_BYTES_A_SECOND = 1 << 20
"""The slowest way for a file that we wait for."""


class DockerSandbox:
    """A `Sandbox`. Made by `DockerProvider.create` and `attach`."""

    def __init__(
        self,
        container: Container,
        *,
        users: Mapping[str, User],
        reaper: str | None,
        gateway: socket.socket | None,
        registry: Registry,
        disk_mb: int,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self._container = container
        self._users = users
        self._reaper = reaper
        self._gateway = gateway
        self._registry = registry
        self._disk_mb = disk_mb
        self._release = release
        self._closing = anyio.Lock()
        self._jobs = Jobs(self, launch=self._launch, retries=container.daemon.job_retries)

    @property
    def id(self) -> str:
        return self._container.id

    @property
    def gateway_socket(self) -> socket.socket | None:
        return self._gateway

    # ------------------------------------------------------------------ commands

    async def start(self, spec: JobSpec) -> DurableJob:
        return await self._jobs.start(spec)

    async def run(self, spec: JobSpec) -> JobResult:
        return await self._jobs.run(spec)

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        """At most once. A command that cannot be started ends with 126 or 127 and says so on stderr, as from a shell.

        Raises `AmbiguousOutcome` when the daemon is lost while the command may run.
        """
        await self._stay(seconds)
        return await self._container.run(argv, user=self._user(user), cwd=cwd, input=input, seconds=seconds)

    async def _launch(self, argv: Sequence[str], *, input: bytes, seconds: float) -> ExecResult:
        await self._stay(seconds)
        env = {} if self._reaper is None else {"ROLLWRIGHT_REAPER": self._reaper}
        return await self._container.run(argv, user=self._user("root"), input=input, seconds=seconds, env=env)

    def _user(self, name: str) -> User:
        if name not in self._users:
            raise UsageError(f"a box has the users {', '.join(self._users)}, not {name!r}")
        return self._users[name]

    # ------------------------------------------------------------------ files

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None:
        """Write a file atomically, making parent folders. Raises `LimitError` when it does not fit."""
        if len(data) > self._disk_mb << 20:
            raise LimitError(f"{path} does not fit into box {self.id}", box=self.id, path=path)

        async def attempt() -> None:
            arguments = [_absolute(path), str(len(data)), f"{mode:o}", secrets.token_hex(8)]
            await self._stay(_PLUMBING_SECONDS + len(data) / _BYTES_A_SECOND)
            result = await self._script("put", arguments, user=user, input=data, size=len(data))
            _check(result, _PUT_ERRORS, self.id, path)

        await self._container.daemon.retries.call("put", attempt, Safety.SAFE)

    async def put_tree(self, source: Path, target: str, *, user: str = "root") -> None:
        """Copy a host folder in, links and modes kept. Raises `UsageError` for devices and sockets."""
        who = self._user(user)
        make = ["sh", "-c", 'mkdir -p "$1" && [ -w "$1" ]', "sh", _absolute(target)]
        made = await self.exec(make, user=user)
        if made.exit_code:
            raise UsageError(f"{user} cannot make or write {target} in box {self.id}", box=self.id, path=target)
        with tempfile.TemporaryFile() as archive:
            await anyio.to_thread.run_sync(_pack, source, archive, who)
            await self._stay(_PLUMBING_SECONDS + archive.tell() / _BYTES_A_SECOND)

            def request(api: Any) -> None:
                archive.seek(0)
                api.put_archive(self.id, target, archive)

            try:
                await self._container.daemon.call("put tree", request)
            except (Conflict, SandboxBroken) as e:
                await self._container.check_alive()
                raise LimitError(f"cannot unpack {source} in box {self.id}: {e.message}", box=self.id) from e

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        async def attempt() -> bytes:
            arguments = [_absolute(path), str(offset), "-" if limit is None else str(limit), str(_FILE_LIMIT)]
            await self._stay(_PLUMBING_SECONDS)
            result = await self._script("get", arguments, size=_FILE_LIMIT if limit is None else limit)
            _check(result, _GET_ERRORS, self.id, path)
            return result.stdout

        return await self._container.daemon.retries.call("get", attempt, Safety.SAFE)

    async def _script(
        self, name: str, arguments: list[str], *, user: str = "root", input: bytes = b"", size: int
    ) -> ExecResult:
        """Run a script of ours that may be run again. `size` is what it moves."""
        argv = ["sh", "-c", guest_script(name), "rollwright", *arguments]
        seconds = _PLUMBING_SECONDS + size / _BYTES_A_SECOND
        return await self._container.run(argv, user=self._user(user), input=input, seconds=seconds, most=_FILE_LIMIT)

    # ------------------------------------------------------------------ life

    async def renew(self, seconds: float) -> None:
        self._container.lease.renew(seconds, now=now())
        await self._extend()

    async def _extend(self, busy: float = 0) -> None:
        lease = self._container.lease

        async def attempt() -> None:
            asked = now()
            seconds = math.ceil(lease.amount(asked, busy))
            result = await self._script("renew", [str(seconds)], size=0)
            if result.exit_code:
                raise SandboxBroken(f"box {self.id} does not take a lease: {result.stderr!r}", box=self.id)
            lease.given(seconds, now=asked)

        await self._container.daemon.retries.call("renew", attempt, Safety.SAFE)
        self._registry.renew(self.id, lease.until)

    async def _stay(self, busy: float) -> None:
        """Where the box is given little at a time, ask for more before something that may take `busy` seconds."""
        if self._container.lease.due(now(), busy):
            # If it is gone, what comes now will tell.
            with contextlib.suppress(SandboxError):
                await self._extend(busy)

    async def check_alive(self) -> None:
        """Raises `SandboxGone` with the reason, as far as the daemon knows it."""
        await self._container.check_alive()

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._closing:
                if self._container.removed:
                    return
                if self._gateway is not None:
                    self._gateway.close()
                await self._container.remove()
                await self._release()


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path or path.endswith("/"):
        raise UsageError(f"not an absolute path of a file: {path!r}")
    return path


_PUT_ERRORS: Mapping[int, type[RollwrightError]] = {
    11: UsageError,
    12: UsageError,
    13: UsageError,
    14: AmbiguousOutcome,
    15: LimitError,
}
_GET_ERRORS: Mapping[int, type[RollwrightError]] = {11: PathNotFound, 12: UsageError, 13: LimitError}
"""What `guest/put.sh` and `guest/get.sh` end with."""


def _check(result: ExecResult, errors: Mapping[int, type[RollwrightError]], box: str, path: str) -> None:
    if result.exit_code == 0:
        return
    said = result.stderr[:300].decode(errors="replace").strip()
    kind = errors.get(result.exit_code, SandboxBroken)
    raise kind(f"box {box}: {path}: {said or 'exit ' + str(result.exit_code)}", box=box, path=path)


def _pack(source: Path, archive: Any, owner: User) -> None:
    """The folder's content as a tar archive whose members are `owner`'s."""
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder")

    def member(info: tarfile.TarInfo) -> tarfile.TarInfo:
        if not (info.isfile() or info.isdir() or info.issym() or info.islnk()):
            raise UsageError(f"{source}: {info.name} is neither a file, a folder nor a link")
        info.uid, info.gid, info.uname, info.gname = owner.uid, owner.gid, "", ""
        return info

    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in sorted(source.iterdir()):
            tar.add(entry, arcname=entry.name, filter=member)
