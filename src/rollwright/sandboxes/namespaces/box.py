"""One box, as the orchestrator holds it."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import orjson

from rollwright.errors import (
    LimitError,
    PathNotFound,
    RollwrightError,
    SandboxBroken,
    SandboxGone,
    Unreachable,
    UsageError,
)
from rollwright.sandboxes import ExecResult, JobResult, JobSpec
from rollwright.sandboxes.jobs import DurableJob, Jobs
from rollwright.sandboxes.namespaces import channel, registry
from rollwright.sandboxes.namespaces.client import Connection, receive
from rollwright.sandboxes.namespaces.images import User
from rollwright.sandboxes.retry import Retries

T = TypeVar("T")

_FILE_LIMIT = 256 << 20
_EXEC_LIMIT = 64 << 20
"""Bytes of stdout, and of stderr, of one `exec`."""
_IN_THREAD = 1 << 20
"""File operations from this size on leave the event loop alone."""
_ERRORS: Mapping[str, type[RollwrightError]] = {
    "ENOENT": PathNotFound,
    "ENOTDIR": PathNotFound,
    "ENOSPC": LimitError,
    "EDQUOT": LimitError,
    "EFBIG": LimitError,
    "EACCES": UsageError,
    "EPERM": UsageError,
    "EROFS": UsageError,
    "EISDIR": UsageError,
    "EEXIST": UsageError,
    "ELOOP": UsageError,
    "ENXIO": UsageError,
    "ENAMETOOLONG": UsageError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What every request about a box must say."""

    users: Mapping[str, User]
    env: Mapping[str, str]
    """The image's and the spec's, on top of a user's own."""
    network: str
    single: bool
    """One uid only exists inside."""
    cgroups: Sequence[Path]

    def user(self, name: str) -> User:
        if name not in self.users:
            raise UsageError(f"a box has the users {', '.join(self.users)}, not {name!r}")
        return self.users[name]

    def dump(self) -> dict[str, Any]:
        """JSON-able, and `load` gives an equal object back."""
        return {
            "users": {name: asdict(user) for name, user in self.users.items()},
            "env": dict(self.env),
            "network": self.network,
            "single": self.single,
            "cgroups": [str(group) for group in self.cgroups],
        }

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Inside:
        return cls(
            users={name: User(**user) for name, user in data["users"].items()},
            env=data["env"],
            network=data["network"],
            single=data["single"],
            cgroups=[Path(group) for group in data["cgroups"]],
        )

    def fields(self, name: str) -> dict[str, Any]:
        everyone = {
            user.name: {"uid": user.uid, "gid": user.gid, "env": user.env() | dict(self.env)}
            for user in self.users.values()
        }
        return {
            "user": everyone[self.user(name).name],
            "users": everyone,
            "network": self.network,
            "single": self.single,
            "cgroups": [str(group / "cgroup.procs") for group in self.cgroups],
        }


