"""The orchestrator's end of the server process: start it, send requests, receive answers."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import weakref
from typing import Any

import anyio

from rollwright.sandboxes.namespaces import channel, lean


class ServerClient:
    """One server process, started at the first request and again when it was lost."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self._lock = anyio.Lock()
        self._stop: weakref.finalize[Any, ServerClient] | None = None

    async def request(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> socket.socket:
        """Send a request. The answer comes on the socket that is returned; closing it gives the request up."""
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
        argv = lean.command("server", str(os.getpid()))
        with theirs:
            pid = os.posix_spawn(sys.executable, argv, {}, file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)])
        self._sock = ours
        # Also without `close` the server must end with us and must not stay as a zombie.
        self._stop = weakref.finalize(self, _hang_up, ours, pid)
        return ours

    def close(self) -> None:
        """End the server and every box of it."""
        if self._stop is not None:
            self._stop()
        self._sock = self._stop = None


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
