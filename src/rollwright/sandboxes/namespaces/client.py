"""The orchestrator's end of the server process: start it, send requests, receive answers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any, Protocol

import anyio

from rollwright.errors import SandboxGone
from rollwright.sandboxes.namespaces import channel, lean


class Connection(Protocol):
    """A way to a server."""

    async def request(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> socket.socket:
        """Send a request. The answer comes on the socket that is returned; closing it gives the request up."""
        ...

    def close(self) -> None: ...


class ServerClient:
    """One server process, started at the first request and again when it was lost.

    With `doors` (a folder) and `survives` (seconds) the server outlives us, and others can reach it at its `door`.
    """

    def __init__(self, *, doors: Path | None = None, survives: float = 0) -> None:
        self._doors = doors
        self._survives = survives
        self._sock: socket.socket | None = None
        self._lock = anyio.Lock()
        self._stop: weakref.finalize[Any, ServerClient] | None = None
        self.door: Path | None = None

    async def request(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> socket.socket:
        ours, theirs = channel.pair()
        ours.setblocking(False)
        try:
            with theirs:
                async with self._lock:
                    await self._send(message, (theirs.fileno(), *fds))
        except BaseException:
            ours.close()
            raise
        return ours

    async def _send(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        while True:
            sock = self._sock or self._start()
            try:
                channel.send(sock, message, fds)
            except BlockingIOError:
                await anyio.wait_writable(sock)
            except (BrokenPipeError, ConnectionResetError):
                # The server is dead and its boxes with it; a new one knows none of them and says so.
                self.close()
            else:
                return

    def _start(self) -> socket.socket:
        ours, theirs = channel.pair()
        ours.setblocking(False)
        settings: dict[str, Any] = {"orchestrator": os.getpid()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            actions: list[Any] = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)]
            if self._doors is not None:
                self.door = self._doors / f"{secrets.token_hex(8)}.sock"
                settings |= {"survives": self._survives, "door": str(self.door), "log": f"{self.door}.log"}
                door = stack.enter_context(_listen(self.door))
                actions.append((os.POSIX_SPAWN_DUP2, door.fileno(), 3))
            argv = lean.command("server", json.dumps(settings))
            pid = os.posix_spawn(sys.executable, argv, {}, file_actions=actions)
        self._sock = ours
        # Also without `close` the server must end with us and must not stay as a zombie. One that outlives us has left
        # another process in its place, which ends at once.
        self._stop = weakref.finalize(self, _hang_up, ours, pid)
        return ours

    def close(self) -> None:
        """End the server and every box of it; one that outlives us ends when it has no more boxes."""
        if self._stop is not None:
            self._stop()
        self._sock = self._stop = None


class Visitor:
    """A connection to the server of another process, through its door."""

    def __init__(self, door: Path) -> None:
        self._door = door
        self._sock: socket.socket | None = None
        self._lock = anyio.Lock()

    async def request(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> socket.socket:
        ours, theirs = channel.pair()
        ours.setblocking(False)
        try:
            with theirs:
                async with self._lock:
                    if self._sock is None:
                        self._sock = _connect(self._door)
                    while True:
                        try:
                            channel.send(self._sock, message, (theirs.fileno(), *fds))
                            return ours
                        except BlockingIOError:
                            await anyio.wait_writable(self._sock)
        except OSError as e:
            ours.close()
            raise SandboxGone(f"the server of this box is dead ({e.strerror})", reason="killed") from e
        except BaseException:
            ours.close()
            raise

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def remove_dead_doors(doors: Path) -> None:
    """Those of servers that were killed."""
    for door in doors.glob("*.sock"):
        try:
            _connect(door).close()
        except (ConnectionRefusedError, FileNotFoundError):
            for path in (door, Path(f"{door}.log")):
                path.unlink(missing_ok=True)


def _listen(door: Path) -> socket.socket:
    door.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(door) as path:
            sock.bind(path)
        sock.listen(8)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(door: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(door) as path:
            sock.connect(path)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _short(path: Path) -> Generator[str]:
    """Another name for a path: that of a socket may have 107 bytes only."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _hang_up(sock: socket.socket, pid: int) -> None:
    sock.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


async def receive(reply: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next answer to a request. None: there will be none, the one who was to give it is dead."""
    while True:
        await anyio.wait_readable(reply)
        try:
            return channel.receive(reply)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return None
