"""How the sessions of a gateway are made where nobody says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.traffic import TRAINED
from rollwright.types import HistoryPolicy, Sampling, TrafficClass

__all__ = ["SessionSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What the opener of a session may choose."""

    sampling: Sampling
    limits: SessionLimits = field(default_factory=SessionLimits)
    history: HistoryPolicy = "exact"
    """What to do where the client rewrites what others than the policy said."""
    trained: frozenset[TrafficClass] = TRAINED
    """The classes of traffic that are to be trained."""
