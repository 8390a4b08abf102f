"""Renderer over a tokenizer folder's own chat template, with a bridge for any template (suffix difference)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError, UsageError
from rollwright.messages import Message, ParsedTurn, ToolCall, ToolSpec
from rollwright.tokens.parse import TOOL_PARSERS, ReasoningParser, ToolParser, parse_turn, thinking_is_open
from rollwright.tokens.template import ChatTemplate, ToolShelf, as_call, as_messages, as_tool, template_source
from rollwright.tokens.tokenizer import SpecialText, TextTokenizer

__all__ = ["TemplateRenderer"]

_MARK = "rollwright-mark-5f0c"
"""Stands for the assistant's answer in a stand-in history: what follows it is what follows any answer."""

_PROBE = ToolSpec(
    name="probe",
    parameters={"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}},
)


class TemplateRenderer:
    """`Renderer` for every model that ships a chat template.

    The bridge renders a two-message stand-in history twice, alone and with the tail, and takes the difference of what
    follows the stand-in's answer. The real history never matters, so the cost is that of the tail.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
        variables: Mapping[str, Any] | None = None,
        special_text: SpecialText = "plain",
    ) -> None:
        """Parsers left None are found by what the template writes. `variables`: the template's own switches, such as
        `enable_thinking`.

        Raises `ConfigError`.
        """
        self.name = "template"
        self._tokenizer = TextTokenizer(folder, special_text=special_text)
        source = template_source(folder)
        if source is None:
            raise ConfigError(f"{folder} has no chat template", path=str(folder))
        self.fingerprint = self._tokenizer.fingerprint
        self._shelf = ToolShelf(self._tokenizer.mark)
        self._template = ChatTemplate(source, {**self._tokenizer.special, **(variables or {})})
        self.vocab_size = self._tokenizer.vocab_size
        self._tool_parser: ToolParser | None = tool_parser or self._own_tool_parser()
        self._reasoning_parser: ReasoningParser | None = reasoning_parser or _own_reasoning_parser(source)
        begun, answered = self._first_renders()
        self._thinking_open = self._reasoning_parser is not None and begun.rstrip().endswith("<think>")
        self._closing: str | None = answered.partition(_MARK)[2] if _MARK in answered else None
        """Text a template puts after an answer: the end-of-turn token and a separator."""
        self._end_of_turn = self._first_added(self._closing or "")
        ends = self._tokenizer.end_ids()
        if self._end_of_turn is not None:
            ends.add(self._end_of_turn)
        if not ends:
            raise ConfigError(
                f"{folder}: neither the template nor the configuration says what ends a turn", path=str(folder)
            )
        self.stop_ids = frozenset(ends)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        if tools and self._tool_parser is None:
            raise UsageError("tools are offered, but no tool parser fits this template: name one (tool_parser)")
        said = self._tokenizer.mark(as_messages(messages))
        text = self._template.render(said, self._shelf.take(tools), generation=True)
        return self._tokenizer.encode_marked(text, begins=True)

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        history: Sequence[Message],
        tail: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        follow = self._after_answer(history, tail, self._shelf.take(tools))
        if follow is None:
            return None
        new = self._tokenizer.encode_marked(follow)
        last = sampled[-1] if sampled else None
        if last in self.stop_ids:
            if self._end_of_turn is not None:
                return new[new.index(self._end_of_turn) + 1 :]
            # The next message's opener is the end of the turn, and the policy has said it already.
            return new[1:] if new and new[0] == last else None
        if self._reasoning_parser is not None and thinking_is_open(
            self._tokenizer.decode(sampled), thinking_open=self._thinking_open
        ):
            return [*self._tokenizer.encode("\n</think>\n\n"), *new]
        return new

    def serves(self) -> bool:
        """Whether an agent can be served with it: its calls are read, and what a harness says (tool results, then words
        of its own) can follow an answer without rendering everything anew."""
        result, word = Message(role="tool", content="x", tool_call_id="call12345"), Message(role="user", content="x")
        tails = ([word], [result], [result, word])
        return self._tool_parser is not None and all(
            self._after_answer([], tail, [as_tool(_PROBE)]) is not None for tail in tails
        )

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        text = self._tokenizer.decode([index for index in ids if index not in self.stop_ids])
        return parse_turn(
            text,
            tools,
            tool_parser=self._tool_parser,
            reasoning_parser=self._reasoning_parser,
            thinking_open=self._thinking_open,
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _after_answer(
        self, history: Sequence[Message], tail: Sequence[Message], tools: list[dict[str, Any]]
    ) -> str | None:
        """What the template says between an answer and the assistant's next one: closing, tail, opening."""
        if self._closing is None:
            return None
        said: list[dict[str, Any]] = self._tokenizer.mark(as_messages(tail, history))
        stand_in = [{"role": "user", "content": "x"}, _answer_before(said)]
        try:
            alone = self._template.render(stand_in, tools, generation=False)
            whole = self._template.render([*stand_in, *said], tools, generation=True)
        except UsageError:
            return None
        if alone.count(_MARK) != 1:
            return None
        # Only what follows the mark is compared: templates drop the thoughts of answers that are no longer last.
        after = alone.partition(_MARK)[2]
        after_whole = whole.partition(_MARK)[2]
        if not after_whole.startswith(after) or not after.endswith(self._closing):
            return None
        return self._closing + after_whole[len(after) :]

    def _first_renders(self) -> tuple[str, str]:
        """A question with the answer begun, and one with an answer."""
        said: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
        answered = [*said, {"role": "assistant", "content": _MARK}]
        refusal: UsageError | None = None
        # Some templates are for conversations with tools only.
        for tools in ([], [as_tool(_PROBE)]):
            try:
                return (
                    self._template.render(said, tools, generation=True),
                    self._template.render(answered, tools, generation=False),
                )
            except UsageError as error:
                refusal = refusal or error
        raise ConfigError(f"{self._tokenizer.folder}: {refusal}", path=str(self._tokenizer.folder)) from refusal

    def _own_tool_parser(self) -> ToolParser | None:
        """The parser that reads back a call as this template writes it."""
        made = ToolCall(name=_PROBE.name, arguments={"text": "a b", "count": 3})
        answer = Message(role="assistant", tool_calls=(replace(made, id="call12345"),))
        messages = as_messages([Message(role="user", content="x"), answer])
        try:
            text = self._template.render(messages, [as_tool(_PROBE)], generation=False)
        except UsageError:
            return None
        call = text[max(0, text.rfind("<tool_call>")) :]
        for parser in TOOL_PARSERS:
            turn = parse_turn(call, [_PROBE], tool_parser=parser, reasoning_parser=None)
            if turn.tool_calls == (made,) and turn.ill_formed is None:
                return parser
        return None

    def _first_added(self, text: str) -> int | None:
        """The first token in `text` that the tokenizer takes whole."""
        found = [(text.find(token), index) for token, index in self._tokenizer.added.items() if token in text]
        return min(found)[1] if found else None


def _answer_before(said: list[dict[str, Any]]) -> dict[str, Any]:
    """A stand-in for the answer that `said` follows: it makes the calls that the first messages there answer."""
    results: list[dict[str, Any]] = []
    for message in said:
        if message["role"] != "tool":
            break
        results.append(message)
    if not results:
        return {"role": "assistant", "content": _MARK}
    calls: list[dict[str, Any]] = []
    for position, result in enumerate(results):
        # The mark is in the last call, so that only the end of the answer follows it.
        value = _MARK if position == len(results) - 1 else "x"
        calls.append(
            as_call(result.get("name", "tool"), {"value": value}, result.get("tool_call_id", f"call_{position}"))
        )
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _own_reasoning_parser(source: str) -> ReasoningParser | None:
    return "qwen3" if "</think>" in source else None
