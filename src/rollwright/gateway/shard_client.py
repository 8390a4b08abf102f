"""Asks the other gateway processes on this machine questions, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import anyio
import httpx2

__all__ = ["NotThere", "ShardClient", "Unreachable"]


class Unreachable(Exception):
    """The other process does not answer, or ended before its reply did."""


class NotThere(Unreachable):
    """Nobody is there: it has not got the question."""


class ShardClient:
    """One pooled client."""

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

    async def ask(
        self, port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `Unreachable`."""
        try:
            reply = await self._client.request(
                method, f"http://127.0.0.1:{port}{path}", content=body, headers=dict(headers)
            )
        except httpx2.TransportError as error:
            kind = NotThere if isinstance(error, httpx2.ConnectError) else Unreachable
            raise kind(str(error) or type(error).__name__) from error
        return reply.status_code, reply.content
