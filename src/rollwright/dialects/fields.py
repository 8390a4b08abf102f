"""Reading untrusted JSON: each reader returns the typed value or raises `MalformedRequest` naming the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rollwright.dialects.jsonio import dumps, loads
from rollwright.errors import MalformedRequest

__all__ = ["as_list", "as_mapping", "as_text", "json_arguments", "malformed", "omitted", "optional_text", "recorded"]

_RECORDED_BYTES = 1024


def malformed(field: str, wanted: str) -> MalformedRequest:
    """The error for `field` not being `wanted`."""
    return MalformedRequest(f"{field}: {wanted}", field=field)


def as_mapping(value: object, field: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise malformed(field, "must be an object")
    return cast("dict[str, Any]", value)


def as_list(value: object, field: str, *, filled: bool = False) -> list[Any]:
    """A JSON array; with `filled`, one that is not empty."""
    if not isinstance(value, list):
        raise malformed(field, "must be an array")
    if filled and not value:
        raise malformed(field, "must not be empty")
    return cast("list[Any]", value)


def as_text(value: object, field: str) -> str:
    """A JSON string."""
    if not isinstance(value, str):
        raise malformed(field, "must be a string")
    return value


def optional_text(value: object, field: str) -> str:
    """A JSON string; null and absent are empty."""
    return "" if value is None else as_text(value, field)


def json_arguments(value: object, field: str) -> dict[str, Any] | str:
    """A call's arguments, which travel as JSON text; the text itself where it is no JSON object."""
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    text = optional_text(value, field)
    try:
        parsed = loads(text)
    except ValueError:
        return text
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else text


def omitted(kind: object) -> str:
    """The note that stands for content a text policy cannot read."""
    name = kind if isinstance(kind, str) and kind.replace("_", "").isalnum() else "content"
    return f"[{name.removesuffix('_url')[:40]} omitted]"


def recorded(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of `names` the client sent, as sent; a value too large to be a setting is left out."""
    found = {name: body[name] for name in names if name in body}
    return {name: value for name, value in found.items() if len(dumps(value)) <= _RECORDED_BYTES}
