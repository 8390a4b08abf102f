"""Doctor: what this machine, and a run file, lack before a run. One group of checks a file; this is the contract.

A check looks at one thing and says what it saw. It changes nothing, downloads nothing, and closes the boxes it opens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rollwright.errors import RollwrightError

if TYPE_CHECKING:
    from rollwright.doctor.subject import Subject

__all__ = ["Check", "Finding", "Look", "State", "found", "of_error"]

State = Literal["ok", "warn", "fail", "skipped"]
"""warn: a run works, with a loss that is said. fail: a run would not start or would lose rollouts. skipped: not looked
at, because nothing here needs it or what it needs has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check saw."""

    name: str
    state: State
    seen: str
    """One sentence, without a full stop."""
    fix: str = ""
    """What to do about it; never empty where `state` is warn or fail."""

    def to_json(self) -> dict[str, Any]:
        return {"check": self.name, "state": self.state, "seen": self.seen, "fix": self.fix}


Look: TypeAlias = "Callable[[Subject], Awaitable[list[Finding]]]"
"""Raises `RollwrightError` for what is wrong (it becomes a `fail`), `Blocked` where another check's value lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One look and its bounds."""

    name: str
    look: Look
    fix: str
    """What to do where an error does not say it."""
    seconds: float = 20


def found(name: str, state: State, seen: str, fix: str = "") -> list[Finding]:
    """The usual answer of a check: one finding."""
    return [Finding(name=name, state=state, seen=seen, fix=fix)]


def of_error(name: str, error: RollwrightError, fix: str, *, state: State = "fail") -> Finding:
    """Our errors say what is wrong, and after a semicolon mostly what to do."""
    seen, _, todo = error.message.partition("; ")
    return Finding(name=name, state=state, seen=seen, fix=todo or fix)
