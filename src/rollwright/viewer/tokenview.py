"""A branch as tokens: which are trained, which are prompt, which are left out and why; and where histories parted."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Literal, Protocol, get_args

from rollwright.errors import RollwrightError
from rollwright.gateway.log import LoggedTrajectory
from rollwright.tokens.tokenizer import SpecialText, TextTokenizer, fingerprint
from rollwright.tokens.tree import Trajectory, Turn
from rollwright.types import Sample
from rollwright.viewer.text import clean

__all__ = [
    "Branch",
    "Fates",
    "Gap",
    "Parting",
    "Pieces",
    "Span",
    "Token",
    "TokenTurn",
    "branches",
    "partings",
    "token_turns",
]

Kind = Literal["prompt", "trained", "excluded"]

_EDGE = 300
"""Tokens of a long prompt part that are shown at each of its ends."""
_MOST_SAMPLED = 6000
"""Tokens of one reply that are shown."""
_AROUND = (24, 60)
"""Tokens shown before and after the place where two histories part."""
_MOST_BYTES = 4
"""Tokens of one byte each that a character can take."""
CONTINUED = "‥"
"""Stands for a token that goes on with the character before it."""
_HEAT = (0.99, 0.9, 0.7, 0.4, 0.2, 0.05, 0.01)
"""Probabilities at which the colour changes."""


class _Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Pieces:
    """Ids → the text of each alone. Without the run's tokenizer: the ids as they are."""

    def __init__(self, decoder: _Decoder | None, problem: str = "") -> None:
        self._decoder = decoder
        self.problem = problem
        """Why there is no text."""
        self._known: dict[int, str] = {}

    @classmethod
    def load(cls, folder: Path, wanted: str | None) -> Pieces:
        """`wanted`: the fingerprint of the run's tokenizer; another one's text would be a lie."""
        try:
            if wanted is not None and wanted not in _fingerprints(folder):
                return cls(None, f"the tokenizer in {folder} is not the run's (its fingerprint differs)")
            return cls(TextTokenizer(folder))
        except (OSError, RollwrightError):
            return cls(None, f"the run's tokenizer is not at {folder}; give its folder with --tokenizer")

    def of(self, ids: Sequence[int]) -> list[str]:
        """A text for each token. Where several make up one character, the first has it and the others a mark."""
        texts = [self._one(token) for token in ids]
        for place, text in enumerate(texts):
            if "\ufffd" not in text or self._decoder is None:
                continue
            for count in range(2, _MOST_BYTES + 1):
                whole = self._decoder.decode(ids[place : place + count])
                if "\ufffd" not in whole and place + count <= len(ids):
                    texts[place : place + count] = [_shown(whole), *[CONTINUED] * (count - 1)]
                    break
        return texts

    def _one(self, token: int) -> str:
        known = self._known.get(token)
        if known is None:
            known = f"{token} " if self._decoder is None else _shown(self._decoder.decode([token])) or "∅"
            self._known[token] = known
        return known

    def text(self, ids: Sequence[int]) -> str:
        if self._decoder is None:
            return " ".join(map(str, ids))
        return clean(self._decoder.decode(ids))


def _shown(text: str) -> str:
    return clean(text)[:200].replace("\n", "↵\n").replace("\t", "→\t")


def _fingerprints(folder: Path) -> set[str]:
    """How text becomes ids differs between them, not what ids mean."""
    return {fingerprint(folder, special_text=way) for way in get_args(SpecialText)}


@dataclass(frozen=True, slots=True)
class Token:
    """One token as it is shown."""

    id: int
    text: str
    logprob: float | None = None
    heat: int | None = None
    """0: nearly certain … 7: most surprising. None: no logprob, or not a finite one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring tokens of one kind and one weight version."""

    kind: Kind
    reason: str
    """Why it is excluded."""
    version: str
    start: int
    """Place of its first token in the branch."""
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Gap:
    """Prompt tokens that are not shown."""

    count: int


