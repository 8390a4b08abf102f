"""Which shard a request belongs to: the API key says it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

__all__ = ["head_of", "place_of", "secret_of", "shard_of", "shard_prefix"]

_MARK = "s"
_ADMIN_PATHS = ("/admin/", "/_bench/")


def shard_prefix(shard: int) -> str:
    """How the keys of this shard's sessions begin."""
    return f"{_MARK}{shard}."


def shard_of(key: str, count: int) -> int:
    """The shard, of `count`, that a key (or the name of a rollout) belongs to; the same one each time."""
    number, dot, _ = key.removeprefix(_MARK).partition(".")
    # No number of a shard is longer, and Python refuses to read those that are very long.
    digits = number.isascii() and number.isdigit() and len(number) <= 6
    if key.startswith(_MARK) and dot and digits and int(number) < count:
        return int(number)
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % count


def place_of(path: str, headers: Mapping[str, str], count: int) -> int | None:
    """The shard, of `count`, that a request belongs to; None: the process in front. `headers` have lower-case names."""
    return None if path.startswith(_ADMIN_PATHS) else shard_of(secret_of(headers), count)


def secret_of(headers: Mapping[str, str]) -> str:
    """The API key, wherever this client puts it. `headers` have lower-case names."""
    key = headers.get("x-api-key", "")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return key or (token.strip() if scheme.lower() == "bearer" else "")


def head_of(received: bytes) -> tuple[str, dict[str, str]] | None:
    """Path and headers of the request that these bytes begin; None while its headers are not complete."""
    # Empty lines before a request are none of it.
    head, end, _ = received.lstrip(b"\r\n").partition(b"\r\n\r\n")
    if not end:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    words = first.split(" ")
    return (words[1] if len(words) > 1 else ""), headers
