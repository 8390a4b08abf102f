"""Sockets: what a connection is set to, and how many listeners one process can have."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import httpx2
import pytest
from anyio.abc import SocketStream
from starlette.types import Receive, Scope, Send

from rollwright.gateway.connection import Connection, Front, Strangers

pytestmark = pytest.mark.anyio


async def tell(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what the server's side of this connection is set to."""
    server = scope["state"]["connection"].transport.get_extra_info("socket")
    nodelay = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    text = f"{scope['state']['name']} {nodelay}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text})


def listening_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def test_events_are_not_held_back_by_the_kernel() -> None:
    sock = listening_socket()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with Front(tell).serving(sock, {"name": "box"}), httpx2.AsyncClient() as client:
        assert (await client.get(url)).text == "box 1"


async def test_hundreds_of_listeners_share_one_app_and_end_with_their_sockets() -> None:
    front = Front(tell)
    sockets = [listening_socket() for _ in range(300)]
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    async with AsyncExitStack() as stack:
        began = anyio.current_time()
        for index, sock in enumerate(sockets):
            await stack.enter_async_context(front.serving(sock, {"name": f"box{index}"}))
        assert anyio.current_time() - began < 2
        async with httpx2.AsyncClient() as client:
            for index in (0, 150, 299):
                assert (await client.get(urls[index])).text.startswith(f"box{index} ")
    assert all(sock.fileno() == -1 for sock in sockets)
    async with httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get(urls[0])


async def test_a_listener_turns_away_connections_beyond_its_limit_and_recovers() -> None:
    sock = listening_socket()
    port = sock.getsockname()[1]
    async with Front(tell).serving(sock, {"name": "box"}, max_connections=3), AsyncExitStack() as stack:
        held = [await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)) for _ in range(3)]
        async with await anyio.connect_tcp("127.0.0.1", port) as refused:
            with anyio.fail_after(5), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await refused.receive()
        await held[0].send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while b"box 1" not in answer:
            answer += await held[0].receive()
        await held[0].aclose()
        async with httpx2.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}")).text == "box 1"


# --------------------------------------------------------------------------- a socket that everyone can reach


OWNERS: dict[bytes, object] = {}


async def key_is_owner(scope: Scope, receive: Receive, send: Send) -> None:
    """Every key is known: it stands for itself."""
    connection: Connection = scope["state"]["connection"]
    key = dict(scope["headers"]).get(b"x-api-key")
    if key is None or connection.admit(OWNERS.setdefault(key, key)):
        await send({"type": "http.response.start", "status": 401 if key is None else 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})


async def ask(stream: SocketStream, key: str = "") -> bytes:
    shown = f"x-api-key: {key}\r\n" if key else ""
    await stream.send(f"GET / HTTP/1.1\r\nhost: x\r\n{shown}\r\n".encode())
    answer = b""
    while b"answer" not in answer:
        answer += await stream.receive()
    return answer


async def guest_of(connect: Callable[[], Awaitable[SocketStream]], key: str) -> SocketStream:
    """A connection that showed its key in time, however slow this machine is."""
    for _ in range(100):
        stream = await connect()
        try:
            assert b"200" in await ask(stream, key)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            continue
        return stream
    raise AssertionError("no connection was in time")


async def is_closed(stream: SocketStream) -> None:
    with anyio.fail_after(20):
        try:
            while True:
                await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return


@asynccontextmanager
async def public(
    *, seconds: float = 300, each: int = 100, most: int = 100
) -> AsyncGenerator[tuple[Front, Callable[[], Awaitable[SocketStream]]]]:
    sock = listening_socket()
    port = sock.getsockname()[1]
    front = Front(key_is_owner)
    strangers = Strangers(seconds=seconds, each=each)
    async with front.serving(sock, {}, max_connections=most, strangers=strangers), AsyncExitStack() as stack:

        async def connect() -> SocketStream:
            return await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port))

        yield front, connect


async def test_only_who_shows_a_key_in_time_may_stay() -> None:
    async with public(seconds=0.3) as (_, connect):
        known = await guest_of(connect, "key")
        silent, wrong = await connect(), await connect()
        await wrong.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await is_closed(silent)
        await is_closed(wrong)
        assert b"200" in await ask(known, "key")


async def test_who_sends_its_request_drop_by_drop_is_not_waited_for() -> None:
    async with public(seconds=0.3) as (_, connect):
        slow = await connect()
        await slow.send(b"GET / HTTP/1.1\r\nx-api-key: ke")
        await is_closed(slow)


async def test_headers_without_end_are_cut_off() -> None:
    async with public() as (_, connect):
        endless = await connect()
        await endless.send(b"GET / HTTP/1.1\r\nx-api-key: " + b"x" * 70_000)
        await is_closed(endless)


async def test_one_key_cannot_take_all_the_connections() -> None:
    async with public(each=2) as (_, connect):
        for _ in range(2):
            assert b"200" in await ask(await connect(), "greedy")
        third = await connect()
        await third.send(b"GET / HTTP/1.1\r\nhost: x\r\nx-api-key: greedy\r\n\r\n")
        await is_closed(third)
        assert b"200" in await ask(await connect(), "other")


async def test_strangers_make_room_for_who_comes_next_and_guests_do_not() -> None:
    async with public(most=2) as (_, connect):
        guest, stranger = await connect(), await connect()
        assert b"200" in await ask(guest, "one")
        assert b"401" in await ask(stranger)
        late = await connect()
        assert b"200" in await ask(late, "two")
        await is_closed(stranger)
        await is_closed(await connect())
        assert b"200" in await ask(guest, "one")


async def test_the_connections_of_a_key_that_is_no_more_are_strangers() -> None:
    async with public(seconds=0.3) as (front, connect):
        gone, stays = await guest_of(connect, "gone"), await guest_of(connect, "stays")
        front.disown(OWNERS[b"gone"])
        await is_closed(gone)
        assert b"200" in await ask(stays, "stays")