@dataclass(slots=True)
class TokenTurn:
    """One turn of a branch."""

    turn: Turn
    start: int
    prompt: list[Span | Gap]
    sampled: list[Span | Gap]
    trained: int
    parting: Parting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where a prompt left the history it looks like a continuation of, or a sample was cut."""

    what: str
    turn: int
    place: int
    """Token index."""
    before: str
    """What both have."""
    left: str
    right: str
    left_name: str
    right_name: str
    explained: str


EXPLAINED: Mapping[str, str] = {
    "assistant_rewritten": "The client says that this turn meant something else than what was sampled.",
    "history_edited": "A message before one of the policy's turns is not what it was.",
    "tools_changed": "The client offers other tools than that turn had.",
    "foreign_assistant": "The history has an answer that no turn gave.",
    "answer_dropped": "The client asks on without the answer that this turn gave.",
    "bridge_refused": "The template cannot say the new messages after the stored ids.",
    "history_kept": "The client rewrote a message; the prompt goes on from what the engine was given.",
}


class Fates:
    """What became of each sampled token: trained in which sample, or left out for which reason."""

    def __init__(self, trajectory: Trajectory, samples: Sequence[Sample], *, graded: bool) -> None:
        self._trajectory = trajectory
        self._graded = graded
        self._trained: dict[int, list[tuple[int, bytes]]] = {}
        """Turn → the samples that it is in, with the part of their mask."""
        self._cut: set[int] = set()
        """Last turns of truncated samples."""
        self._accepted: frozenset[str] | None = None
        for sample in samples:
            self._take(sample)

    def _take(self, sample: Sample) -> None:
        if sample.accepted_versions is not None:
            self._accepted = frozenset(sample.accepted_versions)
        turns = self._trajectory.turns
        place = 0
        for index in sample.turns:
            if not 0 <= index < len(turns):
                return
            place += len(turns[index].delta)
            mask = bytes(bool(bit) for bit in sample.loss_mask[place : place + len(turns[index].sampled)])
            self._trained.setdefault(index, []).append((sample.segment_index, mask))
            place += len(turns[index].sampled)
        if sample.truncated and sample.turns:
            self._cut.add(sample.turns[-1])

    def of(self, turn: Turn) -> list[str]:
        """For each sampled token of a turn: empty when it is trained, else the reason."""
        count = len(turn.sampled)
        if not self._graded:
            return ["ungraded"] * count
        held = self._trained.get(turn.index, ())
        reasons = [self._whole(turn)] * count
        for offset in range(count):
            if any(offset < len(mask) and mask[offset] for _, mask in held):
                reasons[offset] = ""
            elif not reasons[offset]:
                reasons[offset] = self._one(turn, offset, held)
        return reasons

    def trained_in(self, turn: Turn) -> int | None:
        """The sample that trains (a part of) a turn."""
        return next((segment for segment, mask in self._trained.get(turn.index, ()) if any(mask)), None)

    def _whole(self, turn: Turn) -> str:
        """A reason that holds for each token of a turn; empty when there is none."""
        if not turn.delivered:
            return "undelivered"
        if turn.index not in self._trained:
            beyond = any(step in self._cut for step in self._trajectory.path(turn.index))
            return "truncated" if beyond else "superseded"
        return "" if turn.trained else "class_not_trained"

    def _one(self, turn: Turn, offset: int, held: Sequence[tuple[int, bytes]]) -> str:
        if all(offset >= len(mask) for _, mask in held):
            return "truncated"
        if not isfinite(turn.logprobs[offset]):
            return "non_finite_logprob"
        if self._accepted is not None and _version(turn, offset) not in self._accepted:
            return "stale_version"
        return "not in the mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A root-to-leaf line as a row of a list."""

    leaf: int
    role: str
    turns: int
    tokens: int
    sampled: int
    trained: int
    undelivered: bool


def branches(trajectory: Trajectory, fates: Fates) -> list[Branch]:
    """All of them, in order of their leaves."""
    trained = [fates.of(turn).count("") for turn in trajectory.turns]
    found: list[Branch] = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        turns = [trajectory.turns[index] for index in path]
        found.append(
            Branch(
                leaf=leaf,
                role=trajectory.turns[leaf].role,
                turns=len(path),
                tokens=sum(len(turn.delta) + len(turn.sampled) for turn in turns),
                sampled=sum(len(turn.sampled) for turn in turns),
                trained=sum(trained[index] for index in path),
                undelivered=not trajectory.turns[leaf].delivered,
            )
        )
    return found


