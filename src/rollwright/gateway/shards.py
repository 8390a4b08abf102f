"""Several gateway processes behind one address, sticky by session.

The process in front reads the head of each connection's first request and hands the connection over to the shard whose
session the API key names: what follows on it costs this process nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from rollwright.concurrency import plain_errors
from rollwright.engines import Engine
from rollwright.errors import ConfigError, InfraError
from rollwright.gateway.connection import Connection, Front
from rollwright.gateway.forward import Forwarder, Unreachable
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.routing import head_of, secret_of, shard_of
from rollwright.gateway.shard import ADMIN_PATHS, CHANNEL_BYTES, ShardSpec
from rollwright.gateway.shard_admin import shard_admin_routes, shard_bench_routes
from rollwright.gateway.shard_pool import ShardPool, shard_pool
from rollwright.gateway.standalone import listen, url_of
from rollwright.tokens import Renderer
from rollwright.types import Sampling

__all__ = ["serve_shards"]

_HEAD_SECONDS = 20.0
"""How long a new connection may take to say what it wants."""
_HEAD_BYTES = 64 << 10

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
        sampling=sampling,
        model=model,
        folder=folder,
        admin_key=admin_key,
        bench_admin=bench_admin,
        limits=limits,
        keepalive_seconds=keepalive_seconds,
    )
    try:
        with plain_errors(), listen(host, port) as public, listen("127.0.0.1", 0) as private:
            async with (
                Forwarder() as forward,
                shard_pool(spec, private.getsockname()[1]) as pool,
            ):
                routes: list[Route] = []
                if admin_key is not None:
                    routes += shard_admin_routes(pool, forward, admin_key)
                if bench_admin:
                    routes += shard_bench_routes(pool, forward)
                front = Front(Router(routes=[*routes, Mount("/", _passing_on(pool, forward))]))
                async with front.serving(private, {}), front.adopting({}) as adopt:
                    sessions = await pool.serve()
                    if on_ready is not None:
                        on_ready(url_of(public), sessions)
                    await _hand_over(public, pool, adopt)
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


async def _hand_over(public: socket.socket, pool: ShardPool, adopt: Adopt) -> None:
    """Accept connections until cancelled. Each goes to the shard of its first request; those for admin routes stay."""
    public.setblocking(False)
    async with anyio.create_task_group() as group:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(public)
            group.start_soon(_give, sock, pool, adopt)


async def _give(sock: socket.socket, pool: ShardPool, adopt: Adopt) -> None:
    kept = False
    try:
        sock.setblocking(False)
        received = b""
        head: tuple[str, dict[str, str]] | None = None
        with anyio.move_on_after(_HEAD_SECONDS):
            while head is None and len(received) < _HEAD_BYTES:
                part = await asyncio.get_running_loop().sock_recv(sock, CHANNEL_BYTES - _HEAD_BYTES)
                if not part:
                    return
                received += part
                head = head_of(received)
        if head is None:
            return
        path, headers = head
        if path.startswith(ADMIN_PATHS):
            kept = True
            await adopt(sock, received)
        else:
            await pool.give(shard_of(secret_of(headers), pool.count), sock, received)
    except (OSError, InfraError):
        # The client has gone, or has to try again.
        return
    finally:
        if not kept:
            sock.close()


def _passing_on(pool: ShardPool, forward: Forwarder) -> ASGIApp:
    """What comes on a connection that was kept for the admin routes, and is none."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            port = await pool.port(shard_of(secret_of(headers), pool.count))
            await forward(port, scope, receive, send)
        except (InfraError, Unreachable):
            connection: Connection = scope["state"]["connection"]
            connection.hang_up()

    return app
