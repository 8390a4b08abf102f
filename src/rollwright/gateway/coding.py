"""Packed request bodies: gzip and deflate always, zstd with the extra `zstd`."""

from __future__ import annotations

import zlib
from typing import Any

from rollwright.errors import LimitError

__all__ = ["UnknownCoding", "unpack"]


class UnknownCoding(Exception):
    """No way to unpack this `Content-Encoding` here."""


def unpack(data: bytes, coding: str, limit: int) -> bytes:
    """`data` without its `Content-Encoding` (lower case).

    Raises `UnknownCoding`, `LimitError` for more than `limit` bytes, `ValueError` for data that is not so packed.
    """
    match coding:
        case "identity" | "":
            return data
        case "gzip" | "deflate":
            return _zlib(data, limit)
        case "zstd":
            return _zstd(data, limit)
        case _:
            raise UnknownCoding(f"{coding[:40]} is not understood; send gzip, or the body as it is")


def _zlib(data: bytes, limit: int) -> bytes:
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        unpacked = unpacker.decompress(data, limit)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if unpacker.unconsumed_tail:
        raise LimitError(f"the body unpacks to more than {limit} bytes")
    return unpacked


def _zstd(data: bytes, limit: int) -> bytes:
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UnknownCoding("zstd needs the extra rollwright[zstd] here; send gzip, or the body as it is") from error
    library: Any = zstandard
    try:
        with library.ZstdDecompressor().stream_reader(data) as reader:
            unpacked: bytes = reader.read(limit + 1)
    except library.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(unpacked) > limit:
        raise LimitError(f"the body unpacks to more than {limit} bytes")
    return unpacked
