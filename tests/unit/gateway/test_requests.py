"""Requests on the socket: keys, bodies, routes, retries and clients that leave, byte by byte."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import SocketStream

from rollwright.errors import StoreError
from rollwright.gateway.exchange import MAX_BODY_BYTES
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.session import SessionLimits
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway, scripted_engine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
LONG = "the fix is done. " * 4000


def body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


@asynccontextmanager
async def client_of(loop: LoopbackGateway, key: str | None = None) -> AsyncGenerator[httpx2.AsyncClient]:
    secret = loop.session.secret if key is None else key
    async with httpx2.AsyncClient(
        base_url=loop.url, headers={"authorization": f"Bearer {secret}"}, timeout=30
    ) as client:
        yield client


@asynccontextmanager
async def raw_request(
    loop: LoopbackGateway, *, receive_buffer: int | None = None, **more: Any
) -> AsyncGenerator[SocketStream]:
    """A connection on which a request has been sent and nothing has been read."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    host, port = loop.url.removeprefix("http://").split(":")
    await anyio.to_thread.run_sync(lambda: (sock.setblocking(True), sock.connect((host, int(port)))))
    data = json.dumps(body(**more)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {loop.session.secret}\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    async with await SocketStream.from_socket(sock) as stream:
        await stream.send(head.encode() + data)
        yield stream


# --------------------------------------------------------------------------- keys and routes


async def test_every_route_wants_a_key(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop, "wrong") as client:
        for method, path in [
            ("POST", "/v1/messages"),
            ("POST", "/v1/messages?beta=true"),
            ("POST", "/v1/messages/count_tokens"),
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/policy"),
        ]:
            response = await client.request(method, path, json=body())
            assert response.status_code == 401, path
            assert response.json()["error"]["message"] == "unknown API key"
        missing = await client.post(CHAT, json=body(), headers={"authorization": ""})
        assert missing.status_code == 401


async def test_a_key_is_taken_from_either_header(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop, "wrong") as client:
        for headers in ({"x-api-key": loop.session.secret}, {"authorization": f"bearer {loop.session.secret}"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_listener_of_one_session_takes_no_other_key(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        other = loop.gateway.open("task.2", log=None, limits=SessionLimits())
        async with client_of(loop, other.secret) as client:
            assert (await client.post(CHAT, json=body())).status_code == 401
            await other.close()
            assert (await client.post(CHAT, json=body())).status_code == 401
        shared = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{shared.getsockname()[1]}"
        async with loop.gateway.listening(shared), client_of(loop) as client:
            assert (await client.post(f"{url}{CHAT}", json=body())).status_code == 200
            closed = await client.post(f"{url}{CHAT}", json=body(), headers={"x-api-key": other.secret})
            assert closed.status_code == 400
        assert shared.fileno() == -1


@pytest.mark.parametrize("key", ["", "x-api-key: wrong\r\n"])
async def test_on_a_public_listener_nothing_is_read_of_who_has_no_key(renderer: TemplateRenderer, key: str) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        public = socket.create_server(("127.0.0.1", 0))
        port = public.getsockname()[1]
        async with loop.gateway.listening(public), await anyio.connect_tcp("127.0.0.1", port) as stream:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{key}content-length: 1000000000\r\n\r\n"
            await stream.send(head.encode())
            assert (await stream.receive()).startswith(b"HTTP/1.1 401")


async def test_a_key_of_a_public_listener_sends_no_more_than_others(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        public = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{public.getsockname()[1]}"
        async with loop.gateway.listening(public), client_of(loop) as client:
            huge = await client.post(f"{url}{CHAT}", content=bytes(MAX_BODY_BYTES + 1))
            assert huge.status_code == 413


@pytest.mark.parametrize(
    ("method", "path"),
    [("HEAD", "/api/hello"), ("GET", "/"), ("GET", CHAT), ("GET", "/v1/responses"), ("POST", "/v1/embeddings")],
)
async def test_anything_else_is_not_found_at_once(renderer: TemplateRenderer, method: str, path: str) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        with anyio.fail_after(2):
            assert (await client.request(method, path)).status_code == 404


async def test_what_is_no_http_is_refused_and_the_gateway_goes_on(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        host, port = loop.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(b"\x16\x03\x01\x02\x00garbage\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 400")
        async with client_of(loop) as client:
            assert (await client.post(CHAT, json=body())).status_code == 200


# --------------------------------------------------------------------------- bodies


async def test_a_packed_body_is_understood(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        packed = gzip.compress(json.dumps(body()).encode())
        response = await client.post(CHAT, content=packed, headers={"content-encoding": "gzip"})
        assert response.json()["choices"][0]["message"]["content"] == "x"


async def test_zstd_is_refused_clearly_where_its_package_is_missing(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        response = await client.post(CHAT, content=b"x", headers={"content-encoding": "zstd"})
        assert response.status_code == 415
        assert "rollwright[zstd]" in response.json()["error"]["message"]


async def test_a_zstd_body_is_understood_where_its_package_is_there(renderer: TemplateRenderer) -> None:
    zstandard = pytest.importorskip("zstandard")
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        for content, status in (
            (zstandard.compress(json.dumps(body()).encode()), 200),
            (zstandard.compress(b" " * (MAX_BODY_BYTES + 1)), 413),
            (b"plain", 400),
        ):
            response = await client.post(CHAT, content=content, headers={"content-encoding": "zstd"})
            assert response.status_code == status


async def test_a_websocket_upgrade_is_refused_at_once(renderer: TemplateRenderer) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        "sec-websocket-version": "13",
    }
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        assert (await client.get("/v1/responses", headers=upgrade)).status_code == 404


@pytest.mark.parametrize(
    ("content", "coding", "status", "said"),
    [
        (gzip.compress(b" " * (MAX_BODY_BYTES + 1)), "gzip", 413, "larger than"),
        (b"plain", "gzip", 400, "body: not gzip"),
        (b"plain", "br", 415, "content-encoding: br"),
        (b"{", "identity", 400, "body: not usable JSON"),
        (b"[]", "identity", 400, "body: must be an object"),
        (b'{"messages": [{"role": "user", "content": "\\xff"}]}', "identity", 400, "body"),
        (b'{"messages": ' + b"[" * 100_000, "identity", 400, "body"),
    ],
    ids=["bomb", "not-gzip", "brotli", "torn", "array", "bad-escape", "nested"],
)
async def test_a_bad_body_is_the_clients_error(
    renderer: TemplateRenderer, content: bytes, coding: str, status: int, said: str
) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        response = await client.post(CHAT, content=content, headers={"content-encoding": coding})
        assert response.status_code == status
        assert said in response.json()["error"]["message"]
        assert loop.session.last_error is None


async def test_an_endless_body_is_cut_off(renderer: TemplateRenderer) -> None:
    async def endless() -> AsyncGenerator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        response = await client.post(CHAT, content=endless())
        assert response.status_code == 413


async def test_a_client_that_leaves_within_its_body_costs_nothing(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, "x")
    async with loopback_gateway(renderer, engine) as loop:
        host, port = loop.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {loop.session.secret}\r\n"
            await stream.send(f"{head}content-length: 5000\r\n\r\n{{".encode())
        async with client_of(loop) as client:
            await client.post(CHAT, json=body())
        assert len(engine.calls) == 1


async def test_a_conversation_the_template_refuses_is_the_clients_error(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop, client_of(loop) as client:
        response = await client.post(
            "/v1/messages", json={"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]}
        )
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert loop.session.last_error is None


# --------------------------------------------------------------------------- retries and delivery


async def test_a_reply_that_was_not_read_to_its_end_is_replayed_and_is_one_turn(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, LONG, "something else")
    async with (
        loopback_gateway(renderer, engine, log=log, sampling=_long(), send_buffer=4096) as loop,
        client_of(loop) as client,
    ):
        async with raw_request(loop, receive_buffer=4096) as stream:
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")
            await engine.settled()
        marks: list[bytes] = []
        while not marks:
            await anyio.sleep(0.01)
            marks = [line for line in log.read_bytes().splitlines() if b'delivered"' in line]
        assert json.loads(marks[-1]) == {"kind": "undelivered", "index": 0}
        assert [turn.delivered for turn in read_turn_log(log).trajectory.turns] == [False]

        again = await client.post(CHAT, json=body())
        assert again.json()["choices"][0]["message"]["content"] == LONG
        trajectory = await loop.session.close()
    assert len(engine.calls) == 1
    assert [turn.delivered for turn in trajectory.turns] == [True]
    assert read_turn_log(log).trajectory.turns == trajectory.turns


async def test_a_reply_nobody_read_stays_undelivered(renderer: TemplateRenderer, tmp_path: Path) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, LONG)
    async with loopback_gateway(renderer, engine, log=log, sampling=_long(), send_buffer=4096) as loop:
        async with raw_request(loop, receive_buffer=4096, stream=True) as stream:
            await stream.receive()
            await engine.settled()
        trajectory = await loop.session.close()
    assert [turn.delivered for turn in trajectory.turns] == [False]
    assert read_turn_log(log).trajectory.turns == trajectory.turns


async def test_a_client_that_reads_all_and_leaves_at_once_has_it(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, "x")
    async with loopback_gateway(renderer, engine) as loop:
        for index in range(20):
            seen = b""
            async with raw_request(loop, text=str(index), stream=True) as stream:
                while b"[DONE]" not in seen:
                    seen += await stream.receive()
        trajectory = await loop.session.close()
    assert [turn.delivered for turn in trajectory.turns] == [True] * 20


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k1"}])
async def test_a_retry_that_says_so_is_replayed_even_after_delivery(
    renderer: TemplateRenderer, headers: dict[str, str]
) -> None:
    engine = scripted_engine(renderer, "first", "second")
    first = {"idempotency-key": "k1"}
    async with loopback_gateway(renderer, engine) as loop, client_of(loop) as client:
        one = await client.post(CHAT, json=body(), headers=first)
        two = await client.post(CHAT, json=body(), headers=headers)
        assert one.json() == two.json()
        three = await client.post(CHAT, json=body(), headers={"idempotency-key": "k2"})
        assert three.json()["choices"][0]["message"]["content"] == "second"
        assert loop.session.turns == 2


async def test_the_same_words_of_another_agent_are_another_turn(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, "x")
    engine.hold()
    async with (
        loopback_gateway(renderer, engine) as loop,
        client_of(loop) as client,
        anyio.create_task_group() as group,
    ):
        for agent in ("a", "b"):
            headers = {"x-claude-code-agent-id": agent}

            async def ask(headers: dict[str, str]) -> None:
                assert (await client.post(CHAT, json=body(), headers=headers)).status_code == 200

            group.start_soon(ask, headers)
        await engine.called(2)
        engine.release()
    trajectory = await loop.session.close()
    assert [turn.role for turn in trajectory.turns] == ["subagent", "subagent"]


async def test_a_stream_joined_by_a_plain_request_is_one_turn_in_two_forms(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, "x")
    engine.hold()
    async with loopback_gateway(renderer, engine) as loop, client_of(loop) as client:
        replies: list[httpx2.Response] = []

        async def ask() -> None:
            replies.append(await client.post(CHAT, json=body(stream=False, max_tokens=8)))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await engine.called(1)
            async with client.stream("POST", CHAT, json=body(stream=True, max_tokens=9)) as stream:
                # Its headers are here, so it has joined.
                engine.release()
                assert b"[DONE]" in await stream.aread()
        kinds = [reply.headers["content-type"].split(";")[0] for reply in (*replies, stream)]
        assert kinds == ["application/json", "text/event-stream"]
        assert len(engine.calls) == 1


# --------------------------------------------------------------------------- ends


async def test_closing_a_session_stops_its_generations_and_hangs_up(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, "x")
    engine.hold()
    async with loopback_gateway(renderer, engine) as loop, client_of(loop) as client:

        async def streamed() -> None:
            with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
                await client.post(CHAT, json=body("a", stream=True))

        async def plain() -> None:
            response = await client.post(CHAT, json=body("b"))
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "session_closed"

        async with anyio.create_task_group() as group:
            group.start_soon(streamed)
            group.start_soon(plain)
            await engine.called(2)
            with anyio.fail_after(2):
                trajectory = await loop.session.close()
        assert trajectory.turns == []
        assert [call.outcome for call in engine.calls] == ["cancelled", "cancelled"]
        assert await loop.session.close() is trajectory


async def test_a_listener_ends_though_a_client_stays_connected(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, "x")
    with anyio.fail_after(5):
        async with loopback_gateway(renderer, engine) as loop:
            host, port = loop.url.removeprefix("http://").split(":")
            idle = await anyio.connect_tcp(host, int(port))
            async with client_of(loop) as client:
                await client.post(CHAT, json=body())
        async with idle:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await idle.receive()


async def test_an_error_inside_the_gateway_leaves_it_as_itself(renderer: TemplateRenderer) -> None:
    with pytest.raises(StoreError, match="the disk is full"):
        async with loopback_gateway(renderer, scripted_engine(renderer, "x")):
            raise StoreError("the disk is full")


async def test_a_log_that_cannot_be_written_ends_the_session_as_our_failure(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    with pytest.raises(StoreError):
        async with loopback_gateway(renderer, scripted_engine(renderer, "x"), log=tmp_path / "no" / "turns.log"):
            pass
    log = tmp_path / "turns.log"
    async with loopback_gateway(renderer, scripted_engine(renderer, LONG), log=log, sampling=_long()) as loop:
        with file_size_limit(20_000):
            async with client_of(loop) as client:
                assert (await client.post(CHAT, json=body())).status_code == 500
            assert isinstance(loop.session.last_error, StoreError)
            assert loop.session.limit_reason == "failures"
        with pytest.raises(StoreError, match="cannot be written"):
            await loop.session.close()
        (turn,) = (await loop.session.close()).turns
        assert not turn.delivered
    logged = read_turn_log(log)
    assert not logged.sealed
    assert logged.trajectory.turns == []


@contextmanager
def file_size_limit(size: int) -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _long() -> Sampling:
    return Sampling(max_new_tokens=100_000)
