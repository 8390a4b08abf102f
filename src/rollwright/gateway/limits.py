"""When a session is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LimitReason", "SessionLimits"]

LimitReason = Literal["turns", "sampled_tokens", "seconds", "failures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """None: never."""

    turns: int | None = None
    """A request beyond so many turns is refused."""
    sampled_tokens: int | None = None
    """Counted before a turn begins, so the last turn may pass it; a turn is never cut to fit."""
    seconds: float | None = None
    """Since `open`, also over a restart of the gateway."""
    failures: int | None = 8
    """So many failures of ours in a row (the engine's, mostly): a CLI would go on asking for minutes."""
