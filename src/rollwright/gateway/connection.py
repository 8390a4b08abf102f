"""uvicorn's HTTP protocol on any listening socket, without a uvicorn server around it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import termios
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import anyio
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rollwright.gateway.receipt import Receipt

__all__ = [
    "CONNECTIONS_OF_ONE",
    "HEAD_BYTES",
    "STRANGERS",
    "Connection",
    "Front",
    "Strangers",
    "connections_of_all",
]

# A CLI runs a tool for minutes and then uses its pooled connection again; closing it meanwhile only makes races.
_KEEP_ALIVE_SECONDS = 3600
_FAREWELL_SECONDS = 30.0
"""How long a client that wanted its connection closed after a reply may take to close its own end."""
_TCP_CLOSE = 7
"""State of a socket whose peer has reset the connection."""
HEAD_BYTES = 64 << 10
"""Of a request line with its headers. The parser itself has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strangers:
    """How a socket that everyone can reach treats connections that have not shown a key it knows."""

    seconds: float
    """Closed after so long."""
    each: int
    """Connections of one key; one more is closed. So is the oldest stranger when the socket has no room for another."""


CONNECTIONS_OF_ONE = 128
"""More than any CLI opens, and not enough for what runs in a sandbox to use up the process's descriptors."""
_CONNECTIONS_OF_ALL = 16384

STRANGERS = Strangers(seconds=30.0, each=CONNECTIONS_OF_ONE)
"""What a socket that clients of all sessions reach lets them do."""


