"""One of several gateway processes behind one address: `python -m rollwright.gateway.shard`, started by `serve_shards`.

It serves a port of this machine of its own, and connections that the process in front accepted. Over its channel come
those connections, each with what was read of it, and the ports of all.
"""

from __future__ import annotations

import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from rollwright.concurrency import plain_errors
from rollwright.engines import Engine
from rollwright.errors import RollwrightError
from rollwright.gateway.connection import Connection, Front
from rollwright.gateway.forward import Forwarder, Unreachable
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.routing import secret_of, shard_of, shard_prefix
from rollwright.gateway.standalone import listen, opened_gateway
from rollwright.tokens import Renderer
from rollwright.types import Sampling

__all__ = ["ADMIN_PATHS", "CHANNEL_BYTES", "FRONT", "ShardSpec"]

ADMIN_PATHS = ("/admin/", "/_bench/")
CHANNEL_BYTES = 72 << 10
"""Of one message: the longest head that is accepted, and what came with it."""
FRONT = "front"
"""What the process in front is called among the ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What a shard is started with; it is pickled."""

    index: int
    count: int
    channel: str
    """Path of the socket that the process in front listens at."""
    load: Callable[[], tuple[Engine, Renderer]]
    """Makes the engine and the renderer in the shard's own process: importable, or a partial of what is."""
    sampling: Sampling
    model: str
    folder: Path | None
    admin_key: str | None
    bench_admin: bool
    limits: SessionLimits | None
    keepalive_seconds: float


async def run(spec: ShardSpec) -> None:
    """Serve until the process in front ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(spec.channel)
        channel.setblocking(False)
        try:
            with plain_errors():
                await _serve(spec, channel)
        except RollwrightError as error:
            # The process in front may have ended before.
            with suppress(OSError):
                channel.send(orjson.dumps({"shard": spec.index, "error": str(error)[:4000]}))
                # Until it has been read.
                await anyio.wait_readable(channel)


async def _serve(spec: ShardSpec, channel: socket.socket) -> None:
    engine, renderer = spec.load()
    ports: dict[str, int] = {}
    async with engine, Forwarder() as forward:
        await engine.check()
        gateway = opened_gateway(
            engine=engine,
            renderer=renderer,
            sampling=spec.sampling,
            model=spec.model,
            folder=spec.folder,
            admin_key=spec.admin_key,
            bench_admin=spec.bench_admin,
            limits=spec.limits,
            keepalive_seconds=spec.keepalive_seconds,
            secret_prefix=shard_prefix(spec.index),
        )
        with listen("127.0.0.1", 0) as sock:
            async with gateway as (app, book):
                front = Front(_elsewhere(app, spec, ports, forward))
                port = sock.getsockname()[1]
                async with (
                    front.serving(sock, {"only": None, "adopted": False}),
                    front.adopting({"only": None, "adopted": True}) as adopt,
                ):
                    channel.send(orjson.dumps({"shard": spec.index, "port": port, "sessions": len(book.sessions)}))
                    while True:
                        await anyio.wait_readable(channel)
                        received, descriptors, _, _ = socket.recv_fds(channel, CHANNEL_BYTES, 1)
                        if not received:
                            return
                        if descriptors:
                            await adopt(socket.socket(fileno=descriptors[0]), received)
                        else:
                            ports |= orjson.loads(received)


def _elsewhere(app: ASGIApp, spec: ShardSpec, ports: Mapping[str, int], forward: Forwarder) -> ASGIApp:
    """A client may use one connection for several keys, and a trainer one for the admin routes too: the connection was
    brought here by its first request, the others are passed on to where they belong."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        state: Mapping[str, Any] = scope["state"]
        if not state["adopted"]:
            return await app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        shard = shard_of(secret_of(headers), spec.count)
        where = FRONT if scope["path"].startswith(ADMIN_PATHS) else str(shard)
        if where == str(spec.index):
            return await app(scope, receive, send)
        connection: Connection = state["connection"]
        local = scope["client"] is not None and scope["client"][0] in ("127.0.0.1", "::1")
        if where not in ports or (where == FRONT and not local):
            connection.hang_up()
            return None
        try:
            await forward(ports[where], scope, receive, send)
        except Unreachable:
            # As the shard itself would, were it killed now: clients try again.
            connection.hang_up()

    return routed


def main() -> None:
    """Ctrl-C goes to the process in front, whose end is this one's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec: ShardSpec = pickle.load(sys.stdin.buffer)
    anyio.run(run, spec, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
