"""The processes of a sharded gateway, kept alive: one that dies is started again on its folder."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import NoReturn

import anyio
from anyio.abc import Process, TaskGroup

from rollwright.errors import ConfigError, InfraError
from rollwright.gateway.handover import Channel, ChannelEnded, Handed
from rollwright.gateway.shard import ShardSpec

__all__ = ["ShardPool", "shard_pool"]

_log = logging.getLogger("rollwright.gateway")

_READY_SECONDS = 60.0
"""How long a request waits for a shard that is being started."""
_STOP_SECONDS = 1.0
"""How long it may take to tell a shard to stop."""
_END_SECONDS = 20.0
"""How long a shard may take to close its sessions."""
_AGAIN_SECONDS = (0.1, 1.0, 10.0)
"""Before a shard that died without having served is started again; after the last of these it is given up."""


class _Shard:
    """One process, over its lives."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.channel: Channel | None = None
        """While it serves."""
        self.serves = anyio.Event()
        """Set while it serves; made anew when it dies."""
        self.died = anyio.Event()
        """Set when it dies, and made anew."""
        self.lives = 0
        """How often it has come to serve."""
        self.port = 0
        self.sessions = 0
        """Taken up when it was started last."""
        self.error = ""
        """Why it cannot start."""


class ShardPool:
    """Made by `shard_pool`."""

    def __init__(self, spec: ShardSpec, take_back: Callable[[Handed], None]) -> None:
        self.paused = False
        """A shard that is started now lets no engine call begin."""
        self.failed = False
        """All end because of an error: their sessions stay open for the next ones."""
        self._take_back = take_back
        self._shards = [
            _Shard(replace(spec, index=index, folder=None if spec.folder is None else spec.folder / f"shard-{index}"))
            for index in range(spec.count)
        ]

    @property
    def count(self) -> int:
        return len(self._shards)

    async def serve(self) -> int:
        """Wait until all of them do; how many sessions they took up."""
        for shard in self._shards:
            await shard.serves.wait()
        return sum(shard.sessions for shard in self._shards)

    async def port(self, index: int) -> int:
        """Of a shard, once it serves. Raises `InfraError` for one that does not in time."""
        return (await self._serving(index)).port

    async def dead(self, index: int, port: int) -> None:
        """Wait until the process that answered at `port`, and does not any more, is known to have ended. Raises
        `InfraError` when it is not in time."""
        shard = self._shards[index]
        if shard.port == port and shard.serves.is_set():
            with anyio.move_on_after(_END_SECONDS):
                await shard.died.wait()
                return
            raise InfraError(f"gateway shard {index} does not answer")

    async def give(self, index: int, handed: Handed) -> None:
        """Hand a connection over. Raises like `port`, and `OSError` where the system has no room for it."""
        while True:
            shard = await self._serving(index)
            assert shard.channel is not None
            died = shard.died
            try:
                return await shard.channel.hand_over(handed)
            except ChannelEnded:
                await died.wait()

    async def _serving(self, index: int) -> _Shard:
        shard = self._shards[index]
        with anyio.move_on_after(_READY_SECONDS):
            await shard.serves.wait()
        if not shard.serves.is_set():
            raise InfraError(f"gateway shard {index} is not there")
        return shard

    # ----------------------------------------------------------------------- lives

    async def keep(self, shard: _Shard) -> NoReturn:
        """Start it, and again whenever it dies. Raises `ConfigError`, `InfraError`."""
        vain = 0
        while True:
            lives = shard.lives
            code = await _live(replace(shard.spec, paused=self.paused))
            if shard.error:
                self.failed = True
                raise ConfigError(shard.error)
            vain = 0 if shard.lives > lives else vain + 1
            if vain > len(_AGAIN_SECONDS):
                self.failed = True
                raise InfraError(f"gateway shard {shard.spec.index} does not start (exit code {code})")
            _log.warning("gateway shard %d ended with code %s and is started again", shard.spec.index, code)
            if vain:
                await anyio.sleep(_AGAIN_SECONDS[vain - 1])

    def start(self, group: TaskGroup) -> None:
        for shard in self._shards:
            group.start_soon(self.keep, shard)

    async def accept(self, listener: socket.socket, group: TaskGroup) -> NoReturn:
        """The channels that the processes open."""
        while True:
            channel, _ = await asyncio.get_running_loop().sock_accept(listener)
            group.start_soon(self._listen_to, channel)

    async def _listen_to(self, sock: socket.socket) -> None:
        """What a process says of itself, and the connections it gives back, until it dies."""
        with sock:
            channel = Channel(sock)
            told = await channel.receive()
            if not isinstance(told, dict):
                return
            shard = self._shards[int(told["shard"])]
            if "error" in told:
                shard.error = told["error"]
                return
            shard.channel, shard.port, shard.sessions = channel, told["port"], told["sessions"]
            shard.lives += 1
            shard.serves.set()
            try:
                while isinstance(handed := await channel.receive(), Handed):
                    self._take_back(handed)
            finally:
                shard.channel, shard.serves = None, anyio.Event()
                shard.died.set()
                shard.died = anyio.Event()
                if not self.failed:
                    with anyio.move_on_after(_STOP_SECONDS, shield=True), suppress(ChannelEnded):
                        await channel.tell({"stop": True})
                channel.end()


@asynccontextmanager
async def shard_pool(spec: ShardSpec, take_back: Callable[[Handed], None]) -> AsyncGenerator[ShardPool]:
    """All the shards of `spec.count`. At the end they have ended, and have closed their sessions unless it was an error
    that ended them.

    `take_back`: takes connections whose next request belongs elsewhere. Raises `ConfigError`, and `InfraError` for a
    shard that does not start, whenever that turns out.
    """
    pool = ShardPool(spec, take_back)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(spec.channel)
        listener.listen(spec.count)
        listener.setblocking(False)
        async with anyio.create_task_group() as group:
            group.start_soon(pool.accept, listener, group)
            pool.start(group)
            try:
                yield pool
            except Exception:
                pool.failed = True
                raise
            finally:
                group.cancel_scope.cancel()


async def _live(spec: ShardSpec) -> int | None:
    """One life of its process; its exit code."""
    process = await anyio.open_process(
        [sys.executable, "-m", "rollwright.gateway.shard"], stdin=-1, stdout=None, stderr=None
    )
    try:
        assert process.stdin is not None
        try:
            await process.stdin.send(pickle.dumps(spec))
            await process.stdin.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # It died before it read this; its code says more.
            pass
        return await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: Process) -> None:
    """It knows that it has to: it was told to stop, or its channel is closed."""
    with anyio.move_on_after(_END_SECONDS):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.aclose()
