"""Trajectory → training samples: one per branch, every sampled token trained exactly once over all of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from rollwright.errors import UsageError
from rollwright.tokens.tree import Trajectory, Turn
from rollwright.types import BranchRole, ExcludedReason, LogprobKind, Sample, VersionSpan

__all__ = ["build_samples", "within_lag"]


@dataclass(frozen=True, slots=True)
class _Branch:
    """A root-to-leaf line, and which of its turns are trained in its sample."""

    path: list[int]
    own: frozenset[int]


def build_samples(
    trajectory: Trajectory,
    *,
    task_id: str,
    group_id: str,
    rollout_id: str,
    reward: float | None,
    trainable: bool,
    counts_in_baseline: bool,
    max_sample_tokens: int | None = None,
    accepted_versions: Collection[str] | None = None,
) -> list[Sample]:
    """One sample per branch that has tokens of its own to train, in order of the first turn each of them trains.

    A turn that several branches share is trained in one of them, in one that ends in the main role where there is one.
    Not trained: an undelivered turn; one whose client asked the same again and went on from the other answer; one of a
    class that is not trained; a token of weights that are not among `accepted_versions` (see `within_lag`; None accepts
    all). A branch longer than `max_sample_tokens` loses whole turns from its end; where not even its first turn fits,
    that turn is cut (inside its prompt: then the sample trains nothing, and its `excluded` says why). Weights are the
    shares of the trained tokens and sum to 1. Raises `UsageError` for a reward that is no finite number, room for no
    token, and versions that are one text.
    """
    if reward is not None and not isfinite(reward):
        raise UsageError(f"the reward of rollout {rollout_id} is {reward}")
    if max_sample_tokens is not None and max_sample_tokens < 1:
        raise UsageError(f"max_sample_tokens must be at least 1, not {max_sample_tokens}")
    if isinstance(accepted_versions, str):
        raise UsageError(f"accepted_versions must be several texts, not {accepted_versions!r}")
    unused = _unused(trajectory)
    branches = _branches(trajectory, unused)
    accepted = None if accepted_versions is None else frozenset(accepted_versions)
    lost = _lost(trajectory, branches, unused)
    samples: list[Sample] = []
    for index, branch in enumerate(branches):
        builder = _Builder(trajectory, branch, max_sample_tokens, accepted)
        builder.excluded.update(lost[index])
        trained = sum(builder.mask)
        samples.append(
            Sample(
                task_id=task_id,
                group_id=group_id,
                rollout_id=rollout_id,
                segment_index=index,
                n_segments=len(branches),
                role=builder.role,
                tokens=builder.tokens,
                loss_mask=array("b", bytes(builder.mask)),
                logprobs=builder.logprobs,
                versions=builder.versions,
                prompt_length=builder.prompt_length,
                reward=reward,
                weight=float(trained),
                trainable=trainable and trained > 0,
                counts_in_baseline=counts_in_baseline,
                truncated=builder.truncated,
                ill_formed=any(turn.ill_formed is not None for turn in builder.turns),
                logprob_kind=builder.logprob_kind,
                temperature=builder.temperature,
                excluded=dict(builder.excluded),
                turns=[turn.index for turn in builder.turns],
                history=trajectory.history,
                accepted_versions=None if accepted is None else sorted(accepted),
            )
        )
    total = sum(sample.weight for sample in samples)
    if total == 0:
        return [replace(sample, weight=1 / len(samples)) for sample in samples]
    return [replace(sample, weight=sample.weight / total) for sample in samples]


def _unused(trajectory: Trajectory) -> dict[int, ExcludedReason]:
    """Turns that are nobody's history, and why."""
    turns = trajectory.turns
    continued = {turn.parent for turn in turns if turn.delivered}
    used = {_request(turn) for turn in turns if turn.index in continued}
    unused: dict[int, ExcludedReason] = {}
    for turn in turns:
        if not turn.delivered:
            unused[turn.index] = "undelivered"
        elif turn.index not in continued and _request(turn) in used:
            unused[turn.index] = "superseded"
    return unused


def _request(turn: Turn) -> tuple[int | None, bytes, str, str]:
    """What was asked, and by which agent."""
    return turn.parent, turn.delta.tobytes(), turn.role, turn.meta.get("agent", "")


def _branches(trajectory: Trajectory, unused: Container[int]) -> list[_Branch]:
    turns = trajectory.turns
    # An undelivered turn is never continued, so the others are a tree of their own.
    continued = {turn.parent for turn in turns if turn.delivered}
    leaves = [turn for turn in turns if turn.index not in continued and turn.index not in unused]
    leaves.sort(key=lambda turn: (turn.role != "main", turn.index))
    owned: set[int] = set()
    branches: list[_Branch] = []
    for turn in leaves:
        path = trajectory.path(turn.index)
        own = frozenset(path) - owned
        if any(turns[step].sampled for step in own):
            owned |= own
            branches.append(_Branch(path, own))
    # By age: whoever trains a shared turn then always comes before those who share it.
    return sorted(branches, key=lambda branch: min(branch.own))


