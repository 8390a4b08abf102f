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
from rollwright.gateway.routing import secret_of

if TYPE_CHECKING:
    from rollwright.gateway.connection import Connection
    from rollwright.gateway.session import Session

__all__ = ["MAX_BODY_BYTES", "ClientGone", "Exchange", "Refused"]

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Of a request, also after decompression."""

# Loop turns in which the end of a connection that was already broken is noticed.
_SETTLE_TURNS = 3


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
    def only(self) -> Session | None:
        """The one session whose key this listener accepts; None: any."""
        return self._state["only"]

    @property
    def secret(self) -> str:
        """The API key, wherever this client puts it."""
        return secret_of(self.headers)

    def admitted(self, session: Session) -> None:
        """The key is that session's. Raises `ClientGone` when its connections are too many; this one is closed."""
        connection: Connection = self._state["connection"]
        if not connection.admit(session):
            raise ClientGone

    async def body(self) -> bytes:
        """The whole body, unpacked. Raises `Refused` when it is too large or packed badly, `ClientGone`."""
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
                return self._unpacked(b"".join(parts))

    async def watch(self) -> None:
        """Wait until the client has gone. A plain ASGI handler is never told otherwise."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The status line and headers."""
        packed = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": packed})

    async def write(self, data: bytes) -> None:
        """Part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> bool:
        """The last part of the body; whether the client got all of it, as far as this side can know.

        True: the kernel took every byte while the client was there, and the client did not reset the connection,
        which is what a close with unread data does. A client that has read all and leaves at once did get it.
        """
        if self.gone.is_set():
            return False
        await self.write(data)
        await self.write(b"")  # returns when the write buffer is empty
        for _ in range(_SETTLE_TURNS):
            await anyio.lowlevel.checkpoint()
        connection: Connection = self._state["connection"]
        return not connection.broken

    async def end(self) -> None:
        """The response is complete; the connection may be used again."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def json(self, status: int, value: object) -> bool:
        """A whole JSON response; whether the client got it."""
        data = dumps(value)
        await self.start(status, {"content-type": "application/json", "content-length": str(len(data))})
        received = await self.finish(data)
        await self.end()
        return received

    async def hang_up(self) -> None:
        """Close the connection in the middle of the response: what every CLI understands as "try again"."""
        connection: Connection = self._state["connection"]
        connection.hang_up()
        await self.gone.wait()

    def _unpacked(self, data: bytes) -> bytes:
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
