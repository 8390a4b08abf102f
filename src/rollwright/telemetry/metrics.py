"""The numbers of a run for an experiment tracker: one small hook, whichever tracker it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from rollwright.rollout import RolloutPlan
from rollwright.store import RolloutRecord
from rollwright.telemetry.background import BackgroundListener
from rollwright.types import Stage

__all__ = ["RunningNumbers", "Tracker"]


class RunningNumbers:
    """What is known after each stored rollout: of it, and of the run so far. Pure."""

    def __init__(self) -> None:
        self.stored = 0
        self._graded = 0
        self._rewards = 0.0
        self._sampled = 0
        self._trained = 0
        self._violations = 0

    def after(self, record: RolloutRecord) -> dict[str, float]:
        """Flat names, numbers only. An ungraded rollout has no reward, and changes no mean of rewards."""
        self.stored += 1
        self._violations += record.violations
        values: dict[str, float] = {
            "rollout/turns": record.turns,
            "rollout/branches": record.branches,
            "rollout/prompt_tokens": record.prompt_tokens,
            "rollout/sampled_tokens": record.sampled_tokens,
            "rollout/trained_tokens": record.trained_tokens,
            "rollout/tries": record.tries,
            "rollout/seconds": sum(record.seconds.values()),
            **{f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()},
        }
        if record.reward is not None:
            self._graded += 1
            self._rewards += record.reward
            self._sampled += record.sampled_tokens
            self._trained += record.trained_tokens
            values["rollout/reward"] = record.reward
        if self._graded:
            values["run/mean_reward"] = self._rewards / self._graded
        if self._sampled:
            values["run/trained_share"] = self._trained / self._sampled
        return values | {
            "run/stored": self.stored,
            "run/ungraded": self.stored - self._graded,
            "run/sampled_tokens": self._sampled,
            "run/violations": self._violations,
        }


class Tracker(BackgroundListener):
    """Give it `begin`, `log` and `end`: they may block and may raise anything."""

    @abstractmethod
    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """`step`: how many rollouts this process has stored, from 1 on."""

    def begin(self) -> None:
        self.numbers = RunningNumbers()

    def write(self, plan: RolloutPlan, record: RolloutRecord, entered: list[tuple[Stage, float]]) -> None:
        values = self.numbers.after(record)
        self.log(values, step=self.numbers.stored)
