"""JSON as clients and policies really write it: fast where it is plain, never refused for odd text or numbers."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, cast

import orjson

__all__ = ["dumps", "loads", "scrub", "scrub_text"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_DEPTH = 250
"""What orjson allows, too."""


def dumps(value: object, *, sort_keys: bool = False) -> bytes:
    """Compact JSON. Dataclasses become objects. Raises `ValueError` when it is nested beyond reason.

    A model may write a lone surrogate escape or a 30-digit number into its arguments; orjson refuses both, so they
    take the slower way.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:
        return json.dumps(_plain(value, _DEPTH), separators=(",", ":"), sort_keys=sort_keys).encode()


def loads(data: bytes | str) -> Any:
    """Parse JSON; every string in the result can be encoded as UTF-8. Raises `ValueError` when it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        # CLIs cut tool output in the middle of an emoji and send half of its escape; the standard parser takes it.
        try:
            return scrub(json.loads(data))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def scrub(value: Any) -> Any:
    """The same JSON value with every lone surrogate replaced, so that it can be encoded as UTF-8."""
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, dict):
        return {scrub_text(key): scrub(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [scrub(item) for item in cast("list[Any]", value)]
    return value


def scrub_text(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD."""
    return _SURROGATE.sub("�", text)


def _plain(value: Any, depth: int) -> Any:
    """Dataclasses as dicts and only what JSON has, all the way down."""
    if depth == 0:
        raise ValueError("nested too deeply")
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: _plain(getattr(value, name), depth - 1) for name in fields}
    if isinstance(value, dict):
        return {key: _plain(item, depth - 1) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1) for item in cast("list[Any]", value)]
    # JSON has neither NaN nor infinity; orjson writes null, too.
    return None if isinstance(value, float) and not isfinite(value) else value
