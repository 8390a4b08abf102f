"""Who hears what happens in a run."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from rollwright.rollout import RolloutPlan
from rollwright.store import RolloutRecord
from rollwright.types import Stage

current_rollout: ContextVar[str] = ContextVar("rollout", default="-")
"""For log records: which rollout is talking."""


class Observer(Protocol):
    """Hears what happens. Called on the event loop; must return at once."""

    def preparing(self, what: str) -> None:
        """A slow step before the first rollout."""
        ...

    def started(self, plan: RolloutPlan) -> None: ...

    def entered(self, plan: RolloutPlan, stage: Stage) -> None: ...

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None: ...


class Silent(Observer):
    """Nobody listens."""

    def preparing(self, what: str) -> None: ...

    def started(self, plan: RolloutPlan) -> None: ...

    def entered(self, plan: RolloutPlan, stage: Stage) -> None: ...

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None: ...
