"""Re-checks a stored run offline: every sample against its rollout's turn log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollwright.errors import StoreError
from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.store import RolloutRecord, RunDir
from rollwright.tokens.verify import VerifyReport, prompt_digest, verify
from rollwright.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAudit:
    """One rollout's proof, or its violations."""

    rollout: str
    report: VerifyReport
    others: tuple[str, ...] = ()
    """What else is wrong: an aborted turn that went on from other ids, samples that contradict the record."""
    drift: tuple[str, ...] = ()
    """Why turns did not extend the one before them."""


@dataclass(slots=True)
class RunAudit:
    """All of a run's."""

    rollouts: int = 0
    sampled: int = 0
    trained: int = 0
    excluded: Counter[str] = field(default_factory=Counter[str])
    drift: Counter[str] = field(default_factory=Counter[str])
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
        self.drift.update(audit.drift)
        self.violations += [f"{audit.rollout}: {violation}" for violation in (*audit.report.violations, *audit.others)]


def audit_run(run: RunDir) -> RunAudit:
    """Check every stored rollout. Raises `ConfigError` for what is no run folder, `StoreError` for unreadable files."""
    run.resolved()
    total = RunAudit()
    for record in run.records():
        if record.graded:
            total.add(audit_rollout(run, record))
        elif run.samples(record.rollout):
            total.violations.append(f"{record.rollout}: it was not judged and has samples")
    return total


def audit_rollout(run: RunDir, record: RolloutRecord) -> RolloutAudit:
    """Raises `StoreError` for files that cannot be read as what they are."""
    logged = read_turn_log(run.rollout(record.rollout).turns)
    samples = run.samples(record.rollout)
    try:
        report = verify(logged.trajectory, samples, _prompts_sent(logged))
        others = [*_resent_wrongly(logged), *_contradictions(record, samples, report)]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise StoreError(f"{run.rollout(record.rollout).path} is damaged: {error}") from error
    if not logged.sealed:
        others.append("its turn log is not sealed: turns may be missing")
    drift = tuple(turn.drift.cause for turn in logged.trajectory.turns if turn.drift is not None)
    return RolloutAudit(rollout=record.rollout, report=report, others=tuple(others), drift=drift)


def _contradictions(record: RolloutRecord, samples: Sequence[Sample], report: VerifyReport) -> Iterator[str]:
    """Where record and samples tell a trainer different things."""
    for sample in samples:
        says = (sample.rollout_id, sample.task_id, sample.reward, sample.counts_in_baseline)
        if says != (record.rollout, record.task_id, record.reward, record.counts_in_baseline):
            yield f"sample {sample.segment_index}: rollout, task, reward or baseline are not those of the record"
        if sample.trainable and not record.trainable:
            yield f"sample {sample.segment_index}: it is trainable, the rollout is not"
    if (record.sampled_tokens, record.trained_tokens) != (report.sampled, report.trained):
        yield (
            f"the record counts {record.sampled_tokens} sampled and {record.trained_tokens} trained tokens, "
            f"there are {report.sampled} and {report.trained}"
        )


def _resent_wrongly(logged: LoggedTrajectory) -> Iterator[str]:
    """A turn that the engine aborted goes on from its prompt and what it had sampled; its first call is in `verify`."""
    for turn in logged.trajectory.turns:
        for number in turn.meta.get("intents", [])[1:]:
            intent = logged.intents.get(number)
            if intent is None:
                yield f"turn {turn.index}: no record of call {number} to the engine"
                continue
            ids = logged.trajectory.ids(turn.index)
            prompt = ids[: len(ids) - len(turn.sampled) + intent.partial_tokens]
            if intent.prompt_digest != prompt_digest(prompt):
                yield f"turn {turn.index}: it went on from other ids than those that are stored"


def _prompts_sent(logged: LoggedTrajectory) -> dict[int, str]:
    """Turn → digest of the prompt its first engine call was made with. A turn without a record is left out."""
    sent: dict[int, str] = {}
    for turn in logged.trajectory.turns:
        numbers: list[int] = turn.meta.get("intents", [])
        if numbers and numbers[0] in logged.intents:
            sent[turn.index] = logged.intents[numbers[0]].prompt_digest
    return sent
