"""The groups of a stored run: what each came to, and whether enough of it was judged to be trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from rollwright.groups import GroupStatus, Member, advantages
from rollwright.store import RolloutRecord, RunDir

__all__ = ["DEFAULT_QUORUM", "GroupRow", "group_rows", "group_table", "quorum_of"]

DEFAULT_QUORUM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group. Its statistics are of the rollouts that count; what was not graded is in none of them."""

    group: str
    """The `group_id` of its samples."""
    task: str
    rollouts: int
    """Stored ones."""
    counted: int
    quorum: int
    """How many must count."""
    mean: float
    """Of the rewards that count; 0.0 when none does."""
    deviation: float
    """Sample deviation (n - 1)."""
    status: GroupStatus

    @property
    def trainable(self) -> bool:
        return self.status != "below_quorum"

    @property
    def reason(self) -> str:
        """Why it may not be trained; empty when it may."""
        return "" if self.trainable else f"{self.counted} of {self.rollouts} rollouts count, {self.quorum} must"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"trainable": self.trainable, "reason": self.reason}


def quorum_of(setting: float, attempts: int) -> int:
    """How many rollouts of a group of `attempts` must count. `setting`: a number of them (an int, never more than the
    group has) or a share of the group (a float below 1)."""
    wanted = setting if isinstance(setting, int) else ceil(setting * attempts)
    return max(1, min(wanted, attempts))


def group_rows(records: Iterable[RolloutRecord], *, quorum: int) -> list[GroupRow]:
    """A row for each group, in stored order. Raises what `advantages` raises."""
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        if not record.superseded:
            groups.setdefault(record.group, []).append(record)
    rows: list[GroupRow] = []
    for name, members in groups.items():
        found = advantages(
            (Member(rollout_id=r.rollout, reward=r.reward, counts=r.counts_in_baseline) for r in members),
            quorum=quorum,
        )
        rows.append(
            GroupRow(
                group=name,
                task=members[0].task,
                rollouts=len(members),
                counted=found.counted,
                quorum=quorum,
                mean=found.mean,
                deviation=found.deviation,
                status=found.status,
            )
        )
    return rows


def group_table(run: RunDir) -> list[GroupRow]:
    """The groups of a run folder, by its own settings. Raises `ConfigError` and `StoreError` as `RunDir` does."""
    config: dict[str, Any] = run.resolved()["config"]
    setting = config.get("grading", {}).get("group_quorum", DEFAULT_QUORUM)
    attempts = config.get("run", {}).get("attempts", 1)
    return group_rows(run.records(), quorum=quorum_of(setting, attempts))