def token_turns(trajectory: Trajectory, turns: Sequence[int], fates: Fates, pieces: Pieces) -> list[TokenTurn]:
    """The turns `turns` (neighbours on a path from a root) as tokens."""
    if not turns:
        return []
    place = sum(
        len(trajectory.turns[step].delta) + len(trajectory.turns[step].sampled)
        for step in trajectory.path(turns[0])[:-1]
    )
    shown: list[TokenTurn] = []
    for index in turns:
        turn = trajectory.turns[index]
        reasons = fates.of(turn)
        middle = place + len(turn.delta)
        shown.append(
            TokenTurn(
                turn=turn,
                start=place,
                prompt=list(_prompt(turn.delta, place, pieces)),
                sampled=list(_sampled(turn, reasons, middle, pieces)),
                trained=reasons.count(""),
            )
        )
        place = middle + len(turn.sampled)
    return shown


def _prompt(delta: array[int], start: int, pieces: Pieces) -> Iterator[Span | Gap]:
    count = len(delta)
    parts = [(0, count)] if count <= 2 * _EDGE + 200 else [(0, _EDGE), (count - _EDGE, count)]
    for place, (begin, end) in enumerate(parts):
        if place:
            yield Gap(begin - parts[0][1])
        ids = delta[begin:end].tolist()
        tokens = [Token(token, text) for token, text in zip(ids, pieces.of(ids), strict=True)]
        if tokens:
            yield Span(kind="prompt", reason="", version="", start=start + begin, tokens=tokens)


def _sampled(turn: Turn, reasons: Sequence[str], start: int, pieces: Pieces) -> Iterator[Span | Gap]:
    tokens: list[Token] = []
    count = min(len(turn.sampled), _MOST_SAMPLED)
    begin = 0
    texts = pieces.of(turn.sampled[:count].tolist())
    key: tuple[str, str] | None = None
    for offset in range(count + 1):
        now = (reasons[offset], _version(turn, offset)) if offset < count else None
        if now != key and tokens and key is not None:
            yield Span(
                kind="excluded" if key[0] else "trained",
                reason=key[0],
                version=key[1],
                start=start + begin,
                tokens=tokens,
            )
            tokens, begin = [], offset
        key = now
        if offset < count:
            token, logprob = turn.sampled[offset], turn.logprobs[offset]
            finite = isfinite(logprob)
            tokens.append(Token(token, texts[offset], logprob, _heat(logprob) if finite else None))
    if count < len(turn.sampled):
        yield Gap(len(turn.sampled) - count)


def _heat(logprob: float) -> int:
    probability = exp(min(logprob, 0.0))
    return next((level for level, limit in enumerate(_HEAT) if probability >= limit), len(_HEAT))


def _version(turn: Turn, offset: int) -> str:
    return next((span.version for span in turn.versions if span.start <= offset < span.end), "")


def partings(logged: LoggedTrajectory, samples: Sequence[Sample], pieces: Pieces) -> list[Parting]:
    """Every drift, then every cut, with the texts on both sides."""
    trajectory = logged.trajectory
    found: list[Parting] = []
    for turn in trajectory.turns:
        drift = turn.drift
        if drift is None or not 0 <= drift.turn < len(trajectory.turns):
            continue
        before, left, right = "", drift.stored_text, drift.new_text
        if drift.cause != "history_kept":
            old, new = trajectory.ids(drift.turn), trajectory.ids(turn.index)[: -len(turn.sampled) or None]
            at = min(max(drift.token_index, 0), len(old), len(new))
            before = pieces.text(new[max(0, at - _AROUND[0]) : at])
            left, right = pieces.text(old[at : at + _AROUND[1]]), pieces.text(new[at : at + _AROUND[1]])
        found.append(
            Parting(
                what=drift.cause,
                turn=turn.index,
                place=drift.token_index,
                before=before,
                left=left,
                right=right,
                left_name=f"stored, up to turn {drift.turn}",
                right_name=f"asked for by turn {turn.index}",
                explained=EXPLAINED.get(drift.cause, ""),
            )
        )
    for sample in samples:
        excluded = sample.excluded.get("truncated", 0)
        if not excluded or not sample.turns:
            continue
        last = sample.turns[-1]
        leaf = next((leaf for leaf in trajectory.leaves() if last in trajectory.path(leaf)), last)
        whole = trajectory.ids(leaf)
        at = len(sample.tokens)
        found.append(
            Parting(
                what="truncated",
                turn=last,
                place=at,
                before="",
                left=pieces.text(whole[max(0, at - _AROUND[1]) : at]),
                right=pieces.text(whole[at : at + _AROUND[1]]),
                left_name=f"the end of sample {sample.segment_index}",
                right_name="left out",
                explained=f"The sample was cut to {at:,} tokens; {excluded:,} sampled tokens are not in it.",
            )
        )
    return found
