"""The one way out of a closed box: connections to a socket in it go on to one port of one host."""

from __future__ import annotations

import logging
import socket

import anyio
from anyio.abc import ByteStream, SocketListener

__all__ = ["forward"]

log = logging.getLogger(__name__)

_AT_ONCE = 128
"""Connections of one box: file descriptors are the whole server's."""
_CONNECT_SECONDS = 10.0
_CHUNK = 1 << 16


async def forward(sock: socket.socket, host: str, port: int) -> None:
    """Serve the listening `sock` of a box, which stays its owner's, until cancelled."""
    slots = anyio.CapacityLimiter(_AT_ONCE)

    async def connect(client: ByteStream) -> None:
        async with client:
            if slots.available_tokens == 0:
                return
            async with slots:
                await _carry(client, host, port)

    async with await SocketListener.from_socket(sock.dup()) as listener:
        await listener.serve(connect)


async def _carry(client: ByteStream, host: str, port: int) -> None:
    try:
        with anyio.fail_after(_CONNECT_SECONDS):
            server = await anyio.connect_tcp(host, port)
    except (OSError, TimeoutError) as error:
        log.info("a box cannot reach %s:%d: %s", host, port, error)
        return
    async with server, anyio.create_task_group() as group:
        group.start_soon(_pump, client, server, group.cancel_scope)
        group.start_soon(_pump, server, client, group.cancel_scope)


async def _pump(source: ByteStream, sink: ByteStream, both: anyio.CancelScope) -> None:
    """Until the source ends; one that breaks ends the other direction too, so that nobody waits for a dead peer."""
    try:
        while True:
            await sink.send(await source.receive(_CHUNK))
    except anyio.EndOfStream:
        try:
            await sink.send_eof()
        except (anyio.BrokenResourceError, OSError):
            both.cancel()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        both.cancel()