def connections_of_all() -> int:
    """How many connections such a socket may have: no more than half of what this process may have open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _CONNECTIONS_OF_ALL if files == resource.RLIM_INFINITY else min(_CONNECTIONS_OF_ALL, files // 2)


class Connection(HttpToolsProtocol):
    """One TCP connection. Each request finds it in `scope["state"]["connection"]`."""

    broken = False
    """The peer reset the connection or closed it before it had all, the network failed, or we hung up; an orderly
    close leaves this False."""
    owner: object | None = None
    """Whose key it showed last."""
    _head = -1
    """Bytes of a request whose headers are not complete; -1: there is none."""
    _patience: asyncio.TimerHandle | None = None
    _receipts: tuple[Receipt, ...] = ()
    """Of replies that the client may have or not."""
    _last = False
    """The reply in the making is to be the last one."""
    _said_farewell = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        limit = cast("int | None", self.app_state["max_connections"])
        if limit is not None and len(self.server_state.connections) >= limit and not self._make_room():
            transport.abort()
            return
        self.logger = logging.getLogger("rollwright.gateway.http")
        self.app_state = {**self.app_state, "connection": self}
        self._asked: deque[RequestResponseCycle] = deque()
        """Requests that are not answered."""
        # asyncio does this only for sockets that were made with an explicit protocol number; without it the kernel
        # holds each event back for the client's delayed acknowledgement of the one before, some 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # No buffer of ours: a write that has returned is with the kernel.
        transport.set_write_buffer_limits(high=0)
        if self._strangers is not None:
            _notice_its_end(transport.get_extra_info("socket"))
        super().connection_made(transport)
        self.disown()
        if received := cast("bytes", self.app_state.get("received", b"")):
            self.data_received(received)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison] - turned away above
            return
        self.broken = self.broken or exc is not None
        self._settle(lost=exc is not None)
        self._forgive()
        self._tell_gone()
        # uvicorn leaves its timer running when a connection breaks, and with it all that hangs on the connection.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        # An orderly end acknowledges all that came before it, and with something unread it would be a reset.
        self.broken = self.broken or self.transport.get_write_buffer_size() > 0 or self._unacknowledged() > 0
        self._settle(lost=self.broken)
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        if self._said_farewell:
            return
        super().data_received(data)
        if self._head >= 0:
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self.hang_up()

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = -1
        # Who asks again on the same connection has read what came before.
        self._settle(lost=False)
        super().on_headers_complete()
        self._asked.append(self.cycle)

    def on_response_complete(self) -> None:
        self._asked.popleft()
        if self._last:
            self.pipeline.clear()
        super().on_response_complete()
        if self._last and not self.transport.is_closing():
            self._forgive()
            self._said_farewell = True
            self._patience = self.loop.call_later(_FAREWELL_SECONDS, self.hang_up)
            # Where the client has reset the connection the event loop is about to hear of it.
            with suppress(OSError):
                self.transport.write_eof()

    def keep_for_the_receipt(self) -> None:
        """The headers of a reply are sent. Where it is the last one on this connection, the client closes first: what
        becomes of a reply is never heard on a connection that we have closed."""
        cycle = self._asked[0]
        if not cycle.keep_alive:
            cycle.keep_alive = True
            self._last = True

    async def drained(self) -> None:
        """Wait until the kernel has taken all that was written, or never will."""
        while self.flow.write_paused and not self.transport.is_closing():
            await self.flow.drain()

    def receipt(self) -> Receipt | None:
        """For the reply that the kernel has just taken the last byte of; None: the client will not have it."""
        self.look()
        if self.broken:
            return None
        if self.transport.is_closing():
            return Receipt()
        receipt = Receipt(self.look)
        self._receipts = (*self._receipts, receipt)
        return receipt

    def look(self) -> None:
        """Hear of an end that the event loop has not come to yet."""
        if self.transport.is_closing() or self._state() != _TCP_CLOSE:
            return
        # Once we have said farewell an orderly end looks the same, but that a reset leaves an error.
        reset = not self._said_farewell or self._error() != 0
        self.broken = self.broken or reset
        self._settle(lost=reset)

    def _settle(self, *, lost: bool) -> None:
        receipts, self._receipts = self._receipts, ()
        for receipt in receipts:
            receipt.settle(lost=lost)

    def _state(self) -> int:
        return self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

    def _error(self) -> int:
        return self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def _unacknowledged(self) -> int:
        """Bytes that the kernel took from us and the client's has not acknowledged."""
        count = array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        return count[0] - self._said_farewell  # our own end of the stream counts as one

    def admit(self, owner: object) -> bool:
        """The client has shown the key of `owner`. False: it has too many connections, and this one is closed."""
        self._forgive()
        if self._strangers is None or owner is self.owner:
            return True
        if sum(other.owner is owner for other in self._others()) >= self._strangers.each:
            self.hang_up()
            return False
        self.owner = owner
        return True

    def trust(self) -> None:
        """It is the trainer's, who shows another key than that of a session."""
        self._forgive()

    def disown(self) -> None:
        """Whoever comes next on it has to show a key."""
        self.owner = None
        self._forgive()
        if self._strangers is not None:
            self._patience = self.loop.call_later(self._strangers.seconds, self.hang_up)

    def _forgive(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _make_room(self) -> bool:
        """Hang up on the stranger who has been here longest."""
        waiting = [other for other in self._others() if other._patience is not None]
        if not waiting:
            return False
        min(waiting, key=lambda other: cast("asyncio.TimerHandle", other._patience).when()).hang_up()
        return True

    def _others(self) -> list[Connection]:
        return [cast(Connection, other) for other in self.server_state.connections]

    @property
    def _strangers(self) -> Strangers | None:
        return cast("Strangers | None", self.app_state["strangers"])

    def hang_up(self) -> None:
        """Close at once, whatever has been sent so far."""
        self._forgive()
        self.look()
        self._settle(lost=False)
        self.broken = self.broken or bool(self._asked) or self.transport.get_write_buffer_size() > 0
        self._tell_gone()
        self.transport.abort()

    def _tell_gone(self) -> None:
        """uvicorn tells only the last request, and a moment later; until then it would write to what is closed."""
        for cycle in self._asked:
            cycle.disconnected = True
            cycle.message_event.set()


def _notice_its_end(sock: socket.socket) -> None:
    """Whoever is on the other side may vanish without a word: the connection breaks a minute later."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 30),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 60_000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


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
        self._public: list[ServerState] = []

    @asynccontextmanager
    async def serving(
        self,
        sock: socket.socket,
        state: Mapping[str, Any],
        *,
        max_connections: int | None = None,
        strangers: Strangers | None = None,
    ) -> AsyncGenerator[None]:
        """Serve a listening TCP socket; each request finds `state` in `scope["state"]`.

        Connections beyond `max_connections` are closed at once: file descriptors are the whole process's. `strangers`:
        for a socket that not only its own clients reach.
        At the end the socket and all its connections are closed and every request has been left.
        """
        loop = asyncio.get_running_loop()
        served = ServerState()
        sock.setblocking(False)
        shared = {**state, "max_connections": max_connections, "strangers": strangers}
        server = await loop.create_server(
            lambda: Connection(config=self._config, server_state=served, app_state=shared), sock=sock
        )
        if strangers is not None:
            self._public.append(served)
        try:
            yield
        finally:
            if strangers is not None:
                self._public.remove(served)
            with anyio.CancelScope(shield=True):
                server.close()
                sock.close()
                await _close_all(served)

    @asynccontextmanager
    async def adopting(
        self,
        state: Mapping[str, Any],
        kind: type[Connection],
        *,
        max_connections: int | None = None,
        strangers: Strangers | None = None,
    ) -> AsyncGenerator[Callable[[socket.socket, bytes], Awaitable[None]]]:
        """Serve connections that another process accepted: what is yielded takes each with what was read of it. The
        rest as with `serving`.

        At the end they are closed and every request has been left.
        """
        loop = asyncio.get_running_loop()
        served = ServerState()
        shared = {**state, "max_connections": max_connections, "strangers": strangers}

        async def adopt(sock: socket.socket, received: bytes) -> None:
            sock.setblocking(False)
            own = {**shared, "received": received}
            await loop.connect_accepted_socket(
                lambda: kind(config=self._config, server_state=served, app_state=own), sock
            )

        try:
            yield adopt
        finally:
            with anyio.CancelScope(shield=True):
                await _close_all(served)

    def disown(self, owner: object) -> None:
        """`owner` is no more: its connections are strangers' again."""
        for served in self._public:
            for connection in list(served.connections):
                if cast(Connection, connection).owner is owner:
                    cast(Connection, connection).disown()


async def _close_all(served: ServerState) -> None:
    for connection in list(served.connections):
        cast(Connection, connection).hang_up()
    while served.tasks:
        await asyncio.wait(served.tasks)
