"""What counts as delivered: replies that the kernel took from us, and clients that never read them.

The client is a plain blocking socket in the event loop's own thread: what it does between two awaits is in the kernel
before the gateway hears of any of it.
"""

from __future__ import annotations

import gc
import json
import socket
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollwright.gateway.connection import Connection
from rollwright.gateway.log import read_turn_log
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway, scripted_engine
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio

FIRST: list[Any] = [{"role": "user", "content": "hi"}]
ENDS = {True: b"[DONE]\n\n\r\n0\r\n\r\n", False: b"}"}
each_form = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
kept_or_not = pytest.mark.parametrize("kept", [True, False], ids=["keep-alive", "close"])


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The gateway runs on uvloop; who embeds it may not."""
    return "asyncio", {"use_uvloop": request.param}


class Client:
    """One connection."""

    def __init__(self, loop: LoopbackGateway, *, receive_buffer: int | None = None) -> None:
        self._key = loop.session.secret
        self._sock = socket.socket()
        if receive_buffer is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._sock.connect(("127.0.0.1", int(loop.url.rpartition(":")[2])))

    def ask(
        self,
        messages: list[Any] = FIRST,
        *,
        stream: bool = True,
        kept: bool = True,
        head: str = "POST /v1/chat/completions",
    ) -> None:
        data = json.dumps({"messages": messages, "stream": stream}).encode()
        wish = "" if kept else "connection: close\r\n"
        lines = f"{head} HTTP/1.1\r\nhost: x\r\n{wish}authorization: Bearer {self._key}\r\n"
        self._sock.sendall(f"{lines}content-length: {len(data)}\r\n\r\n".encode() + data)

    async def read(self, end: bytes = ENDS[True], *, at_end: bool = True) -> str:
        """The text of the reply. Fails where the gateway closes before its end."""
        seen = b""
        while not (seen.endswith(end) if at_end else end in seen):
            await anyio.wait_readable(self._sock)
            seen += self._sock.recv(1 << 20) or b"closed"
            assert not seen.endswith(b"closed"), seen
        texts = [json.loads(line[6:]) for line in seen.split(b"\n") if line.startswith(b'data: {"')]
        return "".join(choice["delta"].get("content", "") for text in texts for choice in text["choices"])

    def read_at_once(self) -> None:
        """What the kernel has."""
        self._sock.recv(1 << 20)

    def say(self, data: bytes) -> None:
        self._sock.sendall(data)

    def reset(self) -> None:
        """Break the connection, whatever has been read."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def close(self) -> None:
        """In order, if all has been read; with something unread the kernel makes it a reset."""
        self._sock.close()

    def say_no_more(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)


@contextmanager
def client_of(loop: LoopbackGateway, **options: Any) -> Generator[Client]:
    client = Client(loop, **options)
    try:
        yield client
    finally:
        client.close()


def marks_of(log: Path) -> list[str]:
    kinds = [json.loads(line)["kind"] for line in log.read_bytes().split(b"\n")[:-1]]
    return [kind for kind in kinds if kind in ("delivered", "undelivered")]


async def marked(log: Path, *marks: str) -> None:
    """Until the log says this, and nothing else, of deliveries."""
    with anyio.fail_after(60):
        while True:
            if marks_of(log) == list(marks):
                return
            await anyio.sleep(0.01)


async def left_unread(loop: LoopbackGateway, engine: WatchedEngine, log: Path, **asked: Any) -> Client:
    """A client that has the whole reply in its kernel, and has been taken for one that has it."""
    client = Client(loop)
    client.ask(**asked)
    await engine.called(1)
    await engine.settled()
    await marked(log, "delivered")
    return client


