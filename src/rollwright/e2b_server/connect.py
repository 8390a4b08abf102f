"""Connect RPC as envd speaks it: JSON, uncompressed, server streams in frames. Pure.

A frame is one byte of flags (2: the last one), four bytes of big-endian length, and that much JSON.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, cast

import orjson

__all__ = ["Code", "RpcError", "encode_end", "encode_event", "read_frame", "read_message"]

Code = Literal[
    "invalid_argument",
    "not_found",
    "already_exists",
    "permission_denied",
    "resource_exhausted",
    "failed_precondition",
    "deadline_exceeded",
    "unimplemented",
    "internal",
    "unavailable",
    "unauthenticated",
]

STATUS: dict[Code, int] = {
    "invalid_argument": 400,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "deadline_exceeded": 504,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
"""HTTP status of a unary call that failed with this code."""

_END = 2
_HEADER = struct.Struct(">BI")


class RpcError(Exception):
    """A call that failed, as the client is to see it."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message

    def json(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


def encode_event(message: dict[str, Any]) -> bytes:
    """One message of a server stream."""
    return _frame(0, {"event": message})


def encode_end(error: RpcError | None = None) -> bytes:
    """The last frame of a server stream."""
    return _frame(_END, {} if error is None else {"error": error.json()})


def _frame(flags: int, message: dict[str, Any]) -> bytes:
    data = orjson.dumps(message)
    return _HEADER.pack(flags, len(data)) + data


def read_frame(body: bytes) -> dict[str, Any]:
    """The one message that opens a server stream. Raises `RpcError`."""
    if len(body) < _HEADER.size:
        raise RpcError("invalid_argument", "the request has no frame")
    flags, length = _HEADER.unpack_from(body)
    if flags != 0 or len(body) != _HEADER.size + length:
        raise RpcError("invalid_argument", "the request is not one uncompressed frame")
    return read_message(body[_HEADER.size :])


def read_message(body: bytes) -> dict[str, Any]:
    """The message of a unary call. Raises `RpcError`."""
    try:
        message: object = orjson.loads(body)
    except ValueError as e:
        raise RpcError("invalid_argument", f"the request is not JSON: {e}") from e
    if not isinstance(message, dict):
        raise RpcError("invalid_argument", "the request is not a JSON object")
    return cast("dict[str, Any]", message)
