"""Renderer over a tokenizer folder's own chat template, with a bridge for any template (suffix difference)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError, UsageError
from rollwright.messages import Message, ParsedTurn, ToolSpec
from rollwright.tokens.parse import ReasoningParser, ToolParser, parse_turn, thinking_is_open
from rollwright.tokens.template import ChatTemplate, as_call, as_messages, as_tool, template_source
from rollwright.tokens.tokenizer import TextTokenizer, fingerprint

__all__ = ["TemplateRenderer"]

_MARK = "rollwright-mark-5f0c"
"""Stands for the assistant's answer in a stand-in history: what follows it is what follows any answer."""


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
    ) -> None:
        """Parsers left None are told by the template. `variables`: the template's own switches (`enable_thinking`).

        Raises `ConfigError`.
        """
        self.name = "template"
        self._tokenizer = TextTokenizer(folder)
        source = template_source(folder)
        if source is None:
            raise ConfigError(f"{folder} has no chat template", path=str(folder))
        self.fingerprint = fingerprint(folder)
        self._template = ChatTemplate(source, {**self._tokenizer.special, **(variables or {})})
        self._tool_parser: ToolParser | None = tool_parser or _tool_parser_of(source)
        self._reasoning_parser: ReasoningParser | None = reasoning_parser or _reasoning_parser_of(source)
        self.vocab_size = self._tokenizer.vocab_size

        said = {"role": "user", "content": "x"}
        try:
            before = self._template.render([said], [], generation=False)
            begun = self._template.render([said], [], generation=True)
            answered = self._template.render([said, {"role": "assistant", "content": _MARK}], [], generation=False)
        except UsageError as error:
            raise ConfigError(f"{folder}: {error}", path=str(folder)) from error
        self._thinking_open = self._reasoning_parser is not None and begun.removeprefix(before).rstrip().endswith(
            "<think>"
        )
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
        text = self._template.render(as_messages(messages), [as_tool(tool) for tool in tools], generation=True)
        return self._tokenizer.encode(text)

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        history: Sequence[Message],
        tail: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        follow = self._after_answer(history, tail, [as_tool(tool) for tool in tools])
        if follow is None:
            return None
        new = self._tokenizer.encode(follow)
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

    def bridges(self) -> bool:
        """Whether what a harness says (tool results, then words of its own) can follow any answer."""
        result, word = Message(role="tool", content="x", tool_call_id="call_0"), Message(role="user", content="x")
        tails = ([word], [result], [result, result], [result, word])
        return all(self._after_answer([], tail, []) is not None for tail in tails)

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
        said = as_messages(tail, history)
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


def _tool_parser_of(source: str) -> ToolParser | None:
    if "<function=" in source:
        return "qwen3_coder"
    return "hermes" if "<tool_call>" in source else None


def _reasoning_parser_of(source: str) -> ReasoningParser | None:
    return "qwen3" if "</think>" in source else None
