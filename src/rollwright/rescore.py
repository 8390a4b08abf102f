"""Scores a stored run's sampled tokens again: are the logprobs that were trained those of the policy?

The ids are the stored ones; nothing is tokenized. Each branch is one request of the engine.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import anyio
import anyio.to_thread

from rollwright.engines import Engine, Scorer, Scores
from rollwright.errors import ConfigError, EngineRejected
from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.store import RunDir
from rollwright.tokens.tree import Turn
from rollwright.types import LogprobKind, Sampling

__all__ = ["Deviation", "Rescored", "rescore_run"]

_WORST = 10


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Deviation:
    """One token whose logprob came out otherwise."""

    size: float
    """Of the difference."""
    rollout: str
    turn: int
    token: int
    """Its place among the turn's sampled tokens."""
    id: int
    stored: float
    scored: float


@dataclass(slots=True)
class Rescored:
    """What a run's sampled tokens scored."""

    compared: int = 0
    total: float = 0.0
    """Of all differences."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Tokens that were not compared. other_version: the engine has other weights now. other_kind: its logprobs mean
    something else than the stored ones. not_finite: none was stored. refused: the engine did not take the branch."""
    worst: list[Deviation] = field(default_factory=list[Deviation])
    """The largest, at most ten."""

    @property
    def max(self) -> float:
        return self.worst[0].size if self.worst else 0.0

    @property
    def mean(self) -> float:
        return self.total / self.compared if self.compared else 0.0

    def add(self, rollout: str, turn: Turn, scored: list[float]) -> None:
        """`scored`: of each of the turn's tokens."""
        found: list[Deviation] = []
        for token, (id, stored, again) in enumerate(zip(turn.sampled, turn.logprobs, scored, strict=True)):
            if not isfinite(stored):
                self.skipped["not_finite"] += 1
                continue
            size = abs(stored - again)
            self.compared += 1
            self.total += size
            found.append(
                Deviation(size=size, rollout=rollout, turn=turn.index, token=token, id=id, stored=stored, scored=again)
            )
        self.worst = heapq.nlargest(_WORST, [*self.worst, *found])


async def rescore_run(run: RunDir, engine: Engine, *, limit: int | None = None, at_once: int = 8) -> Rescored:
    """Score every turn of the graded rollouts, the first `limit` of them, so many at a time.

    Raises `ConfigError` for an engine that cannot score, `StoreError`, and what `Scorer.score` raises.
    """
    if not isinstance(engine, Scorer):
        raise ConfigError(f"engine {engine.capabilities.name} cannot score given tokens", field="engine.kind")
    scorer: Scorer = engine
    names = [record.rollout for record in run.records() if record.graded][:limit]
    total = Rescored()
    owed = iter(names)

    async def work() -> None:
        for name in owed:
            logged = await anyio.to_thread.run_sync(read_turn_log, run.rollout(name).turns)
            await _rescore_rollout(name, logged, scorer, total)

    async with anyio.create_task_group() as group:
        for _ in range(min(at_once, len(names))):
            group.start_soon(work)
    return total


async def _rescore_rollout(name: str, logged: LoggedTrajectory, engine: Scorer, total: Rescored) -> None:
    for leaf, turns, spans in _branches(logged):
        ids = logged.trajectory.ids(leaf)
        # A restarted gateway may sample otherwise, but a branch it goes on with is scored as it began.
        sampling = _sampling(turns[0], logged)
        request = f"rescore-{name}-{leaf}"
        try:
            scores = await engine.score(ids, spans, sampling, request_id=request, session_key=request)
        except EngineRejected:
            total.skipped["refused"] += sum(len(turn.sampled) for turn in turns)
            continue
        at = 0
        for turn in turns:
            count = len(turn.sampled)
            scored = scores.logprobs[at : at + count]
            at += count
            if _sampling(turn, logged) == sampling:
                _compare(name, turn, scores, scored, sampling, total)
            else:
                total.skipped["other_kind"] += count


def _sampling(turn: Turn, logged: LoggedTrajectory) -> Sampling:
    """What a turn was sampled with, but for its length and seed."""
    told: dict[str, Any] = turn.meta.get("sampling", {})
    whole = Sampling(**logged.header["sampling"])
    return replace(whole, temperature=turn.temperature, **told)


def _branches(logged: LoggedTrajectory) -> Iterator[tuple[int, list[Turn], list[tuple[int, int]]]]:
    """Each leaf, the turns of its path that no leaf before it had, and where their sampled ids are."""
    seen: set[int] = set()
    for leaf in logged.trajectory.leaves():
        turns: list[Turn] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for step in logged.trajectory.path(leaf):
            turn = logged.trajectory.turns[step]
            start = at + len(turn.delta)
            at = start + len(turn.sampled)
            if step not in seen and turn.sampled:
                turns.append(turn)
                spans.append((start, at))
            seen.add(step)
        if turns:
            yield leaf, turns, spans


def _compare(
    rollout: str, turn: Turn, scores: Scores, scored: list[float], sampling: Sampling, total: Rescored
) -> None:
    if not _same_number(turn.logprob_kind, scores.kind, turn.temperature, sampling):
        total.skipped["other_kind"] += len(turn.sampled)
    elif scores.version and any(span.version != scores.version for span in turn.versions):
        # Also the tokens of these weights in it: those before them were said by others, under other keys and values.
        total.skipped["other_version"] += len(turn.sampled)
    else:
        total.add(rollout, turn, scored)


def _same_number(stored: LogprobKind, scored: LogprobKind, temperature: float, sampling: Sampling) -> bool:
    """Whether two kinds of logprob are one number under this sampling."""
    if stored == scored:
        return True
    cut = sampling.top_p < 1 or sampling.top_k > 0 or temperature == 0
    if cut and "behaviour" in (stored, scored):
        return False
    return temperature == 1 or "raw" not in (stored, scored)
