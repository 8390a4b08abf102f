"""Re-checks a stored run offline: every sample against its rollout's turn log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.store import RolloutRecord, RunDir
from rollwright.tokens.verify import VerifyReport, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAudit:
    """One rollout's proof, or its violations."""

    rollout: str
    report: VerifyReport


@dataclass(slots=True)
class RunAudit:
    """All of a run's."""

    rollouts: int = 0
    sampled: int = 0
    trained: int = 0
    excluded: Counter[str] = field(default_factory=Counter[str])
    violations: list[str] = field(default_factory=list[str])

    @property
    def trained_share(self) -> float:
        """Of the sampled tokens; 1.0 when there are none."""
        return self.trained / self.sampled if self.sampled else 1.0

    def add(self, audit: RolloutAudit) -> None:
        self.rollouts += 1
        self.sampled += audit.report.sampled
        self.trained += audit.report.trained
        self.excluded.update(audit.report.excluded)
        self.violations += [f"{audit.rollout}: {violation}" for violation in audit.report.violations]


def audit_run(run: RunDir) -> RunAudit:
    """Check every graded rollout. Raises `ConfigError` for what is no run folder, `StoreError` for unreadable files."""
    run.resolved()
    total = RunAudit()
    for record in run.records():
        if record.graded:
            total.add(audit_rollout(run, record))
    return total


def audit_rollout(run: RunDir, record: RolloutRecord) -> RolloutAudit:
    logged = read_turn_log(run.rollout(record.rollout).turns)
    report = verify(logged.trajectory, run.samples(record.rollout), _prompts_sent(logged))
    return RolloutAudit(rollout=record.rollout, report=report)


def _prompts_sent(logged: LoggedTrajectory) -> dict[int, str]:
    """Turn → digest of the prompt its first engine call was made with. A turn without a record is left out."""
    sent: dict[int, str] = {}
    for turn in logged.trajectory.turns:
        numbers: list[int] = turn.meta.get("intents", [])
        if numbers and numbers[0] in logged.intents:
            sent[turn.index] = logged.intents[numbers[0]].prompt_digest
    return sent
