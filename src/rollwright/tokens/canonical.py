"""What makes two messages the same to the policy, whatever a client did to them on the wire.

Surrounding whitespace of any text, the order of argument keys, the spelling of numbers and of JSON, call ids and
missing-versus-empty fields make no difference. An assistant's reasoning is compared apart (`same_reasoning`), because
clients drop it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import orjson

from rollwright.messages import Message, ToolCall, ToolSpec

__all__ = ["chain", "digest", "digests", "echoed_ids", "same_reasoning", "tools_digest"]

_EXACT = 2**53
"""JavaScript clients hold numbers as doubles, so integers above this come back rounded."""


def digest(message: Message) -> str:
    """32 hex digits: equal for messages of equal meaning."""
    content = message.content.strip()
    # Lengths first, so that no text can imitate the border between two parts.
    text = f"{message.role} {len(content)} {content}"
    for call in message.tool_calls:
        arguments = _arguments(call)
        text += f" {len(call.name)} {call.name} {len(arguments)} {arguments}"
    return _hash(text)


def digests(messages: Sequence[Message]) -> tuple[str, ...]:
    """The digest of each message."""
    return tuple(digest(message) for message in messages)


def tools_digest(tools: Sequence[ToolSpec]) -> str:
    """32 hex digits over names, descriptions and schemas in their order; "" without tools."""
    if not tools:
        return ""
    parts = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return _hash(_json(parts))


def chain(before: str, key: str) -> str:
    """Digest of a sequence of messages from the digest of all but its last, and that one's."""
    return blake2b((before + key).encode(), digest_size=16).hexdigest()


def same_reasoning(echoed: str | None, stored: str | None) -> bool:
    """Whether a client's copy of our reasoning says the same; a dropped one does."""
    return not echoed or echoed.strip() == (stored or "").strip() or not echoed.strip()


def echoed_ids(message: Message) -> frozenset[str]:
    """Every id on an assistant's message that we may have minted."""
    return frozenset((*message.carriers, *(call.id for call in message.tool_calls if call.id)))


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _arguments(call: ToolCall) -> str:
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            parsed: Any = orjson.loads(arguments)
        except ValueError:
            return arguments.strip()
        if not isinstance(parsed, dict):
            return arguments.strip()
        arguments = cast("dict[str, Any]", parsed)
    return _json(arguments)


def _json(value: Any) -> str:
    try:
        return orjson.dumps(_plain(value), option=orjson.OPT_SORT_KEYS).decode()
    except (TypeError, RecursionError):
        # Not JSON at all (lone surrogates, endless depth): its own spelling is its identity.
        return repr(value)


def _plain(value: Any) -> Any:
    kind = cast("type[Any]", type(value))
    if kind is str:
        return value.strip()
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_EXACT <= value <= _EXACT else _rounded(value)
    if kind is float:
        if not value.is_integer():
            return value
        return int(value) if abs(value) <= _EXACT else repr(value)
    if kind is dict or isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if kind is list or kind is tuple:
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return repr(value)


def _rounded(value: int) -> str:
    try:
        return repr(float(value))
    except OverflowError:
        return str(value)
