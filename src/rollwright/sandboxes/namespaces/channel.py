"""Small JSON messages with file descriptors, over a sequenced-packet socket. Used at both of its ends."""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

_INLINE_LIMIT = 60_000
_MAX_FDS = 16


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message. A big one travels as a memory file, because packets are bounded."""
    payload = json.dumps(message).encode()
    spill = -1
    if len(payload) > _INLINE_LIMIT:
        spill = os.memfd_create("message", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(spill), "wb") as f:
            f.write(payload)
        payload, fds = b"", (spill, *fds)
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        # An empty packet would read as the end, so a spilled message says so in one byte.
        sock.sendmsg([payload or b"@"], rights)
    finally:
        if spill >= 0:
            os.close(spill)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its descriptors (close-on-exec). None when the other end is gone."""
    size = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
    payload, ancillary, _, _ = sock.recvmsg(_INLINE_LIMIT + 1, size, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    received = list(fds)
    if not payload:
        return None
    if payload == b"@":
        with os.fdopen(received.pop(0), "rb") as f:
            f.seek(0)
            payload = f.read()
    return json.loads(payload), received


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
