"""The trajectory: every turn of a rollout as a tree that stores token *deltas* only."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, Self

from rollwright.errors import EngineProtocolError
from rollwright.messages import Message, ToolSpec
from rollwright.tokens import Renderer
from rollwright.tokens.canonical import chain, digest, digests, echoed_ids, same_reasoning, tools_digest
from rollwright.types import BranchRole, FinishReason, HistoryPolicy, LogprobKind, VersionSpan

__all__ = ["Drift", "DriftCause", "Plan", "Trajectory", "Turn", "checked_spans"]

DriftCause = Literal[
    "assistant_rewritten",
    "history_edited",
    "tools_changed",
    "foreign_assistant",
    "answer_dropped",
    "bridge_refused",
    "history_kept",
]
"""assistant_rewritten: the client says our turn meant something else. history_edited: a message before one of our
turns differs. tools_changed: other tools than that turn had. foreign_assistant: an answer that no turn gave.
answer_dropped: what that turn was asked and more, without its answer (CLIs leave empty and malformed answers out).
bridge_refused: the template cannot say the new messages after the stored ids. history_kept: a message before one of
our turns differs, and the prompt goes on from what the engine was given (`append_only`)."""

_SHOWN = 12
"""Tokens decoded on each side of a drift."""
_SHOWN_TEXT = 60
"""Characters shown where texts differ and ids do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Why a request could not extend the turn it looks like a continuation of."""

    cause: DriftCause
    turn: int
    """Index of that turn."""
    token_index: int
    """Where the new prompt leaves that turn's stored ids."""
    stored_text: str = ""
    new_text: str = ""
    """A few decoded tokens on each side of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one request hangs on the tree: made before generation, turned into a `Turn` by `commit`."""

    parent: int | None
    """Index of the turn it extends; None for a new root."""
    delta: list[int]
    """Prompt ids that come after the parent's ids (the whole prompt for a root)."""
    prompt: array[int]
    """Everything the engine is to be given; an array, because a list of 100k ints costs milliseconds to make."""
    keys: tuple[str, ...]
    """Digests of `messages`, for later matching."""
    tools_key: str
    request_key: str
    """Of the conversation the engine is given: equal for the retries of one request, and with the history as it came
    `Trajectory.digest_request` of it."""
    messages: tuple[Message, ...]
    """Only those that the parent does not already hold."""
    tools: tuple[ToolSpec, ...] = ()
    drift: Drift | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One committed model call."""

    index: int
    parent: int | None
    delta: array[int]
    sampled: array[int]
    logprobs: array[float]
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    """Over `sampled`, without gaps."""
    keys: tuple[str, ...]
    """Digests of the messages this turn added to its parent: the request's new ones, then the reply."""
    carriers: frozenset[str]
    """Ids we minted for the reply."""
    messages: tuple[Message, ...]
    """The new messages, then the reply."""
    tools_key: str
    role: BranchRole = "main"
    logprob_kind: LogprobKind = "behaviour"
    temperature: float = 1.0
    ill_formed: str | None = None
    delivered: bool = True
    """Whether the client got the whole reply. An undelivered turn trains nothing."""
    trained: bool = True
    """Whether its class of traffic is to be trained; else its tokens are context only."""
    drift: Drift | None = None
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def reply(self) -> Message:
        return self.messages[-1]


@dataclass(frozen=True, slots=True)
class _Match:
    """The deepest turn whose whole conversation a request begins with."""

    turn: int
    end: int
    """How many messages of the request that is."""


