"""A model's chat template (Jinja), run as its authors run it, without their library.

The environment is that of `transformers.apply_chat_template`; a test compares the two. Importing this costs
milliseconds where that one costs seconds.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import orjson
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollwright.errors import ConfigError, UsageError
from rollwright.messages import Message, ToolSpec
from rollwright.tokens.tokenizer import read_json

__all__ = ["ChatTemplate", "ToolShelf", "as_call", "as_messages", "as_tool", "template_source"]

_SHELVED = 16
"""Tool sets kept: a CLI and its sub-agents have a handful."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads this name

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    plain = not (ensure_ascii or indent or separators or sort_keys)
    if plain and type(value) is _Tool and value.json is not None:
        return value.json
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if plain and type(value) is _Tool:
        value.json = text
    return text


class _Tool(dict[str, Any]):
    """A tool in a template's hands. Its JSON is kept: templates write all tools again for each turn."""

    json: str | None = None


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """`variables`: special tokens and switches such as `enable_thinking`. Raises `ConfigError`."""
        # One instant for the template's life: the same conversation renders the same all day.
        started = datetime.now()

        def strftime_now(pattern: str) -> str:
            return started.strftime(pattern)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        # Jinja's stubs leave these two dictionaries untyped.
        environment.filters.update(tojson=_to_json)  # pyright: ignore[reportUnknownMemberType]
        environment.globals.update(  # pyright: ignore[reportUnknownMemberType]
            raise_exception=_raise_exception, strftime_now=strftime_now
        )
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._variables = dict(variables)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation: bool
    ) -> str:
        """The text of a conversation (`as_message`, `as_tool`). `generation`: the assistant's turn is begun.

        Raises `UsageError` when the template refuses.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation,
                **self._variables,
            )
        # The template is the model's code and may raise anything.
        except Exception as error:
            raise UsageError(f"the chat template refuses this conversation: {error}") from error


def template_source(folder: Path) -> str | None:
    """The template of a tokenizer folder: `chat_template.jinja`, else the one in `tokenizer_config.json`, else None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found: Any = read_json(folder / "tokenizer_config.json").get("chat_template")
    found = found or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in cast("list[Any]", found)
            if isinstance(entry, dict)
            for entry in [cast("dict[str, Any]", entry)]
        }
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


def as_messages(messages: Sequence[Message], before: Sequence[Message] = ()) -> list[dict[str, Any]]:
    """Messages in the form chat templates read (OpenAI's, with arguments as an object).

    A tool's answer gets the name of the call it answers, as some templates need it; `before` is where that call may
    have been made.
    """
    names = {call.id: call.name for message in before[-1:] for call in message.tool_calls if call.id}
    forms: list[dict[str, Any]] = []
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls if call.id)
        form: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            form["reasoning_content"] = form["thinking"] = message.reasoning
        if message.tool_calls:
            form["tool_calls"] = [
                as_call(call.name, _as_object(call.arguments), call.id) for call in message.tool_calls
            ]
        if message.tool_call_id:
            form["tool_call_id"] = message.tool_call_id
        name = message.tool_name or names.get(message.tool_call_id, "")
        if message.role == "tool" and name:
            form["name"] = name
        forms.append(form)
    return forms


def as_call(name: str, arguments: Mapping[str, Any], id: str) -> dict[str, Any]:
    """A call in the form chat templates read."""
    return {"type": "function", "id": id, "function": {"name": name, "arguments": dict(arguments)}}


def as_tool(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the form chat templates read."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


class ToolShelf:
    """The tool sets of late, in the form chat templates read. Thread-safe."""

    def __init__(self, mark: Callable[[Any], Any]) -> None:
        """`mark`: what is done to each tool, see `TextTokenizer`."""
        self._mark = mark
        self._sets: deque[tuple[tuple[ToolSpec, ...], list[dict[str, Any]]]] = deque(maxlen=_SHELVED)

    def take(self, tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        """The very same objects for equal tools."""
        wanted = tuple(tools)
        for known, made in tuple(self._sets):
            if known == wanted:
                return made
        made: list[dict[str, Any]] = [_Tool(self._mark(as_tool(tool))) for tool in wanted]
        self._sets.append((wanted, made))
        return made


def _as_object(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """Templates walk arguments as a mapping; text that is not one becomes the value of one key."""
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        value: Any = orjson.loads(arguments)
    except ValueError:
        value = None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"arguments": arguments}
