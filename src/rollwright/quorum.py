"""The groups of a stored run: what each came to, and whether enough of it was judged to be trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rollwright.groups import DEFAULT_QUORUM, GroupStatus, Member, advantages, quorum_of
from rollwright.store import RolloutRecord, RunDir

__all__ = ["DEFAULT_QUORUM", "GroupRow", "group_quorum", "group_rows", "group_table", "of_size", "quorum_of"]


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


def group_quorum(group: Collection[RolloutRecord]) -> int:
    """How many rollouts of a group must count for any of it to be trained: as many as they were made with
    (`grading.group_quorum`), and at least two of several, since trainers take a lone reward for its advantage."""
    return of_size(max((record.quorum for record in group), default=1), len(group))


def of_size(made_with: int, size: int) -> int:
    """`group_quorum` of `size` rollouts that were made with this one."""
    return max(min(2, size), made_with)


def group_rows(records: Iterable[RolloutRecord]) -> list[GroupRow]:
    """A row for each group, in stored order. Raises what `advantages` raises."""
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        if not record.superseded:
            groups.setdefault(record.group, []).append(record)
    rows: list[GroupRow] = []
    for name, members in groups.items():
        quorum = group_quorum(members)
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
    """The groups of a run folder. Raises `ConfigError` and `StoreError` as `RunDir` does."""
    run.resolved()
    return group_rows(run.records())