class Trajectory:
    """Append-only tree of turns.

    `plan` only reads: it may run in another thread while a turn is committed, and sees that turn or does not. Commits
    must not run at the same time.
    """

    def __init__(self, rollout_id: str, *, history: HistoryPolicy = "exact") -> None:
        self.rollout_id = rollout_id
        self.history: HistoryPolicy = history
        self.turns: list[Turn] = []
        # Per turn: its children, and the chain digest after its reply.
        self._children: list[list[int]] = []
        self._roots: list[int] = []
        self._chains: list[str] = []
        # Where to look turns up.
        self._by_chain: dict[str, list[int]] = {}
        self._by_request: dict[str, list[int]] = {}
        self._by_carrier: dict[str, int] = {}
        self._by_reply: dict[str, list[int]] = {}

    @classmethod
    def restore(cls, rollout_id: str, turns: Iterable[Turn], *, history: HistoryPolicy = "exact") -> Self:
        """The tree of stored turns, in the order they were committed."""
        trajectory = cls(rollout_id, history=history)
        for turn in turns:
            trajectory._add(turn)
        return trajectory

    # ------------------------------------------------------------------ requests

    def keys_of(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """The digest of each message. Only reads, like `plan`.

        A history that is as the tree has it is looked up there: to compare a text costs a fraction of hashing it.
        """
        known = self._said_before(messages)
        keys: list[str] = []
        for position, message in enumerate(messages):
            said, key = known[position] if position < len(known) else (None, "")
            keys.append(key if message == said and _plain_calls(message) else digest(message))
        return tuple(keys)

    def _said_before(self, messages: Sequence[Message]) -> list[tuple[Message, str]]:
        """The conversation up to the last answer that the request has an id of: each message with its digest."""
        for message in reversed(messages):
            for name in echoed_ids(message):
                turn = self._by_carrier.get(name)
                if turn is not None:
                    path = [self.turns[step] for step in self.path(turn)]
                    return [pair for step in path for pair in zip(step.messages, step.keys, strict=True)]
        return []

    @staticmethod
    def digest_request(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """Equal for two requests that mean the same: how a retry is known. 32 hex digits."""
        key = ""
        for each in digests(messages):
            key = chain(key, each)
        return chain(tools_digest(tools), key)

    def answers_to(self, request_key: str) -> list[int]:
        """Turns committed for requests with this digest, in order."""
        return list(self._by_request.get(request_key, ()))

    def plan(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        renderer: Renderer,
        *,
        history: HistoryPolicy | None = None,
        keys: tuple[str, ...] | None = None,
        tools_key: str | None = None,
    ) -> Plan:
        """Find the deepest turn the request continues and extend it by a bridge; else render in full.

        Our own turns inside the new part keep their stored ids (as context; they train where they were sampled).
        `history` stands in for the trajectory's; `keys` and `tools_key` are the digests of messages and tools, where
        they are known already. Raises `UsageError` when the template refuses the conversation.
        """
        keys = digests(messages) if keys is None else keys
        chains: list[str] = []
        running = ""
        for key in keys:
            running = chain(running, key)
            chains.append(running)
        tools_key = tools_digest(tools) if tools_key is None else tools_key
        request_key = chain(tools_key, running)

        match, suspect = self._deepest(messages, chains, tools_key)
        if (history or self.history) == "append_only":
            kept = self._kept(messages, keys, tools_key, 0 if match is None else match.end)
            if kept is not None:
                match = kept
                suspect = "history_kept", kept.turn
                running = self._chains[kept.turn]
                for key in keys[kept.end :]:
                    running = chain(running, key)
                request_key = chain(tools_key, running)
        parent = None if match is None else match.turn
        held = 0 if match is None else match.end
        cause = suspect or self._divergence(messages, keys, chains, tools_key, match)
        cause = cause or self._dropped(messages, keys, tools_key, match)
        twin = next((i for i in self._by_request.get(request_key, ()) if self.turns[i].parent == parent), None)
        delta: list[int] | None
        if twin is not None:
            # The same prompt again: the same ids, without asking the template.
            delta = self.turns[twin].delta.tolist()
        else:
            delta = self._compose(match, messages, keys, tools, renderer)
            if delta is None and cause is not None and cause[0] == "history_kept":
                return self.plan(messages, tools, renderer, history="exact", keys=keys, tools_key=tools_key)
            if delta is None and match is not None:
                cause = cause or ("bridge_refused", match.turn)
                parent, held = None, 0
                delta = self._compose(None, messages, keys, tools, renderer)
            if delta is None:
                delta = renderer.render(messages, tools)
        prompt = array("i") if parent is None else self._ids(parent)
        prompt.extend(delta)
        return Plan(
            parent=parent,
            delta=delta,
            prompt=prompt,
            keys=keys[held:],
            tools_key=tools_key,
            request_key=request_key,
            messages=tuple(messages[held:]),
            tools=tuple(tools),
            drift=None if cause is None else self._drift(*cause, prompt, messages, renderer),
        )

    def _deepest(
        self, messages: Sequence[Message], chains: Sequence[str], tools_key: str
    ) -> tuple[_Match | None, tuple[DriftCause, int] | None]:
        """The match, and why a deeper look-alike is none."""
        suspect: tuple[DriftCause, int] | None = None
        end = len(messages)
        while end > 0:
            end -= 1
            candidates = self._by_chain.get(chains[end], ()) if messages[end].role == "assistant" else ()
            best: tuple[int, int] | None = None
            alike: tuple[DriftCause, int] | None = None
            retreats: list[int] = []
            for index in candidates:
                if self.turns[index].tools_key != tools_key:
                    alike = alike or ("tools_changed", index)
                    continue
                score, differs = self._agreement(index, messages, end)
                if differs is not None:
                    alike = ("assistant_rewritten", index)
                    retreats.append(differs)
                elif best is None or (score, index) > best:
                    best = (score, index)
            if best is not None:
                return _Match(best[1], end + 1), suspect
            suspect = suspect or alike
            end = max(retreats, default=end)
        return None, suspect

    def _agreement(self, index: int, messages: Sequence[Message], end: int) -> tuple[int, int | None]:
        """How well the echoed ids fit the path to turn `index`, whose reply is `messages[end]`; and the position of
        a reasoning that says something else."""
        score = 0
        differs: int | None = None
        at: int | None = index
        while at is not None:
            turn = self.turns[at]
            message = messages[end]
            if not same_reasoning(message.reasoning, turn.reply.reasoning):
                differs = end
            echoed = echoed_ids(message)
            if echoed & turn.carriers:
                score += 1
            elif any(name in self._by_carrier for name in echoed):
                score -= 1
            end -= len(turn.keys)
            at = turn.parent
        return score, differs

    def _kept(self, messages: Sequence[Message], keys: Sequence[str], tools_key: str, after: int) -> _Match | None:
        """The last turn whose path holds the very answers that the request has up to it, in their order, below the
        same system message: so only what others said was rewritten. None when that is no deeper than `after`."""
        answers = [position for position in range(len(messages)) if messages[position].role == "assistant"]
        while answers and answers[-1] >= after:
            said = [keys[position] for position in answers]
            position = answers.pop()
            message = messages[position]
            named = {self._by_carrier[name] for name in echoed_ids(message) if name in self._by_carrier}
            for index in reversed(self._by_reply.get(keys[position], ())):
                turn = self.turns[index]
                if (
                    turn.tools_key == tools_key
                    and (not named or index in named)
                    and same_reasoning(message.reasoning, turn.reply.reasoning)
                    and self._answers_on(index, messages[0], keys[0]) == said
                ):
                    return _Match(index, position + 1)
        return None

    def _answers_on(self, index: int, first: Message, first_key: str) -> list[str] | None:
        """Digests of all answers on the path to a turn; None where it begins below another system message."""
        path = [self.turns[step] for step in self.path(index)]
        system = path[0].keys[0] if path[0].messages[0].role == "system" else ""
        if system != (first_key if first.role == "system" else ""):
            return None
        return [
            key
            for turn in path
            for message, key in zip(turn.messages, turn.keys, strict=True)
            if message.role == "assistant"
        ]

    def _divergence(
        self,
        messages: Sequence[Message],
        keys: Sequence[str],
        chains: Sequence[str],
        tools_key: str,
        match: _Match | None,
    ) -> tuple[DriftCause, int] | None:
        """Why the request has an answer after the match that the tree does not have there."""
        for position in range(0 if match is None else match.end, len(messages)):
            message = messages[position]
            if message.role != "assistant":
                continue
            known = [self._by_carrier[name] for name in echoed_ids(message) if name in self._by_carrier]
            if known:
                turn = max(known)
                same = self.turns[turn].keys[-1] == keys[position]
                return ("history_edited" if same else "assistant_rewritten"), turn
            before = chains[position - 1] if position else ""
            if asked := self._by_request.get(chain(tools_key, before)):
                return "assistant_rewritten", asked[-1]
            if said := self._by_reply.get(keys[position]):
                return "history_edited", said[-1]
            if match is not None:
                return "foreign_assistant", match.turn
        return None

    def _dropped(
        self, messages: Sequence[Message], keys: Sequence[str], tools_key: str, match: _Match | None
    ) -> tuple[DriftCause, int] | None:
        """The last turn after the match whose request this one begins with; without answers in between it is none that
        the client has gone on from."""
        held = 0 if match is None else match.end
        if any(message.role == "assistant" for message in messages[held:]):
            return None
        for index in reversed(self._roots if match is None else self._children[match.turn]):
            turn = self.turns[index]
            asked = turn.keys[:-1]
            longer = len(keys) - held > len(asked)
            if longer and turn.tools_key == tools_key and tuple(keys[held : held + len(asked)]) == asked:
                return "answer_dropped", index
        return None

    def _drift(
        self, cause: DriftCause, turn: int, prompt: array[int], messages: Sequence[Message], renderer: Renderer
    ) -> Drift:
        stored = self._ids(turn)
        if cause == "history_kept":
            # The ids do not differ; what was not followed is in the texts.
            ours = [message for step in self.path(turn) for message in self.turns[step].messages]
            pairs = zip_longest(ours, messages)
            old, new = next(
                ((a, b) for a, b in pairs if a is None or b is None or digest(a) != digest(b)), (None, None)
            )
            shown = [("" if message is None else message.content) for message in (old, new)]
            at = next((n for n, (a, b) in enumerate(zip(*shown, strict=False)) if a != b), min(map(len, shown)))
            return Drift(
                cause=cause,
                turn=turn,
                token_index=len(stored),
                stored_text=shown[0][at : at + _SHOWN_TEXT],
                new_text=shown[1][at : at + _SHOWN_TEXT],
            )
        at = _common_prefix(stored, prompt)
        return Drift(
            cause=cause,
            turn=turn,
            token_index=at,
            stored_text=renderer.decode(stored[at : at + _SHOWN]),
            new_text=renderer.decode(prompt[at : at + _SHOWN]),
        )

    def _compose(
        self,
        match: _Match | None,
        messages: Sequence[Message],
        keys: Sequence[str],
        tools: Sequence[ToolSpec],
        renderer: Renderer,
    ) -> list[int] | None:
        """The ids after the matched turn (or from the start): template text for what others said, stored ids for
        what the policy said. None when a bridge is refused, or when nothing of the policy's is in it."""
        start = 0 if match is None else match.end
        own = {
            position: turn
            for position in range(start, len(messages))
            if (turn := self._own(messages[position], keys[position])) is not None
        }
        ids: list[int] = []
        prompt: Sequence[int]
        sampled: Sequence[int]
        if match is not None:
            prompt, sampled = self.turns[match.turn].delta, self.turns[match.turn].sampled
        elif own and min(own) > 0:
            first = min(own)
            prompt = renderer.render(messages[:first], tools)
            sampled = self.turns[own.pop(first)].sampled
            start = first + 1
            ids += prompt
            ids += sampled
        else:
            return None
        for position in (*own, len(messages)):
            piece = renderer.bridge(prompt, sampled, messages[:start], messages[start:position], tools)
            if piece is None:
                return None
            ids += piece
            if position in own:
                prompt, sampled = piece, self.turns[own[position]].sampled
                ids += sampled
                start = position + 1
        return ids

    def _own(self, message: Message, key: str) -> int | None:
        """The turn whose reply this message is, wherever it now stands."""
        if message.role != "assistant":
            return None
        said = self._by_reply.get(key, ())
        echoed = echoed_ids(message)
        named = [index for index in said if echoed & self.turns[index].carriers]
        # Without an id, equal text alone names a turn only when no other turn said it.
        found = named[-1] if named else (said[0] if len(said) == 1 else None)
        if found is None or not same_reasoning(message.reasoning, self.turns[found].reply.reasoning):
            return None
        return found

    # ------------------------------------------------------------------ turns

    def commit(
        self,
        plan: Plan,
        *,
        sampled: Sequence[int],
        logprobs: Sequence[float],
        finish: FinishReason,
        versions: Sequence[VersionSpan],
        reply: Message,
        role: BranchRole = "main",
        logprob_kind: LogprobKind = "behaviour",
        temperature: float = 1.0,
        ill_formed: str | None = None,
        trained: bool = True,
        meta: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Add the turn. Raises `EngineProtocolError` when lengths differ or versions leave a gap.

        A turn that is continued was delivered, whatever was marked before: the client has it.
        """
        spans = checked_spans(versions, len(sampled))
        if len(logprobs) != len(sampled):
            raise EngineProtocolError(
                f"{len(sampled)} sampled tokens came with {len(logprobs)} logprobs", turn=len(self.turns)
            )
        try:
            values = array("d", logprobs)
        except TypeError as error:
            raise EngineProtocolError("a sampled token came without a logprob", turn=len(self.turns)) from error
        delta = array("i", plan.delta)
        for twin in self._by_request.get(plan.request_key, ()):
            if self.turns[twin].parent == plan.parent and self.turns[twin].delta == delta:
                delta = self.turns[twin].delta
        turn = Turn(
            index=len(self.turns),
            parent=plan.parent,
            delta=delta,
            sampled=array("i", sampled),
            logprobs=values,
            finish=finish,
            versions=spans,
            keys=(*plan.keys, digest(reply)),
            carriers=echoed_ids(reply),
            messages=(*plan.messages, reply),
            tools_key=plan.tools_key,
            role=role,
            logprob_kind=logprob_kind,
            temperature=temperature,
            ill_formed=ill_formed,
            trained=trained,
            drift=plan.drift,
            meta=dict(meta or {}),
        )
        self._add(turn)
        return turn

    def _add(self, turn: Turn) -> None:
        parent = turn.parent
        running = "" if parent is None else self._chains[parent]
        for key in turn.keys[:-1]:
            running = chain(running, key)
        request_key = chain(turn.tools_key, running)
        running = chain(running, turn.keys[-1])
        self.turns.append(turn)
        self._children.append([])
        self._chains.append(running)
        # Look-ups last: what a reader finds by them is complete.
        at = parent
        while at is not None and not self.turns[at].delivered:
            self.mark_delivered(at)
            at = self.turns[at].parent
        (self._roots if parent is None else self._children[parent]).append(turn.index)
        for name in turn.carriers:
            self._by_carrier[name] = turn.index
        self._by_reply.setdefault(turn.keys[-1], []).append(turn.index)
        self._by_request.setdefault(request_key, []).append(turn.index)
        self._by_chain.setdefault(running, []).append(turn.index)

    def mark_undelivered(self, index: int) -> None:
        """The client never got the reply of this turn. Ignored for a turn that a later one continues."""
        if not self._children[index]:
            self.turns[index] = dataclasses.replace(self.turns[index], delivered=False)

    def mark_delivered(self, index: int) -> None:
        """The client has the reply after all (it was replayed to a retry)."""
        self.turns[index] = dataclasses.replace(self.turns[index], delivered=True)

    # ------------------------------------------------------------------ reading

    def ids(self, index: int) -> list[int]:
        """All ids from the root through this turn's sampled ones."""
        return self._ids(index).tolist()

    def _ids(self, index: int) -> array[int]:
        whole = array("i")
        for step in self.path(index):
            turn = self.turns[step]
            whole += turn.delta
            whole += turn.sampled
        return whole

    def leaves(self) -> list[int]:
        """Turns nothing continues, in order of creation."""
        return [index for index, children in enumerate(self._children) if not children]

    def children(self, index: int) -> list[int]:
        """Turns that continue this one, in order of creation."""
        return list(self._children[index])

    def path(self, index: int) -> list[int]:
        """Turn indices from the root to this turn."""
        steps: list[int] = []
        at: int | None = index
        while at is not None:
            steps.append(at)
            at = self.turns[at].parent
        steps.reverse()
        return steps


def _plain_calls(message: Message) -> bool:
    """Whether equal means the same: to Python, arguments of 1 and of true are equal, and texts never are to others."""
    return all(
        isinstance(call.arguments, str) or all(type(value) is str for value in call.arguments.values())
        for call in message.tool_calls
    )


def checked_spans(versions: Sequence[VersionSpan], count: int) -> tuple[VersionSpan, ...]:
    """Raises `EngineProtocolError` where they do not cover `count` tokens without gaps."""
    starts = [span.start for span in versions]
    ends = [span.end for span in versions]
    if [*starts, count] != [0, *ends] or any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise EngineProtocolError(
            f"weight versions do not cover the {count} sampled tokens without gaps", versions=repr(list(versions))
        )
    return tuple(versions)


def _common_prefix(a: array[int], b: array[int]) -> int:
    """Length of the longest common prefix, by halving: slices compare in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
