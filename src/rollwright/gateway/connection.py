"""uvicorn's HTTP protocol on any listening socket, without a uvicorn server around it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

__all__ = ["Connection", "Front"]

# A CLI runs a tool for minutes and then uses its pooled connection again; closing it meanwhile only makes races.
_KEEP_ALIVE_SECONDS = 3600


class Connection(HttpToolsProtocol):
    """One TCP connection. Each request finds it in `scope["state"]["connection"]`."""

    broken = False
    """The peer reset the connection or the network failed; an orderly close leaves this False."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        limit = cast("int | None", self.app_state["max_connections"])
        if limit is not None and len(self.server_state.connections) >= limit:
            transport.abort()
            return
        self.logger = logging.getLogger("rollwright.gateway.http")
        self.app_state = {**self.app_state, "connection": self}
        # asyncio does this only for sockets that were made with an explicit protocol number; without it the kernel
        # holds each event back for the client's delayed acknowledgement of the one before, some 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # No buffer of ours: a write that has returned is with the kernel.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison] - turned away above
            return
        self.broken = exc is not None
        super().connection_lost(exc)

    def hang_up(self) -> None:
        """Close at once, whatever has been sent so far."""
        self.transport.abort()


class Front:
    """One ASGI app on many sockets; a socket costs a listener, not a server."""

    def __init__(self, app: ASGIApp) -> None:
        self._config = Config(
            cast(Any, app),
            http=Connection,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            # Who is on this machine decides who may use the admin routes, so no header may say it.
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._config.load()

    @asynccontextmanager
    async def serving(
        self, sock: socket.socket, state: Mapping[str, Any], *, max_connections: int | None = None
    ) -> AsyncGenerator[None]:
        """Serve a listening TCP socket; each request finds `state` in `scope["state"]`.

        Connections beyond `max_connections` are closed at once: file descriptors are the whole process's.
        At the end the socket and all its connections are closed and every request has been left.
        """
        loop = asyncio.get_running_loop()
        served = ServerState()
        sock.setblocking(False)
        shared = {**state, "max_connections": max_connections}
        server = await loop.create_server(
            lambda: Connection(config=self._config, server_state=served, app_state=shared), sock=sock
        )
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                server.close()
                sock.close()
                for connection in list(served.connections):
                    cast(Connection, connection).hang_up()
                while served.tasks:
                    await asyncio.wait(served.tasks)