def _lost(
    trajectory: Trajectory, branches: Sequence[_Branch], unused: Mapping[int, ExcludedReason]
) -> list[Counter[str]]:
    """Sampled tokens of unused turns, by the branch they hang on and the reason."""
    lost: list[Counter[str]] = [Counter() for _ in branches]
    for index, reason in unused.items() if branches else ():
        turn = trajectory.turns[index]
        owner = next((at for at, branch in enumerate(branches) if turn.parent in branch.own), 0)
        if turn.sampled:
            lost[owner][reason] += len(turn.sampled)
    return lost


def within_lag(versions: Sequence[str], max_lag: int) -> frozenset[str]:
    """Of weight versions in the order in which they came, the newest and the `max_lag` before it."""
    return frozenset(versions[-1 - max_lag :])


class _Builder:
    """The per-token arrays of one branch, cut to size."""

    def __init__(
        self, trajectory: Trajectory, branch: _Branch, limit: int | None, accepted: frozenset[str] | None
    ) -> None:
        self._accepted = accepted
        path = [trajectory.turns[step] for step in branch.path]
        self.turns = _fitting(path, limit)
        self.tokens = array("i")
        self.mask = bytearray()
        self.logprobs = array("d")
        self.versions: list[VersionSpan] = []
        self.excluded: Counter[str] = Counter()
        whole = sum(len(turn.delta) + len(turn.sampled) for turn in self.turns)
        room = whole if limit is None else min(whole, limit)
        for turn in self.turns:
            self._untrained(turn.delta[:room])
            room -= len(turn.delta)
            self._reply(turn, max(0, min(room, len(turn.sampled))), train=turn.index in branch.own)
            room -= len(turn.sampled)
        self.exclude("truncated", sum(len(turn.sampled) for turn in path[len(self.turns) :]))
        cut = len(self.turns) < len(path) or len(self.tokens) < whole
        self.truncated = cut or self.turns[-1].finish == "length"
        self.prompt_length = min(len(path[0].delta), len(self.tokens))
        own = next(turn for turn in path if turn.index in branch.own)
        self.role: BranchRole = own.role
        self.logprob_kind: LogprobKind = own.logprob_kind
        self.temperature = own.temperature

    def exclude(self, reason: ExcludedReason, count: int) -> None:
        if count:
            self.excluded[reason] += count

    def _untrained(self, ids: array[int]) -> None:
        self.tokens += ids
        self.mask += bytes(len(ids))
        self.logprobs.frombytes(bytes(8 * len(ids)))

    def _reply(self, turn: Turn, count: int, *, train: bool) -> None:
        """The first `count` sampled tokens of a turn."""
        self.exclude("truncated", len(turn.sampled) - count)
        start = len(self.tokens)
        for span in turn.versions:
            if span.start < count:
                _append(self.versions, VersionSpan(span.version, start + span.start, start + min(span.end, count)))
        if not train:
            self._untrained(turn.sampled[:count])
            self.exclude("shared_with_earlier_branch", count)
            return
        self.tokens += turn.sampled[:count]
        if not turn.trained:
            self.mask += bytes(count)
            self.logprobs.frombytes(bytes(8 * count))
            self.exclude("class_not_trained", count)
            return
        logprobs = turn.logprobs[:count]
        fresh = self._fresh(turn, count)
        if fresh is None and isfinite(sum(logprobs)):
            self.mask += b"\1" * count
            self.logprobs += logprobs
            return
        finite = [isfinite(value) for value in logprobs]
        fresh = fresh or b"\1" * count
        mask = bytes(new and fine for new, fine in zip(fresh, finite, strict=True))
        self.mask += mask
        self.logprobs.extend(value if kept else 0.0 for value, kept in zip(logprobs, mask, strict=True))
        self.exclude("stale_version", fresh.count(0))
        self.exclude("non_finite_logprob", sum(fresh) - sum(mask))

    def _fresh(self, turn: Turn, count: int) -> bytearray | None:
        """Which of a turn's first tokens have an accepted version; None: all."""
        accepted = self._accepted
        if accepted is None or all(span.version in accepted for span in turn.versions):
            return None
        fresh = bytearray(count)
        for span in turn.versions:
            if span.version in accepted:
                end = min(span.end, count)
                fresh[span.start : end] = b"\1" * max(0, end - span.start)
        return fresh


def _fitting(path: list[Turn], limit: int | None) -> list[Turn]:
    """The turns that fit whole; the first one alone where not even it does."""
    if limit is None:
        return path
    length = 0
    for count, turn in enumerate(path):
        length += len(turn.delta) + len(turn.sampled)
        if length > limit:
            return path[: max(1, count)]
    return path


def _append(spans: list[VersionSpan], span: VersionSpan) -> None:
    if spans and spans[-1].version == span.version and spans[-1].end == span.start:
        span = VersionSpan(span.version, spans.pop().start, span.end)
    spans.append(span)
