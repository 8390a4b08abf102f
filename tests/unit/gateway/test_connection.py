"""Sockets: what a connection is set to, and how many listeners one process can have."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import anyio
import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from rollwright.gateway.connection import Front

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
