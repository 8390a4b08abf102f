"""What a turn log tells a run's overview: losses, and how long replies are. Reads on over what is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rollwright.dialects.jsonio import loads

__all__ = ["TurnFacts", "turn_facts"]

_TURNS_SHOWN = 64
"""Turns whose length is kept for the plot of lengths."""


@dataclass(slots=True)
class TurnFacts:
    """Counts over all turns of one rollout."""

    turns: int = 0
    ill_formed: int = 0
    undelivered: int = 0
    resubmitted: int = 0
    """Turns that took more than one engine call, because the engine aborted."""
    sampled: list[int] = field(default_factory=list[int])
    """Tokens sampled per turn of the main role, the first of them."""
    problem: str = ""
    """Why the log could not be read to its end."""


def turn_facts(path: Path) -> TurnFacts:
    facts = TurnFacts()
    delivered: dict[int, bool] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # still being written
                    break
                try:
                    _take(facts, loads(line), delivered)
                except (ValueError, LookupError, TypeError, AttributeError):
                    facts.problem = f"line {number} of the turn log is damaged"
    except FileNotFoundError:
        pass
    except OSError as error:
        facts.problem = f"the turn log cannot be read: {error.strerror}"
    facts.undelivered = sum(not got for got in delivered.values())
    return facts


def _take(facts: TurnFacts, record: Mapping[str, Any], delivered: dict[int, bool]) -> None:
    match record["kind"]:
        case "turn":
            facts.turns += 1
            facts.ill_formed += record["ill_formed"] is not None
            facts.resubmitted += len(record["meta"].get("intents", ())) > 1
            if record["role"] == "main" and len(facts.sampled) < _TURNS_SHOWN:
                facts.sampled.append(len(record["sampled"]))
        case "delivered" | "undelivered":
            delivered[int(record["index"])] = record["kind"] == "delivered"
        case "sealed":
            for index in cast("list[int]", record["undelivered"]):
                delivered[int(index)] = False
        case _:
            pass
