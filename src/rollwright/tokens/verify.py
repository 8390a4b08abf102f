"""The proof that samples say what happened: re-derives every claim from the turns, without the code that made them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Literal

from rollwright.tokens.tree import Trajectory, Turn
from rollwright.types import Sample, VersionSpan

__all__ = ["VerifyReport", "Violation", "ViolationKind", "prompt_digest", "verify"]

ViolationKind = Literal[
    "prompt_differs",
    "length_mismatch",
    "path_broken",
    "tokens_differ",
    "trained_not_sampled",
    "trained_twice",
    "trained_undelivered",
    "trained_superseded",
    "trained_class",
    "trained_stale",
    "sampled_lost",
    "logprob_differs",
    "version_missing",
    "sampler_differs",
    "role_differs",
    "excluded_miscounted",
    "weight_sum",
    "segment_index",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One claim that does not hold."""

    kind: ViolationKind
    message: str
    turn: int | None = None
    segment: int | None = None
    """`segment_index` of the sample."""

    def __str__(self) -> str:
        where = [f"turn {self.turn}"] if self.turn is not None else []
        where += [f"sample {self.segment}"] if self.segment is not None else []
        return f"{self.kind} ({', '.join(where)}): {self.message}" if where else f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a rollout's tokens add up to."""

    violations: tuple[Violation, ...]
    sampled: int
    """Tokens the policy sampled, over all turns."""
    trained: int
    """Of these, how many are in a loss."""
    excluded: Mapping[str, int]
    """The others, by reason; a token that another sample trains is not among them."""


def prompt_digest(ids: Sequence[int]) -> str:
    """32 hex digits over ids as 32-bit integers: recorded when a prompt is sent, compared here."""
    return blake2b(array("i", ids), digest_size=16).hexdigest()


def verify(trajectory: Trajectory, samples: Sequence[Sample], prompts_sent: Mapping[int, str] | None) -> VerifyReport:
    """Check all samples of one rollout against its turns.

    `prompts_sent`: turn index → `prompt_digest` of what the engine was given; None when none was recorded.
    Holds afterwards, unless a violation says otherwise: each prompt sent is the training prefix of its turn; each
    sampled token is trained exactly once or excluded for a reason; a trained token has the engine's own finite
    logprob and a weight version; per-token lists are of one length.
    """
    violations: list[Violation] = []
    if prompts_sent is not None:
        violations += _check_prompts(trajectory, prompts_sent)
    ledger = _Ledger(trajectory)
    for position, sample in enumerate(samples):
        if sample.segment_index != position or sample.n_segments != len(samples):
            violations.append(
                Violation(
                    kind="segment_index",
                    segment=position,
                    message=f"says {sample.segment_index} of {sample.n_segments}, is {position} of {len(samples)}",
                )
            )
        violations += ledger.take(sample, position)
    lost, excluded = ledger.settle()
    violations += lost
    if samples:
        weight = sum(sample.weight for sample in samples)
        if abs(weight - 1) > 1e-6:
            violations.append(Violation(kind="weight_sum", message=f"the samples' weights sum to {weight}, not 1"))
    return VerifyReport(
        violations=tuple(violations),
        sampled=sum(len(turn.sampled) for turn in trajectory.turns),
        trained=ledger.trained,
        excluded=dict(excluded),
    )


def _check_prompts(trajectory: Trajectory, prompts_sent: Mapping[int, str]) -> Iterator[Violation]:
    """Digests run along the tree, so that no token is hashed twice for the turns of one branch."""
    states: list[blake2b] = []
    for turn in trajectory.turns:
        state = blake2b(digest_size=16) if turn.parent is None else states[turn.parent].copy()
        state.update(turn.delta.tobytes())
        sent = prompts_sent.get(turn.index)
        if sent is None:
            yield Violation(kind="prompt_differs", turn=turn.index, message="no record of the prompt that was sent")
        elif sent != state.hexdigest():
            yield Violation(
                kind="prompt_differs", turn=turn.index, message="the prompt that was sent is not the stored one"
            )
        state.update(turn.sampled.tobytes())
        states.append(state)
    for index in sorted(set(prompts_sent) - set(range(len(trajectory.turns)))):
        yield Violation(kind="prompt_differs", turn=index, message="a prompt was sent for a turn that is not stored")