class NamespacesSandbox:
    """A `Sandbox`. Made by `NamespacesProvider.create`."""

    def __init__(
        self,
        *,
        id: str,
        server: Connection,
        pidfd: int,
        gateway: socket.socket | None,
        inside: Inside,
        store: registry.Registry,
        lease_until: float,
        release: Callable[[], Awaitable[None]],
        retries: Retries,
    ) -> None:
        self._id = id
        self._server = server
        self._pidfd = pidfd
        self._gateway = gateway
        self._inside = inside
        self._store = store
        self._lease_until = lease_until
        self._release = release
        self._closing = anyio.Lock()
        self._jobs = Jobs(self, launch=self._launch, retries=retries)

    @property
    def id(self) -> str:
        return self._id

    @property
    def gateway_socket(self) -> socket.socket | None:
        return self._gateway

    @property
    def dead(self) -> bool:
        """Whether its init has ended, by `close` or by itself."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    # ------------------------------------------------------------------ jobs

    async def start(self, spec: JobSpec) -> DurableJob:
        return await self._jobs.start(spec)

    async def run(self, spec: JobSpec) -> JobResult:
        return await self._jobs.run(spec)

    async def _launch(self, argv: Sequence[str], *, input: bytes, seconds: float) -> ExecResult:
        return await self._exec(argv, user="root", cwd="/", input=input, seconds=seconds, cell=True)

    # ------------------------------------------------------------------ commands

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        """A command that cannot be started ends with 126 or 127 and says so on stderr, as from a shell."""
        return await self._exec(argv, user=user, cwd=cwd, input=input, seconds=seconds, cell=False)

    async def _exec(
        self, argv: Sequence[str], *, user: str, cwd: str, input: bytes, seconds: float, cell: bool
    ) -> ExecResult:
        request = self._command(argv, user, cwd, {}, cell=cell)
        answer: tuple[dict[str, Any], list[int]] | None = None
        with contextlib.ExitStack() as stack:
            out, err = _Output(stack), _Output(stack)
            with contextlib.ExitStack() as theirs:
                stdin = _input(theirs, input)
                fds = (stdin, out.take_write_end(theirs), err.take_write_end(theirs))
                reply = stack.enter_context(await self._request(request, fds))
            try:
                with anyio.fail_after(seconds):
                    async with anyio.create_task_group() as readers:
                        for output in (out, err):
                            readers.start_soon(output.read, readers.cancel_scope)
                        answer = await receive(reply)
                        readers.cancel_scope.cancel()
            except TimeoutError as e:
                raise Unreachable(f"{argv[0]} in box {self._id} took longer than {seconds} s", box=self._id) from e
            if out.overflown or err.overflown:
                raise LimitError(f"{argv[0]} wrote more than {_EXEC_LIMIT} bytes", box=self._id)
            message, _ = self._checked(answer, None)
            out.read_rest()
            err.read_rest()
            return ExecResult(exit_code=message["exit"], stdout=bytes(out.data), stderr=bytes(err.data))

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> Spawned:
        """Start a command on descriptors of the caller's, who may close them at once. `env` is on top of the box's."""
        request = self._command(argv, user, cwd, env or {}, cell=False)
        return Spawned(self, await self._request(request, (stdin, stdout, stderr)))

    def _command(
        self, argv: Sequence[str], user: str, cwd: str, env: Mapping[str, str], *, cell: bool
    ) -> dict[str, Any]:
        if not argv or any("\0" in text for text in (*argv, cwd, *env, *env.values())):
            raise UsageError("a command needs an argv without NUL bytes")
        fields = self._inside.fields(user)
        request = {"op": "exec", "box": self._id, "argv": list(argv), "cwd": cwd, "cell": cell, **fields}
        return request | {"env": fields["user"]["env"] | dict(env)}

    async def exit_of(self, reply: socket.socket) -> int:
        """For `Spawned`."""
        message, _ = await self._answer(reply, None)
        return message["exit"]

    # ------------------------------------------------------------------ files

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None:
        """Write a file atomically, making parent folders. Raises `LimitError` when the box is full."""
        request = {"op": "write", "path": _absolute(path), "mode": mode, "nonce": secrets.token_hex(8)}
        with await self._request(request | {"box": self._id} | self._inside.fields(user), ()) as reply:
            _, fds = await self._answer(reply, path)
            try:
                await _maybe_in_thread(len(data), lambda: _write_all(fds[0], data))
            except OSError as e:
                raise LimitError(f"{path} does not fit into box {self._id}: {e}", box=self._id, path=path) from e
            finally:
                os.close(fds[0])
            await self._commit(reply, path, ())

    async def put_tree(self, source: Path, target: str, *, user: str = "root") -> None:
        """Copy a host folder in, links and modes kept. Raises `UsageError` for devices and sockets."""
        request = {"op": "unpack", "path": _absolute(target), "box": self._id}
        fd = await anyio.to_thread.run_sync(_pack, source)
        try:
            with await self._request(request | self._inside.fields(user), ()) as reply:
                await self._answer(reply, target)
                await self._commit(reply, target, (fd,))
        finally:
            os.close(fd)

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        request = {"op": "open", "path": _absolute(path), "box": self._id}
        with await self._request(request | self._inside.fields("root"), ()) as reply:
            _, fds = await self._answer(reply, path)
        try:
            wanted = max(0, os.fstat(fds[0]).st_size - offset) if limit is None else limit
            if wanted > _FILE_LIMIT:
                raise LimitError(f"{path} has more than {_FILE_LIMIT} bytes", box=self._id, path=path)
            return await _maybe_in_thread(wanted, lambda: _read_all(fds[0], offset, wanted))
        except OSError as e:
            raise SandboxBroken(f"cannot read {path} in box {self._id}: {e}", box=self._id, path=path) from e
        finally:
            os.close(fds[0])

    # ------------------------------------------------------------------ life

    async def renew(self, seconds: float) -> None:
        until = registry.now() + seconds
        with await self._request({"op": "renew", "box": self._id, "expires": until}, ()) as reply:
            await self._answer(reply, None)
        self._lease_until = until
        self._store.renew(self._id, until)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._closing:
                if self._pidfd < 0:
                    return
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                # The init's end comes after that of everything in the box.
                await anyio.wait_readable(self._pidfd)
                os.close(self._pidfd)
                self._pidfd = -1
                if self._gateway is not None:
                    self._gateway.close()
                await self._release()

    # ------------------------------------------------------------------ requests

    def _gone(self) -> SandboxGone:
        reason = "unknown"
        if self._pidfd < 0:
            reason = "killed"
        elif registry.now() >= self._lease_until:
            reason = "expired"
        return SandboxGone(f"box {self._id} is gone ({reason})", box=self._id, reason=reason)

    async def _request(self, request: dict[str, Any], fds: tuple[int, ...]) -> socket.socket:
        if self._pidfd < 0:
            raise self._gone()
        return await self._server.request(request, fds)

    async def _answer(self, reply: socket.socket, path: str | None) -> tuple[dict[str, Any], list[int]]:
        return self._checked(await receive(reply), path)

    def _checked(
        self, answer: tuple[dict[str, Any], list[int]] | None, path: str | None
    ) -> tuple[dict[str, Any], list[int]]:
        if answer is None:
            raise self._gone()
        message, fds = answer
        if "gone" in message or message.get("error") == "ESRCH":
            raise self._gone()
        if "error" in message:
            kind = SandboxBroken if path is None else _ERRORS.get(message["error"], SandboxBroken)
            raise kind(f"box {self._id}: {message['text']}", box=self._id, path=path)
        return message, fds

    async def _commit(self, reply: socket.socket, path: str, fds: tuple[int, ...]) -> None:
        try:
            channel.send(reply, {"go": True}, fds)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise self._gone() from e
        await self._answer(reply, path)


class Spawned:
    """A command that `NamespacesSandbox.spawn` started."""

    def __init__(self, box: NamespacesSandbox, reply: socket.socket) -> None:
        self._box = box
        self._reply = reply

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it. Once only. Raises `SandboxGone`."""
        return await self._box.exit_of(self._reply)

    def close(self) -> None:
        """Let go of it; what still runs of its process group is killed."""
        self._reply.close()


