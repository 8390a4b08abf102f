"""Server-sent events: the framing both streaming wires share."""

from __future__ import annotations

from rollwright.dialects.jsonio import dumps

__all__ = ["DONE", "frame"]

DONE = b"data: [DONE]\n\n"
"""What ends an OpenAI stream."""


def frame(data: object, *, event: str | None = None) -> bytes:
    """One event. JSON holds no raw newline, so one `data:` line is always enough."""
    head = b"" if event is None else b"event: %s\n" % event.encode("ascii")
    return b"%sdata: %s\n\n" % (head, dumps(data))
