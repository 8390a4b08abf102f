"""One of several gateway processes behind one address: `python -m rollwright.gateway.shard`, started by `serve_shards`.

It serves a port of this machine of its own, for the process in front, and connections that that one accepted. They come
over its channel, each with what was read of it, and go back there when their next request is none of this shard's.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from rollwright.concurrency import plain_errors
from rollwright.engines import Engine
from rollwright.errors import RollwrightError
from rollwright.gateway.adopted import Adopted, Elsewhere
from rollwright.gateway.connection import STRANGERS, Front, connections_of_all
from rollwright.gateway.handover import Channel, ChannelEnded, Handed, waiting_room
from rollwright.gateway.routing import place_of, shard_prefix
from rollwright.gateway.settings import SessionSettings
from rollwright.gateway.standalone import listen, opened_gateway
from rollwright.tokens import Renderer

__all__ = ["ShardSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What a shard is started with; it is pickled."""

    index: int
    count: int
    channel: str
    """Path of the socket that the process in front listens at."""
    load: Callable[[], tuple[Engine, Renderer]]
    """Makes the engine and the renderer in the shard's own process: importable, or a partial of what is."""
    model: str
    folder: Path | None
    admin_key: str | None
    bench_admin: bool
    settings: SessionSettings
    keepalive_seconds: float
    paused: bool = False
    """The trainer has paused all shards, and this one is started meanwhile."""


async def run(spec: ShardSpec) -> None:
    """Serve until the process in front stops or ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(spec.channel)
        except OSError:  # it has ended
            return
        channel = Channel(sock)
        try:
            with plain_errors():
                await _serve(spec, channel)
        except RollwrightError as error:
            # The process in front may have ended before.
            with suppress(ChannelEnded):
                await channel.tell({"shard": spec.index, "error": str(error)[:4000]})
                # Until it has been read.
                await channel.receive()


async def _serve(spec: ShardSpec, channel: Channel) -> None:
    engine, renderer = spec.load()
    async with engine:
        await engine.check()
        gateway = opened_gateway(
            engine=engine,
            renderer=renderer,
            model=spec.model,
            folder=spec.folder,
            admin_key=spec.admin_key,
            bench_admin=spec.bench_admin,
            settings=spec.settings,
            keepalive_seconds=spec.keepalive_seconds,
            secret_prefix=shard_prefix(spec.index),
        )
        with listen("127.0.0.1", 0) as sock, waiting_room() as (take, leaving):
            async with gateway as (app, book):
                if spec.paused:
                    await book.gateway.pause()
                front = Front(app)
                elsewhere = Elsewhere(
                    has=lambda path, headers: place_of(path, headers, spec.count) != spec.index, take=take
                )
                port = sock.getsockname()[1]
                async with (
                    front.serving(sock, {"only": None}),
                    front.adopting(
                        {"only": None, "elsewhere": elsewhere},
                        Adopted,
                        max_connections=connections_of_all(),
                        strangers=STRANGERS,
                    ) as adopt,
                    anyio.create_task_group() as group,
                ):
                    group.start_soon(_give_back, leaving, channel)
                    hello = {"shard": spec.index, "port": port, "sessions": len(book.sessions)}
                    if not await _until_stopped(channel, hello, adopt):
                        # As if this process had been killed too: the sessions stay open for the next one.
                        os._exit(1)
                    group.cancel_scope.cancel()


async def _until_stopped(
    channel: Channel, hello: Mapping[str, Any], adopt: Callable[[socket.socket, bytes], Awaitable[None]]
) -> bool:
    """Take connections. False: the process in front has ended without a word."""
    try:
        await channel.tell(hello)
    except ChannelEnded:
        return False
    while isinstance(message := await channel.receive(), Handed):
        await adopt(message.sock, message.received)
    return message is not None


async def _give_back(leaving: AsyncIterable[Handed], channel: Channel) -> None:
    """Connections whose next request is none of this shard's, to the process in front, which knows where it belongs."""
    async for handed in leaving:
        # Without a process in front, or room in the system, its client has to ask again.
        with handed.sock, suppress(ChannelEnded, OSError):
            await channel.hand_over(handed)


def main() -> None:
    """Who wants to stop the gateway may signal all its processes; the one in front tells this one."""
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_IGN)
    spec: ShardSpec = pickle.load(sys.stdin.buffer)
    anyio.run(run, spec, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
