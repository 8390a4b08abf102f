"""Renderer over the hand-written model families of PyPI `renderers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rollwright.errors import ConfigError, UsageError
from rollwright.messages import Message, ParsedTurn, ToolCall, ToolSpec
from rollwright.tokens.template import ChatTemplate, ToolShelf, as_call, as_messages, as_tool, template_source
from rollwright.tokens.tokenizer import SpecialText, TextTokenizer

__all__ = ["RenderersRenderer"]


class RenderersRenderer:
    """`Renderer` for the families that package knows. Its bridges are written per family, so they also work where a
    template's own text cannot be taken apart."""

    def __init__(self, folder: Path, *, family: str | None = None, special_text: SpecialText = "plain") -> None:
        """`family`: the package's name for it (`qwen3`, `glm-5`, ...); None: the one that renders just as the folder's
        own template does. Raises `ConfigError`."""
        self._tokenizer = TextTokenizer(folder, special_text=special_text)
        self._inner = _inner(folder, self._tokenizer, family)
        self._shelf = ToolShelf(self._tokenizer.mark)
        self.name = f"renderers:{self._inner.config.name}"
        self.fingerprint = self._tokenizer.fingerprint
        self.vocab_size = self._tokenizer.vocab_size
        self.stop_ids = frozenset(cast("list[int]", self._inner.get_stop_token_ids()))
        self._opening = self.render([Message(role="user", content="x")], [])

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        try:
            return _render(self._inner, self._tokenizer.mark(as_messages(messages)), self._shelf.take(tools))
        # The family's code raises whatever it likes on conversations it does not know.
        except Exception as error:
            raise UsageError(f"{self.name} refuses this conversation: {error}") from error

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        history: Sequence[Message],
        tail: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        before = [*prompt, *sampled]
        try:
            bridged: Any = self._inner.bridge_to_next_turn(
                list(prompt),
                list(sampled),
                self._tokenizer.mark(as_messages(tail, history)),
                tools=self._shelf.take(tools) or None,
            )
        except Exception:  # noqa: BLE001 - a family that cannot say this tail refuses it, however it does so
            return None
        ids: list[int] = [] if bridged is None else bridged.token_ids
        return ids[len(before) :] if bridged is not None and ids[: len(before)] == before else None

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        known = [index for index in ids if 0 <= index < self.vocab_size]
        try:
            parsed: Any = self._inner.parse_response(
                known, tools=[as_tool(tool) for tool in tools] or None, prompt_ids=self._opening
            )
        except Exception as error:  # noqa: BLE001 - broken output is a fact about the policy, not about us
            return ParsedTurn(content=self._text(known), ill_formed=f"{self.name} cannot read it: {error}")
        return self._parsed_turn(known, parsed)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([index for index in ids if index not in self.stop_ids])

    def _parsed_turn(self, ids: list[int], parsed: Any) -> ParsedTurn:
        calls: list[ToolCall] = []
        kept: list[str] = [parsed.content] if parsed.content else []
        problem: str | None = None
        for call in parsed.tool_calls:
            arguments: Any = call.arguments
            # A call of a tool that was not offered is the client's to refuse, in its own words.
            if call.status in ("ok", "unknown_tool") and call.name and isinstance(arguments, dict):
                calls.append(ToolCall(name=call.name, arguments=cast("Mapping[str, Any]", arguments)))
                continue
            problem = problem or f"a call that is {call.status}"
            span = cast("tuple[int, int] | None", call.token_span)
            kept.append(self._text(ids[span[0] : span[1]]) if span else call.raw)
        if parsed.reasoning_complete is False:
            problem = "the reasoning is not closed"
        return ParsedTurn(
            content="\n".join(kept),
            reasoning=parsed.reasoning_content,
            tool_calls=tuple(calls),
            ill_formed=problem,
        )


class _Tokenizer:
    """What `renderers` asks of a tokenizer. Without character offsets: their per-token attribution is not used here."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = str(tokenizer.folder)
        self.unk_token_id = self._special("unk_token")
        self.eos_token_id = self._special("eos_token")

    def _special(self, name: str) -> int | None:
        text = self._tokenizer.special.get(name)
        return None if text is None else self._tokenizer.id_of(text)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode_marked(text)

    def decode(self, token_ids: Sequence[int], *args: Any, **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.id_of(tokens)
        return [self._tokenizer.id_of(token) for token in tokens]


def _inner(folder: Path, tokenizer: TextTokenizer, family: str | None) -> Any:
    """The package's renderer. Imported here, because it brings a client library of seconds with it."""
    import renderers  # pyright: ignore[reportMissingTypeStubs]
    from renderers.base import MODEL_RENDERER_MAP  # pyright: ignore[reportMissingTypeStubs]

    package: Any = renderers
    families = sorted(set(MODEL_RENDERER_MAP.values()))
    adapter = _Tokenizer(tokenizer)

    def build(name: str, **switches: Any) -> Any:
        config: Any = package.config_from_name(name)
        # Without this a bridge is refused whenever the tail has a user message, as Claude Code's has.
        return package.create_renderer(adapter, type(config)(thinking_retention="all", **switches))

    if family is not None:
        if family not in families:
            raise ConfigError(f"unknown family {family!r}: one of {', '.join(families)}", field="family")
        try:
            return build(family)
        # A family asserts its special tokens in many ways.
        except Exception as error:
            raise ConfigError(f"{folder} is no tokenizer of family {family}: {error}", path=str(folder)) from error
    source = template_source(folder)
    if source is None:
        raise ConfigError(f"{folder} has no chat template, so name its family", path=str(folder))
    template = ChatTemplate(source, tokenizer.special)
    for name in families:
        for switches in ({}, {"enable_thinking": False}):
            try:
                inner = build(name, **switches)
                if all(_render(inner, *probe) == _by_template(template, tokenizer, *probe) for probe in _probes()):
                    return inner
            except Exception:  # noqa: BLE001 - a family that fails on this tokenizer is not its family
                continue
    raise ConfigError(f"no family of `renderers` renders as the template of {folder} does", path=str(folder))


def _render(inner: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
    return list(inner.render_ids(messages, tools=tools or None, add_generation_prompt=True))


def _by_template(
    template: ChatTemplate, tokenizer: TextTokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[int]:
    return tokenizer.encode(template.render(messages, tools, generation=True))


def _probes() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Conversations that tell families apart."""
    tool = as_tool(
        ToolSpec(
            name="bash",
            description="Run it.",
            parameters={"type": "object", "properties": {"command": {"type": "string"}}},
        )
    )
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is here?"}]
    called = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "List it.",
        "tool_calls": [as_call("bash", {"command": "ls"}, "call_0")],
    }
    answered = {"role": "tool", "content": "a.py", "tool_call_id": "call_0", "name": "bash"}
    said = {"role": "assistant", "content": "One file."}
    more = {"role": "user", "content": "Thanks."}
    return [
        (asked, []),
        (asked, [tool]),
        ([*asked, called, answered], [tool]),
        ([*asked, called, answered, said, more], [tool]),
    ]
