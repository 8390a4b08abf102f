"""One HTTP request and its response over raw ASGI: capped body, writes that say whether they arrived, hanging up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
from starlette.types import Receive, Scope, Send

from rollwright.dialects import Problem
from rollwright.dialects.jsonio import dumps
from rollwright.errors import LimitError
from rollwright.gateway.coding import UnknownCoding, unpack
from rollwright.gateway.receipt import Receipt
from rollwright.gateway.routing import secret_of

if TYPE_CHECKING:
    from rollwright.gateway.connection import Connection
    from rollwright.gateway.session import Session

__all__ = ["MAX_BODY_BYTES", "ClientGone", "Exchange", "Refused"]

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Of a request, also after decompression."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class Refused(Exception):
    """The request gets `problem` for an answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Exchange:
    """One request of one client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        """Lower-case names; the last of equal ones."""
        self.gone = anyio.Event()
        """Set by `watch` when the client has closed the connection."""
        self._state: Mapping[str, Any] = scope["state"]
        self._receive = receive
        self._send = send

    @property
    def _connection(self) -> Connection:
        return self._state["connection"]

    @property
    def only(self) -> Session | None:
        """The one session whose key this listener accepts; None: any."""
        return self._state["only"]

    @property
    def secret(self) -> str:
        """The API key, wherever this client puts it."""
        return secret_of(self.headers)

    def admitted(self, session: Session) -> None:
        """The key is that session's. Raises `ClientGone` when its connections are too many; this one is closed."""
        if not self._connection.admit(session):
            raise ClientGone

    async def body(self) -> bytes:
        """The whole body as it came, for `unpacked`. Raises `Refused` when it is too large, `ClientGone`."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def watch(self) -> None:
        """Wait until the client has gone. A plain ASGI handler is never told otherwise."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The status line and headers."""
        packed = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": packed})
        self._connection.keep_for_the_receipt()

    async def write(self, data: bytes) -> None:
        """Part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> Receipt | None:
        """The last part of the body; after it the connection may be used again. None: the client has gone without it.

        The end of the body goes with its last part: a client that reads up to the wire's own last event has read all.
        """
        connection = self._connection
        await connection.drained()
        if self.gone.is_set() or connection.transport.is_closing():
            return None
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        await connection.drained()
        return connection.receipt()

    async def json(self, status: int, value: object) -> Receipt | None:
        """A whole JSON response."""
        data = dumps(value)
        await self.start(status, {"content-type": "application/json", "content-length": str(len(data))})
        return await self.finish(data)

    async def hang_up(self) -> None:
        """Close the connection in the middle of the response: what every CLI understands as "try again"."""
        self._connection.hang_up()
        await self.gone.wait()

    def unpacked(self, data: bytes) -> bytes:
        """The body that this is. May take a fraction of a second. Raises `Refused`."""
        coding = self.headers.get("content-encoding", "identity").lower()
        try:
            return unpack(data, coding, MAX_BODY_BYTES)
        except UnknownCoding as error:
            raise Refused(Problem(kind="coding", message=f"content-encoding: {error}")) from error
        except LimitError as error:
            raise _too_large() from error
        except ValueError as error:
            raise Refused(Problem(kind="malformed", message=f"body: not {coding}", field="body")) from error


def _too_large() -> Refused:
    return Refused(Problem(kind="too_large", message=f"the body is larger than {MAX_BODY_BYTES} bytes"))
