"""Several gateway processes behind one address, sticky by session.

The process in front reads the head of each connection's first request and hands the connection over to the shard whose
session the API key names: what follows on it costs this process nothing. When a later request on it belongs elsewhere,
the shard gives the connection back, and it is handed out again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import tempfile
from collections.abc import AsyncIterable, Awaitable, Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.routing import Route, Router

from rollwright.concurrency import plain_errors
from rollwright.engines import Engine
from rollwright.errors import ConfigError, InfraError
from rollwright.gateway.adopted import Adopted, Elsewhere
from rollwright.gateway.connection import HEAD_BYTES, Front, connections_of_all
from rollwright.gateway.handover import Handed, waiting_room
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.routing import head_of, place_of
from rollwright.gateway.settings import SessionSettings
from rollwright.gateway.shard import ShardSpec
from rollwright.gateway.shard_admin import shard_admin_routes, shard_bench_routes
from rollwright.gateway.shard_client import ShardClient
from rollwright.gateway.shard_pool import ShardPool, shard_pool
from rollwright.gateway.standalone import listen, url_of
from rollwright.gateway.traffic import TRAINED
from rollwright.tokens import Renderer
from rollwright.types import HistoryPolicy, Sampling, TrafficClass

__all__ = ["serve_shards"]

_log = logging.getLogger("rollwright.gateway")

_HEAD_SECONDS = 20.0
"""How long a new connection may take to say what it wants."""
_CROWDED_SECONDS = 0.2
"""Between two tries to accept connections when there are too many open files."""
_NO_ROUTE = b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

Adopt = Callable[[socket.socket, bytes], Awaitable[None]]


async def serve_shards(
    *,
    count: int,
    load: Callable[[], tuple[Engine, Renderer]],
    sampling: Sampling,
    model: str,
    port: int,
    host: str = "127.0.0.1",
    folder: Path | None = None,
    admin_key: str | None = None,
    bench_admin: bool = False,
    limits: SessionLimits | None = None,
    history: HistoryPolicy = "exact",
    trained: frozenset[TrafficClass] = TRAINED,
    keepalive_seconds: float = 10.0,
    on_ready: Callable[[str, int], None] | None = None,
) -> None:
    """Like `serve_gateway`, by `count` processes. Serve until cancelled.

    `load`: makes the engine, not yet open, and the renderer, in each of them; it is pickled. Below `folder` each shard
    has its own: one that is killed is started again and goes on with its sessions, while its clients wait.

    Raises `ConfigError` naming what is wrong with the port, the folder or what `load` makes; `InfraError` for a shard
    that does not start.
    """
    if folder is not None:
        await anyio.to_thread.run_sync(_claim, folder, count)
    channels = await anyio.to_thread.run_sync(partial(tempfile.mkdtemp, prefix="rollwright-gateway-"))
    spec = ShardSpec(
        index=0,
        count=count,
        channel=f"{channels}/channel",
        load=load,
        model=model,
        folder=folder,
        admin_key=admin_key,
        bench_admin=bench_admin,
        settings=SessionSettings(sampling=sampling, limits=limits or SessionLimits(), history=history, trained=trained),
        keepalive_seconds=keepalive_seconds,
    )
    try:
        with plain_errors(), listen(host, port) as public, waiting_room() as (take, strays):
            async with ShardClient() as shards, shard_pool(spec, take) as pool:
                routes: list[Route] = []
                if admin_key is not None:
                    routes += shard_admin_routes(pool, shards, admin_key)
                if bench_admin:
                    routes += shard_bench_routes(pool, shards)
                elsewhere = Elsewhere(has=lambda path, headers: place_of(path, headers, count) is not None, take=take)
                front = Front(Router(routes=routes))
                async with front.adopting({"elsewhere": elsewhere}, Adopted) as adopt:
                    sessions = await pool.serve()
                    if on_ready is not None:
                        on_ready(url_of(public), sessions)
                    await _Door(pool, adopt).open(public, strays)
    finally:
        shutil.rmtree(channels, ignore_errors=True)


def _claim(folder: Path, count: int) -> None:
    """A key says its shard, so open sessions belong to a number of shards. Raises `ConfigError`."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {path: path.name.removeprefix("shard-") for path in folder.glob("shard-*")}
    beyond = [path for path, number in numbers.items() if number.isdigit() and int(number) >= count]
    if any(folder.glob("*.key")) or any(any(path.rglob("*.key")) for path in beyond):
        raise ConfigError(
            f"{folder} has open sessions of a gateway with another number of shards: serve it as before, or close them",
            field="folder",
        )


class _Door:
    """Who comes in, and where to: the shard of the first request, or here for the admin routes."""

    def __init__(self, pool: ShardPool, adopt: Adopt) -> None:
        self._pool = pool
        self._adopt = adopt
        self._waiting: dict[anyio.CancelScope, None] = {}
        """The connections that are not yet where they belong, in the order in which they came."""
        self._room = connections_of_all()

    async def open(self, public: socket.socket, strays: AsyncIterable[Handed]) -> None:
        """New connections, and those whose next request belongs to another process than the one before, until
        cancelled."""
        public.setblocking(False)
        async with anyio.create_task_group() as group:

            async def again() -> None:
                async for handed in strays:
                    group.start_soon(self._show_in, handed)

            group.start_soon(again)
            while True:
                try:
                    sock, _ = await asyncio.get_running_loop().sock_accept(public)
                except ConnectionError:
                    continue
                except OSError as error:
                    _log.warning("no connection can be accepted for now: %s", error.strerror)
                    await anyio.sleep(_CROWDED_SECONDS)
                else:
                    group.start_soon(self._show_in, Handed(sock=sock, received=b""))

    async def _show_in(self, handed: Handed) -> None:
        """Whoever waited longest has to go where there is no room for another."""
        kept = False
        with anyio.CancelScope() as scope:
            self._waiting[scope] = None
            if len(self._waiting) > self._room:
                next(iter(self._waiting)).cancel()
            try:
                kept = await self._to_its_place(handed)
            except (OSError, InfraError):
                # The client has gone, or has to try again.
                pass
            finally:
                del self._waiting[scope]
                if not kept:
                    handed.sock.close()

    async def _to_its_place(self, handed: Handed) -> bool:
        """Whether it stays here. Raises `InfraError`, `OSError`."""
        sock, received = handed.sock, handed.received
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        head = head_of(received)
        with anyio.move_on_after(_HEAD_SECONDS):
            while head is None and len(received) < HEAD_BYTES:
                part = await loop.sock_recv(sock, HEAD_BYTES)
                if not part:
                    return False
                received += part
                head = head_of(received)
        if head is None:
            return False
        place = place_of(*head, self._pool.count)
        if place is not None:
            await self._pool.give(place, Handed(sock=sock, received=received))
            return False
        # Only callers on this machine may use up files of this process.
        if not ip_address(sock.getpeername()[0]).is_loopback:
            await loop.sock_sendall(sock, _NO_ROUTE)
            return False
        await self._adopt(sock, received)
        return True