class _Ledger:
    """Which sampled tokens were trained, and how often."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._turns = trajectory.turns
        self._times = [bytearray(len(turn.sampled)) for turn in self._turns]
        self._seen: set[int] = set()
        """Turns that are in some sample."""
        self._ends: dict[int, int] = {}
        """Last turn of a truncated sample → how many of its sampled tokens are in it."""
        self._untrained = 0
        self._told: Counter[str] = Counter()
        self._superseded = _superseded(self._turns)
        self._accepted: frozenset[str] | None = None
        """The versions that the samples say may be trained."""

    def take(self, sample: Sample, segment: int) -> Iterator[Violation]:
        """Check one sample and enter what it trains."""
        length = len(sample.tokens)
        path = self._path(sample.turns)
        accepted = None if sample.accepted_versions is None else frozenset(sample.accepted_versions)
        if self._seen and accepted != self._accepted:
            message = "it accepts other weight versions than the sample before it"
            yield Violation(kind="trained_stale", segment=segment, message=message)
        self._accepted = accepted
        if len(sample.loss_mask) != length or len(sample.logprobs) != length:
            message = f"{length} tokens, {len(sample.loss_mask)} mask values, {len(sample.logprobs)} logprobs"
            yield Violation(kind="length_mismatch", segment=segment, message=message)
            return
        if path is None:
            message = f"turns {sample.turns} are no line from a root"
            yield Violation(kind="path_broken", segment=segment, message=message)
            return
        whole = array("i")
        for turn in path:
            whole += turn.delta
            whole += turn.sampled
        cut = len(whole) - length
        # A cut inside a turn is right only where no end of a turn would do.
        if whole[:length] != sample.tokens or (cut > 0 and not (sample.truncated and len(path) == 1)):
            yield Violation(kind="tokens_differ", segment=segment, message="the tokens are not those of its turns")
            return
        if sample.prompt_length != min(len(path[0].delta), length):
            message = f"prompt_length {sample.prompt_length} is not where the first reply begins"
            yield Violation(kind="length_mismatch", segment=segment, message=message)
        versions = _per_token(sample.versions, length)
        own = next((turn for turn in path if turn.index not in self._seen), None)
        if own is not None and own.role != sample.role:
            message = f"its role is {sample.role}, that of turn {own.index} is {own.role}"
            yield Violation(kind="role_differs", segment=segment, message=message)
        self._seen.update(sample.turns)
        self._told.update(sample.excluded)
        gone = min(cut, len(path[-1].sampled))
        told = sample.excluded.get("truncated", 0)
        if told < gone or sample.truncated != (told > 0 or cut > 0 or path[-1].finish == "length"):
            message = f"{told} tokens are said to be truncated, {gone} are missing from its last turn"
            yield Violation(kind="excluded_miscounted", segment=segment, message=message)
        elif told:
            self._ends[path[-1].index] = len(path[-1].sampled) - gone
        start = 0
        for turn in path:
            end = start + len(turn.delta)
            if any(sample.loss_mask[start:end]) or any(sample.logprobs[start:end]):
                message = "a token of the prompt has loss or a logprob"
                yield Violation(kind="trained_not_sampled", turn=turn.index, segment=segment, message=message)
            start, end = end, end + len(turn.sampled)
            part = slice(start, end)
            told_by = (turn.logprob_kind, turn.temperature)
            if any(sample.loss_mask[part]) and told_by != (sample.logprob_kind, sample.temperature):
                message = f"a trained turn has logprobs of kind {told_by[0]} at temperature {told_by[1]}"
                yield Violation(kind="sampler_differs", turn=turn.index, segment=segment, message=message)
            for kind, message in self._enter(turn, sample.loss_mask[part], sample.logprobs[part], versions[part]):
                yield Violation(kind=kind, turn=turn.index, segment=segment, message=message)
            start = end

    def _enter(
        self, turn: Turn, mask: array[int], logprobs: array[float], versions: list[str | None]
    ) -> Iterator[tuple[ViolationKind, str]]:
        """The part of one turn's sampled tokens that is in a sample."""
        count = len(mask)
        trained = sum(mask)
        self._untrained += count - trained
        if trained == 0:
            if any(mask) or any(logprobs):
                yield "logprob_differs", "a token without loss has a logprob"
            return
        if any(value not in (0, 1) for value in mask):
            yield "trained_not_sampled", "the mask has other values than 0 and 1"
            return
        if not turn.delivered:
            yield "trained_undelivered", "the client never got this reply"
        if turn.index in self._superseded:
            yield "trained_superseded", "the client went on from another answer to the same request"
        if not turn.trained:
            yield "trained_class", "its class of traffic is not to be trained"
        times = self._times[turn.index]
        for offset, value in enumerate(mask):
            if value:
                times[offset] = min(times[offset] + 1, 255)
        if max(times) > 1:
            yield "trained_twice", "a token of it is trained in another sample too"
        engine = turn.logprobs[:count]
        if trained < count:
            engine = array("d", (given if value else 0.0 for given, value in zip(engine, mask, strict=True)))
        # NaN and infinity are never what is trained, so equality is enough for the rest.
        if logprobs != engine or not isfinite(sum(engine)):
            yield "logprob_differs", "a trained token's logprob is not the engine's, or is not finite"
        own = _per_token(turn.versions, count)
        if any(value and mine != given for value, mine, given in zip(mask, own, versions, strict=True)):
            yield "version_missing", "a trained token has not the weight version that sampled it"
        accepted = self._accepted
        if accepted is not None and any(value and mine not in accepted for value, mine in zip(mask, own, strict=True)):
            yield "trained_stale", "a trained token was sampled by weights that are too old"

    def _path(self, steps: Sequence[int]) -> list[Turn] | None:
        if not steps or not all(0 <= step < len(self._turns) for step in steps):
            return None
        path = [self._turns[step] for step in steps]
        parents = [turn.parent for turn in path]
        return path if parents == [None, *steps[:-1]] else None

    @property
    def trained(self) -> int:
        return sum(len(times) - times.count(0) for times in self._times)

    def settle(self) -> tuple[list[Violation], Counter[str]]:
        """Tokens that no sample trains: those without a reason as violations, the others by reason."""
        violations: list[Violation] = []
        excluded: Counter[str] = Counter()
        off_path = 0
        beyond: list[bool] = []
        for turn in self._turns:
            parent = turn.parent
            beyond.append(parent is not None and (beyond[parent] or parent in self._ends))
            untrained = self._times[turn.index].count(0)
            if (not turn.delivered or turn.index in self._superseded) and turn.index not in self._seen:
                off_path += len(turn.sampled)
            if not untrained:
                continue
            versions = _per_token(turn.versions, len(turn.sampled))
            reasons = Counter(
                self._reason(turn, offset, versions[offset], beyond[-1])
                for offset, times in enumerate(self._times[turn.index])
                if not times
            )
            lost = reasons.pop("", 0)
            excluded += reasons
            if lost:
                message = f"{lost} sampled tokens are trained nowhere, without a reason"
                violations.append(Violation(kind="sampled_lost", turn=turn.index, message=message))
        told = sum(count for reason, count in self._told.items() if reason != "truncated")
        if self._seen and told != self._untrained + off_path:
            message = (
                f"{self._untrained + off_path} untrained tokens in the samples' branches, the samples tell of {told}"
            )
            violations.append(Violation(kind="excluded_miscounted", message=message))
        return violations, excluded

    def _reason(self, turn: Turn, offset: int, version: str | None, beyond: bool) -> str:
        if not turn.delivered:
            return "undelivered"
        if turn.index in self._superseded:
            return "superseded"
        if beyond or offset >= self._ends.get(turn.index, len(turn.sampled)):
            return "truncated"
        if not turn.trained:
            return "class_not_trained"
        if self._accepted is not None and version not in self._accepted:
            return "stale_version"
        return "" if isfinite(turn.logprobs[offset]) else "non_finite_logprob"


def _superseded(turns: Sequence[Turn]) -> set[int]:
    """Turns without a continuation that answer the very prompt that a continued one of the same agent answers."""
    by_prompt: dict[tuple[int | None, bytes, str, str], list[Turn]] = {}
    for turn in turns:
        if turn.delivered:
            agent: str = turn.meta.get("agent", "")
            by_prompt.setdefault((turn.parent, turn.delta.tobytes(), turn.role, agent), []).append(turn)
    parents = {turn.parent for turn in turns if turn.delivered}
    left: set[int] = set()
    for answers in by_prompt.values():
        ends = {turn.index for turn in answers if turn.index not in parents}
        if len(ends) < len(answers):
            left |= ends
    return left


def _per_token(spans: Sequence[VersionSpan], length: int) -> list[str | None]:
    versions: list[str | None] = [None] * length
    for span in spans:
        end = min(span.end, length)
        if 0 <= span.start < end:
            versions[span.start : end] = [span.version] * (end - span.start)
    return versions