@each_form
@kept_or_not
async def test_a_reply_thrown_away_unread_is_no_turn_and_the_retry_gets_it(
    renderer: TemplateRenderer, tmp_path: Path, stream: bool, kept: bool
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first", "second")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        client = await left_unread(loop, engine, log, stream=stream, kept=kept)
        client.close()
        await marked(log, "delivered", "undelivered")
        assert [turn.delivered for turn in read_turn_log(log).trajectory.turns] == [False]
        with client_of(loop) as again:
            again.ask()
            assert await again.read() == "first"
            await marked(log, "delivered", "undelivered", "delivered")
        trajectory = await loop.session.close()
    assert len(engine.calls) == 1
    assert [turn.delivered for turn in trajectory.turns] == [True]
    assert read_turn_log(log).trajectory.turns == trajectory.turns


@each_form
@kept_or_not
async def test_a_reply_thrown_away_at_the_end_of_a_run_trains_nothing(
    renderer: TemplateRenderer, tmp_path: Path, stream: bool, kept: bool
) -> None:
    """The session closes before the event loop can have heard of it."""
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        client = await left_unread(loop, engine, log, stream=stream, kept=kept)
        client.close()
        trajectory = await loop.session.close()
    assert [turn.delivered for turn in trajectory.turns] == [False]
    assert read_turn_log(log).trajectory.turns == trajectory.turns


@each_form
@kept_or_not
async def test_a_retry_that_comes_together_with_the_reset_is_one(
    renderer: TemplateRenderer, tmp_path: Path, stream: bool, kept: bool
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first", "second")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        client = await left_unread(loop, engine, log, stream=stream, kept=kept)
        client.close()
        with client_of(loop) as again:
            again.ask()
            assert await again.read() == "first"
    assert len(engine.calls) == 1


async def test_a_reply_that_was_on_its_way_when_the_client_closed_is_taken_back(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    """An orderly end acknowledges what came before it: this one does not."""
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "so it is. " * 4000)
    async with (
        loopback_gateway(
            renderer, engine, log=log, sampling=Sampling(max_new_tokens=100_000), send_buffer=1 << 20
        ) as loop,
    ):
        with client_of(loop, receive_buffer=4096) as client:
            client.ask()
            await marked(log, "delivered")
            client.say_no_more()
            await marked(log, "delivered", "undelivered")
        assert [turn.delivered for turn in (await loop.session.close()).turns] == [False]


@kept_or_not
async def test_a_client_that_has_read_all_and_closes_has_it(
    renderer: TemplateRenderer, tmp_path: Path, kept: bool
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first", "second")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        with client_of(loop) as client:
            client.ask(kept=kept)
            assert await client.read() == "first"
        with client_of(loop) as another:
            another.ask()
            assert await another.read() == "second"
        trajectory = await loop.session.close()
    assert [turn.delivered for turn in trajectory.turns] == [True, True]


@each_form
@kept_or_not
async def test_an_orderly_end_that_the_event_loop_has_not_heard_of_is_none_of_a_reset(
    renderer: TemplateRenderer, tmp_path: Path, stream: bool, kept: bool
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        client = await left_unread(loop, engine, log, stream=stream, kept=kept)
        client.read_at_once()
        client.close()
        trajectory = await loop.session.close()
    assert [turn.delivered for turn in trajectory.turns] == [True]


async def test_one_byte_more_is_no_request_that_shows_that_the_reply_was_read(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        client = await left_unread(loop, engine, log)
        client.say(b"G")
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        client.reset()
        trajectory = await loop.session.close()
    assert [turn.delivered for turn in trajectory.turns] == [False]


async def test_a_request_on_the_same_connection_shows_that_the_reply_was_read(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        client = Client(loop)
        client.ask()
        await client.read()
        client.ask(head="GET /v1/models")
        await client.read(b"}")
        client.reset()
        trajectory = await loop.session.close()
    assert [turn.delivered for turn in trajectory.turns] == [True]


async def test_who_reads_all_and_resets_has_it_only_if_it_goes_on_from_it(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    """From outside, this reset cannot be told from one that threw the reply away; what follows tells."""
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first", "second")
    async with loopback_gateway(renderer, engine, log=log) as loop:
        messages = list(FIRST)
        for said in ("first", "second"):
            client = Client(loop)
            client.ask(messages)
            assert await client.read() == said
            client.reset()
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        trajectory = await loop.session.close()
    assert [(turn.parent, turn.delivered) for turn in trajectory.turns] == [(None, True), (0, False)]
    assert read_turn_log(log).trajectory.turns == trajectory.turns


async def test_one_of_two_readers_is_enough(renderer: TemplateRenderer, tmp_path: Path) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first")
    engine.hold()
    async with loopback_gateway(renderer, engine, log=log, keepalive_seconds=0.01) as loop:
        with client_of(loop) as reader:
            other = Client(loop)
            for client in (reader, other):
                client.ask()
                await client.read(b"\r\n\r\n", at_end=False)
            engine.release()
            assert await reader.read() == "first"
            await marked(log, "delivered")
            other.reset()
        trajectory = await loop.session.close()
    assert len(engine.calls) == 1
    assert [turn.delivered for turn in trajectory.turns] == [True]


@kept_or_not
@pytest.mark.parametrize("leave", [Client.reset, Client.close])
async def test_nothing_is_kept_of_a_connection_that_has_ended(
    renderer: TemplateRenderer, kept: bool, leave: Callable[[Client], None]
) -> None:
    def held() -> int:
        gc.collect()
        return sum(isinstance(thing, Connection) for thing in gc.get_objects())

    of_others = held()
    async with loopback_gateway(renderer, scripted_engine(renderer, "first")) as loop:
        for number in range(5):
            client = Client(loop)
            client.ask([{"role": "user", "content": f"hi {number}"}], kept=kept)
            await client.read()
            leave(client)
        with anyio.fail_after(60):
            while True:
                if held() <= of_others:
                    break
                await anyio.sleep(0.05)


async def test_a_client_that_wants_its_connection_closed_gets_its_end(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "first")) as loop:
        stream = await anyio.connect_tcp("127.0.0.1", int(loop.url.rpartition(":")[2]))
        async with stream:
            head = (
                f"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: {loop.session.secret}\r\n\r\n"
            )
            await stream.send(head.encode())
            seen = b"".join([part async for part in stream])
            assert b"connection: close\r\n" in seen.lower()
            # Nothing more is answered here.
            await stream.send(head.encode())
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
