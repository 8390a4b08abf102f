"""Talks to the gateway's other processes on this machine: passes requests on, asks questions."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import anyio
import httpx2
from starlette.types import Receive, Scope, Send

from rollwright.concurrency import plain_errors
from rollwright.gateway.exchange import MAX_BODY_BYTES

__all__ = ["Forwarder", "Unreachable"]

_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
"""Headers between two neighbours alone."""


class Unreachable(Exception):
    """The other process does not answer, or ended before its reply did."""


class Forwarder:
    """One pooled client. A reply counts as delivered when it has come this far: that a client left while it was being
    passed on is seen only before its end."""

    def __init__(self) -> None:
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
            verify=False,  # over http there are no certificates
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._client.aclose()

    async def __call__(self, port: int, scope: Scope, receive: Receive, send: Send) -> None:
        """To `port` of this machine. Raises `Unreachable`; the client's leaving ends the request there."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False) and len(body) <= MAX_BODY_BYTES
        headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in _HOP]
        query = scope["query_string"].decode("latin-1")
        url = f"http://127.0.0.1:{port}{scope['raw_path'].decode('latin-1')}" + (f"?{query}" if query else "")
        with _unreachable(), plain_errors():
            await self._pass_on(url, bytes(body), headers, scope, receive, send)

    async def ask(
        self, port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `Unreachable`."""
        with _unreachable():
            reply = await self._client.request(
                method, f"http://127.0.0.1:{port}{path}", content=body, headers=dict(headers)
            )
        return reply.status_code, reply.content

    async def _pass_on(
        self, url: str, body: bytes, headers: list[tuple[bytes, bytes]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            async with self._client.stream(scope["method"], url, content=body, headers=headers) as reply:
                kept = [
                    (name, value) for name, value in reply.headers.raw if name.decode("latin-1").lower() not in _HOP
                ]
                await send({"type": "http.response.start", "status": reply.status_code, "headers": kept})
                async for part in reply.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            group.cancel_scope.cancel()


@contextmanager
def _unreachable() -> Generator[None]:
    try:
        yield
    except httpx2.TransportError as error:
        raise Unreachable(str(error) or type(error).__name__) from error
