"""A TCP proxy that breaks every connection some time after it was made, and counts what it broke."""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import anyio
from anyio.abc import SocketAttribute, SocketStream

__all__ = ["ChaosProxy", "Cut", "chaos_proxy"]

Cut = Literal["rst", "fin"]
"""rst: both ends get a reset. fin: both ends see an orderly close in the middle of whatever was going on."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""


@dataclass(slots=True, kw_only=True)
class ChaosProxy:
    """The running proxy. Change `seconds` and `cuts` at any time; new connections follow."""

    port: int
    seconds: float
    """Life of a connection; 0: for ever."""
    cuts: tuple[Cut, ...]
    counts: Counter[Cut] = field(default_factory=Counter[Cut])
    """Connections that were broken."""
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def chaos_proxy(
    target: int, *, seconds: float, cuts: tuple[Cut, ...] = ("rst", "fin"), seed: int = 0
) -> AsyncGenerator[ChaosProxy]:
    """Listen on a loopback port in front of the loopback port `target`."""
    chance = random.Random(seed)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0, backlog=512) as listener:
        proxy = ChaosProxy(port=listener.extra(SocketAttribute.local_port), seconds=seconds, cuts=cuts)

        async def serve(client: SocketStream) -> None:
            proxy.connections += 1
            cut = chance.choice(proxy.cuts) if proxy.seconds and proxy.cuts else None
            async with client:
                try:
                    server = await anyio.connect_tcp("127.0.0.1", target)
                except OSError:
                    return
                async with server:
                    with anyio.move_on_after(proxy.seconds or None) as life:
                        await _relay(client, server)
                    if life.cancelled_caught and cut is not None:
                        proxy.counts[cut] += 1
                        if cut == "rst":
                            for end in (client, server):
                                raw = end.extra(SocketAttribute.raw_socket)
                                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, serve, group)
            yield proxy
            group.cancel_scope.cancel()


async def _relay(client: SocketStream, server: SocketStream) -> None:
    """Until either end is done."""
    async with anyio.create_task_group() as group:

        async def copy(source: SocketStream, sink: SocketStream) -> None:
            try:
                async for data in source:
                    await sink.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            group.cancel_scope.cancel()

        group.start_soon(copy, client, server)
        group.start_soon(copy, server, client)
