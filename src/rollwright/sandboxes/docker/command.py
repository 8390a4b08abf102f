"""One command in a container: told when to start, listened to until it says that it ended."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

STDOUT, STDERR = 1, 2

_HEADER = struct.Struct(">BxxxL")
_CHUNK = 1 << 18


def guest_script(name: str) -> str:
    """One of the scripts that run in a container. Small enough to be an argument."""
    return Path(__file__).with_name("guest").joinpath(f"{name}.sh").read_text()


def waiting(argv: Sequence[str], *, cwd: str) -> list[str]:
    """What has to be started in the container so that `argv` waits there to be told."""
    return ["sh", "-c", guest_script("command"), "rollwright", cwd, *argv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended, by its own account."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Frames:
    """Takes the streams apart that the daemon sends over one connection."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Pieces of streams, each with the stream's number."""
        self._pending += data
        while self._pending:
            if self._left:
                piece = bytes(self._pending[: self._left])
                del self._pending[: len(piece)]
                self._left -= len(piece)
                yield self._stream, piece
            elif len(self._pending) >= _HEADER.size:
                self._stream, self._left = _HEADER.unpack_from(self._pending)
                del self._pending[: _HEADER.size]
            else:
                return


class Stream:
    """What a command wrote to one stream, up to the line in which `nonce` tells that it ended."""

    def __init__(self, nonce: bytes, most: int) -> None:
        self._nonce = nonce
        self._most = most
        self._data = bytearray()
        self._exit_code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """None while the command runs."""
        return self._exit_code

    @property
    def too_long(self) -> bool:
        return len(self._data) > self._most

    def feed(self, piece: bytes) -> None:
        if self._exit_code is not None:
            return
        searched = len(self._data)
        self._data += piece
        at = self._data.find(self._nonce, max(0, searched - len(self._nonce) - 8))
        end = self._data.find(b"\n", at) if at >= 0 else -1
        if end >= 0:
            self._exit_code = int(self._data[at + len(self._nonce) : end])
            del self._data[at:]

    @property
    def first_line(self) -> bytes | None:
        """Without its end. None until it is whole."""
        end = self._data.find(b"\n", 0, 32)
        return None if end < 0 else bytes(self._data[:end])

    def data(self, *, skip_line: bool = False) -> bytes:
        """What it wrote, with or without the first line."""
        return bytes(self._data[self._data.find(b"\n") + 1 :] if skip_line else self._data)


class Command:
    """The connection of a command that is `waiting`. Closed by whoever made it."""

    def __init__(self, exec_id: str, connection: socket.socket, *, most: int) -> None:
        self.exec_id = exec_id
        self._connection = connection
        self._nonce = secrets.token_hex(16).encode()
        self._frames = Frames()
        self._out = Stream(self._nonce, most)
        self._err = Stream(self._nonce, most)
        self._told = False
        self._over = False

    @property
    def given_up(self) -> bool:
        """Whether it may be running although we wait for it no more."""
        return self._told and not self._over

    @property
    def pid(self) -> int | None:
        """In the container, of the command's process group. None: not known yet."""
        line = self._out.first_line
        return int(line) if line is not None and line.isdigit() else None

    @property
    def too_long(self) -> bool:
        """Whether it wrote more than it may."""
        return self._out.too_long or self._err.too_long

    async def run(self, data: bytes) -> Ended | None:
        """Start it with `data` as its stdin, and wait. None: the connection ended before the command told its end,
        or it wrote too much."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send, data)
            while self._exit_code is None and not self.too_long:
                if not await self._hear():
                    break
            tasks.cancel_scope.cancel()
        self._over = not self.too_long
        code = self._exit_code
        return (
            None
            if code is None
            else Ended(exit_code=code, stdout=self._out.data(skip_line=True), stderr=self._err.data())
        )

    async def hear_pid(self) -> int | None:
        """Listen on until the pid is known. None: the connection ended."""
        while self.pid is None and await self._hear():
            pass
        return self.pid

    def close(self) -> None:
        self._connection.close()

    @property
    def _exit_code(self) -> int | None:
        return self._out.exit_code if self._err.exit_code is not None else None

    async def _send(self, data: bytes) -> None:
        try:
            for part in (self._nonce + b"\n", data):
                view = memoryview(part)
                while view:
                    await anyio.wait_writable(self._connection)
                    self._told = True
                    try:
                        view = view[self._connection.send(view[:_CHUNK]) :]
                    except BlockingIOError:
                        continue
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            # It does not read its stdin to the end. What it says and how it ends is heard on the other way.
            return

    async def _hear(self) -> bool:
        await anyio.wait_readable(self._connection)
        try:
            data = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for number, piece in self._frames.feed(data):
            (self._err if number == STDERR else self._out).feed(piece)
        return bool(data)