class _Output:
    """The host's end of a pipe that a command writes."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        stack.callback(os.close, self._read_end)
        self.data = bytearray()
        self.overflown = False

    def take_write_end(self, stack: contextlib.ExitStack) -> int:
        stack.callback(os.close, self._write_end)
        return self._write_end

    async def read(self, scope: anyio.CancelScope) -> None:
        """Collect until the end. Too much gives the whole command up."""
        while True:
            await anyio.wait_readable(self._read_end)
            if not self._read_some():
                return
            if self.overflown:
                scope.cancel()

    def _read_some(self) -> bool:
        try:
            chunk = os.read(self._read_end, 1 << 16)
        except BlockingIOError:
            return True
        self.data += chunk
        self.overflown = len(self.data) > _EXEC_LIMIT
        return bool(chunk)

    def read_rest(self) -> None:
        """What the pipe still holds. A background process may keep it open, so its end is not waited for."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                chunk = os.read(self._read_end, 1 << 16)
                if not chunk:
                    return
                self.data += chunk


def _input(stack: contextlib.ExitStack, data: bytes) -> int:
    if data:
        fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
        _write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path or path.endswith("/"):
        raise UsageError(f"not an absolute path of a file: {path!r}")
    return path


async def _maybe_in_thread(size: int, work: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(work) if size >= _IN_THREAD else work()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, offset: int, limit: int) -> bytes:
    data = os.pread(fd, limit, offset)
    while len(data) < limit and (more := os.pread(fd, limit - len(data), offset + len(data))):
        data += more
    return data


def _pack(source: Path) -> int:
    """The tree as a memory file of records for `enter`. Returns its descriptor, closed by the caller."""
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder")
    fd = os.memfd_create("tree", os.MFD_CLOEXEC)
    try:
        _pack_folder(fd, source, "")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _pack_folder(fd: int, folder: Path, prefix: str) -> None:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            path = prefix + entry.name
            status = entry.stat(follow_symlinks=False)
            mode = stat.S_IMODE(status.st_mode)
            if entry.is_symlink():
                _write_all(fd, _record(path, "link", to=str(Path(entry.path).readlink())))
            elif entry.is_dir():
                _write_all(fd, _record(path, "folder", mode=mode))
                _pack_folder(fd, Path(entry.path), path + "/")
            elif entry.is_file():
                with Path(entry.path).open("rb") as f:
                    data = f.read()
                _write_all(fd, _record(path, "file", mode=mode, size=len(data)))
                _write_all(fd, data)
            else:
                raise UsageError(f"{entry.path} is neither a file, a folder nor a link")


def _record(path: str, kind: str, **more: Any) -> bytes:
    return orjson.dumps({"path": path, "kind": kind, **more}) + b"\n"
