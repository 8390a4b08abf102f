"""The channel between two gateway processes of one machine: records, and connections that one hands to the other."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream

__all__ = ["Channel", "ChannelEnded", "Handed", "waiting_room"]

_log = logging.getLogger("rollwright.gateway")

_RECORD_BYTES = 64 << 10
_CONNECTION = b"connection"
"""The message that comes with a connection; records begin with a brace."""
_ENDED = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})


class ChannelEnded(Exception):
    """The other process has ended, or is about to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A connection on its way to the process it belongs to."""

    sock: socket.socket
    received: bytes
    """What was read of it and not used; its next request begins here."""


class Channel:
    """One end: several may write, one reads."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock`: connected, of the kind SOCK_SEQPACKET; the caller's to close."""
        sock.setblocking(False)
        self._sock = sock
        self._sending = anyio.Lock()

    async def tell(self, record: Mapping[str, Any]) -> None:
        """A record of at most 64 KiB. Raises `ChannelEnded`."""
        await self._send(orjson.dumps(record), ())

    async def hand_over(self, handed: Handed) -> None:
        """Our end of the connection stays the caller's to close. Raises `ChannelEnded`, and `OSError` where the system
        has no room for it."""
        # A message has to fit the socket's buffer; what was read of a request may not.
        memory = os.memfd_create("received", os.MFD_CLOEXEC)
        try:
            with os.fdopen(memory, "wb", closefd=False) as file:
                file.write(handed.received)
            await self._send(_CONNECTION, (handed.sock.fileno(), memory))
        finally:
            os.close(memory)

    async def receive(self) -> dict[str, Any] | Handed | None:
        """The next record or connection; None: the other process has ended."""
        while True:
            try:
                await anyio.wait_readable(self._sock)
                message, descriptors, _, _ = socket.recv_fds(self._sock, _RECORD_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            except OSError:
                return None
            if message != _CONNECTION:
                return orjson.loads(message) if message else None
            if len(descriptors) == 2:
                return _handed(*descriptors)
            _log.warning("too many open files: a connection is dropped")
            for descriptor in descriptors:
                os.close(descriptor)

    def end(self) -> None:
        """It is about to be closed: whoever waits for it is told."""
        anyio.notify_closing(self._sock)

    async def _send(self, message: bytes, descriptors: Sequence[int]) -> None:
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._sock, [message], descriptors)
                except BlockingIOError:
                    await self._writable()
                except OSError as error:
                    if error.errno in _ENDED:
                        raise ChannelEnded from error
                    raise
                else:
                    return

    async def _writable(self) -> None:
        try:
            await anyio.wait_writable(self._sock)
        except (anyio.ClosedResourceError, ValueError) as error:
            raise ChannelEnded from error


@contextmanager
def waiting_room() -> Generator[tuple[Callable[[Handed], None], MemoryObjectReceiveStream[Handed]]]:
    """For connections that are to be handed over: how one comes in, and where they come out. Those left are closed."""
    come_in, come_out = anyio.create_memory_object_stream[Handed](math.inf)
    with come_in, come_out:
        try:
            yield come_in.send_nowait, come_out
        finally:
            while come_out.statistics().current_buffer_used:
                come_out.receive_nowait().sock.close()


def _handed(connection: int, memory: int) -> Handed:
    try:
        received = os.pread(memory, os.fstat(memory).st_size, 0)
    finally:
        os.close(memory)
    return Handed(sock=socket.socket(fileno=connection), received=received)
