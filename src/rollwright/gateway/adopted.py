"""A connection that another process accepted, and that goes on to yet another when its next request belongs there.

A client may use one connection for the keys of several shards, and for the admin routes. The reply to each request is
written by the process that knows whether it must arrive: the socket travels, not the reply.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from rollwright.gateway.connection import HEAD_BYTES, Connection
from rollwright.gateway.handover import Handed
from rollwright.gateway.routing import head_of

__all__ = ["Adopted", "Elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Where the requests belong that are none of this process's."""

    has: Callable[[str, Mapping[str, str]], bool]
    """Whether that is so for a request of this path and these headers (lower-case names)."""
    take: Callable[[Handed], None]
    """Takes a connection away; must not block."""


class Adopted(Connection):
    """Served with `Elsewhere` in its state under `elsewhere`.

    The head of a request is read here first, and what belongs elsewhere is never shown to the parser. Only a request
    that came in one piece with the end of the one before it is seen too late for that: the connection is closed, and
    its client has to ask again.
    """

    _begun = False
    """The parser is within a request."""
    _unparsed = b""
    """What came of the next request."""
    _leaving = False
    """That one belongs elsewhere."""
    _read = False
    """The head that the parser gets now has been read here."""
    _stray = False
    """It has not, and its request belongs elsewhere."""

    def data_received(self, data: bytes) -> None:
        if self._begun or self._said_farewell:
            self._parse(data)
            return
        self._unparsed += data
        head = None if self._leaving else head_of(self._unparsed)
        if head is not None and not self._elsewhere.has(*head):
            data, self._unparsed, self._read = self._unparsed, b"", True
            self._parse(data)
        elif head is not None:
            self._leaving = True
            self._leave()
        elif len(self._unparsed) > HEAD_BYTES:
            if self._leaving:
                self.flow.pause_reading()
            else:
                self.hang_up()

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if not self._read:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
            # Also of three in one piece, of which the third is ours again.
            self._stray = self._stray or self._elsewhere.has(self.url.decode("latin-1"), headers)
        self._read = False
        if not self._stray:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._stray:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._begun = False
        if not self._stray:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._leave()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._leave()

    @property
    def _elsewhere(self) -> Elsewhere:
        return cast(Elsewhere, self.app_state["elsewhere"])

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._stray:
            self.hang_up()

    def _leave(self) -> None:
        """As soon as the kernel has the replies to all that was asked before."""
        if not self._leaving or self._asked or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return
        try:
            descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError:  # too many open files: its client has to ask again
            self.hang_up()
            return
        # Closes the descriptor of this process; the connection lives on in the other one.
        self.hang_up()
        self._elsewhere.take(Handed(sock=socket.socket(fileno=descriptor), received=self._unparsed))
