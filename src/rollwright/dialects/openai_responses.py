"""The OpenAI Responses wire, as Codex and the OpenAI SDKs speak it: requests, and the dialect itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollwright.dialects import Opening, Problem, Reply, Request, WireTool, settle_system
from rollwright.dialects.fields import (
    as_list,
    as_mapping,
    as_text,
    json_arguments,
    malformed,
    omitted,
    optional_text,
    recorded,
)
from rollwright.dialects.jsonio import dumps
from rollwright.dialects.openai_errors import openai_error
from rollwright.dialects.responses_items import (
    INPUT,
    failed_event,
    item_ids,
    reply_body,
    reply_events,
    response_event,
)
from rollwright.messages import Message, ToolCall, ToolSpec

__all__ = ["OpenAIResponses"]

_SETTINGS = (
    "include",
    "max_output_tokens",
    "max_tokens",
    "max_tool_calls",
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "service_tier",
    "store",
    "stream",
    "temperature",
    "text",
    "tool_choice",
    "top_p",
    "truncation",
)

_FREEFORM: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input, as free text."}},
    "required": [INPUT],
    "additionalProperties": False,
}
"""Schema of a tool that takes text instead of JSON: the policy calls it with one argument."""


class OpenAIResponses:
    """Responses API. Nothing is stored for the client: each request carries the whole conversation."""

    name = "openai_responses"
    reply_prefix = "resp_"
    call_prefix = "call_"
    opens_counted = False

    def parse(self, body: Mapping[str, Any]) -> Request:
        if body.get("previous_response_id") is not None:
            raise malformed("previous_response_id", "is not kept here: send the whole conversation as input")
        tools: list[ToolSpec] = []
        wires: dict[str, WireTool] = {}
        for spec, wire in _tools(body.get("tools"), "tools", ""):
            tools.append(spec)
            wires[spec.name] = wire
        messages = [Message(role="system", content=optional_text(body.get("instructions"), "instructions"))]
        messages += _conversation(body.get("input"))
        return Request(
            model=optional_text(body.get("model"), "model"),
            messages=settle_system(messages),
            tools=tuple(tools),
            wire_tools=wires,
            stream=bool(body.get("stream")),
            recorded=recorded(body, _SETTINGS),
        )

    def settle(self, message: Message, opening: Opening, request: Request) -> Message:
        calls = tuple(_settled(call, request.wire_tools) for call in message.tool_calls)
        settled = replace(message, tool_calls=calls)
        return replace(settled, carriers=(*message.carriers, *item_ids(settled, opening.id)))

    def reply(self, reply: Reply, request: Request) -> dict[str, Any]:
        return reply_body(reply, request.wire_tools)

    def opening(self, opening: Opening) -> bytes:
        return response_event("response.created", opening, 0) + response_event("response.in_progress", opening, 1)

    def keepalive(self, opening: Opening) -> bytes:
        return response_event("response.in_progress", opening, 1)

    def content(self, reply: Reply, request: Request) -> bytes:
        return b"".join(reply_events(reply, request.wire_tools)[:-1])

    def terminal(self, reply: Reply, request: Request) -> bytes:
        return reply_events(reply, request.wire_tools)[-1]

    def error(self, problem: Problem) -> tuple[int, dict[str, Any]]:
        return openai_error(problem)

    def failure(self, problem: Problem, opening: Opening) -> bytes:
        error = openai_error(problem)[1]["error"]
        # A failure with a code that Codex does not know is a passing one to it, and it asks again.
        code = error["code"] if problem.kind == "too_long" else "invalid_prompt"
        return failed_event(opening, code, error["message"])


# --------------------------------------------------------------------------- tools


def _flat(namespace: str, name: str) -> str:
    """One name for a tool in a namespace: the policy knows no namespaces."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _tools(value: object, field: str, namespace: str) -> Iterator[tuple[ToolSpec, WireTool]]:
    """The tools the policy can call. Those of the vendor's servers are left out."""
    for index, item in enumerate([] if value is None else as_list(value, field)):
        at = f"{field}.{index}"
        tool = as_mapping(item, at)
        kind = tool.get("type")
        if kind == "namespace" and not namespace:
            yield from _tools(tool.get("tools"), f"{at}.tools", as_text(tool.get("name"), f"{at}.name"))
        if kind not in ("function", "custom"):
            continue
        name = as_text(tool.get("name"), f"{at}.name")
        description = optional_text(tool.get("description"), f"{at}.description")
        parameters = tool.get("parameters")
        if kind == "custom":
            parameters = _FREEFORM
            grammar = tool.get("format")
            definition = as_mapping(grammar, f"{at}.format").get("definition") if grammar is not None else None
            if isinstance(definition, str):
                description = f"{description}\n\nGrammar of the input:\n{definition}".strip()
        yield (
            ToolSpec(
                name=_flat(namespace, name),
                description=description,
                parameters=as_mapping({} if parameters is None else parameters, f"{at}.parameters"),
            ),
            WireTool(name=name, namespace=namespace, freeform=kind == "custom"),
        )


def _settled(call: ToolCall, tools: Mapping[str, WireTool]) -> ToolCall:
    """A call of a freeform tool carries text on this wire, whatever arguments the policy gave."""
    tool = tools.get(call.name)
    if tool is None or not tool.freeform:
        return call
    arguments = call.arguments
    if not isinstance(arguments, str):
        text = arguments.get(INPUT)
        if len(arguments) == 1 and isinstance(text, str):
            return call
        arguments = dumps(arguments).decode()
    return replace(call, arguments={INPUT: arguments})


# --------------------------------------------------------------------------- input


def _conversation(value: object) -> Iterator[Message]:
    """Input items as messages. The items of one answer (reasoning, text, calls) become one message again."""
    if isinstance(value, str):
        yield Message(role="user", content=value)
        return
    names: dict[str, str] = {}
    answer = _Answer()
    for index, item in enumerate(as_list(value, "input", filled=True)):
        at = f"input.{index}"
        fields = as_mapping(item, at)
        if answer.takes(fields, at, names):
            continue
        if answer.begun:
            yield answer.message()
            answer = _Answer()
            if answer.takes(fields, at, names):
                continue
        yield _other(fields, at, names)
    if answer.begun:
        yield answer.message()


def _other(item: Mapping[str, Any], field: str, names: Mapping[str, str]) -> Message:
    """What somebody else than the policy said."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role in ("developer", "system"):
                return Message(role="system", content=_text(item.get("content"), f"{field}.content", joint="\n"))
            if role == "user":
                return Message(role="user", content=_text(item.get("content"), f"{field}.content", joint="\n"))
            raise malformed(f"{field}.role", "must be system, developer, user or assistant")
        case "function_call_output" | "custom_tool_call_output":
            call_id = as_text(item.get("call_id"), f"{field}.call_id")
            text = _text(item.get("output"), f"{field}.output", joint="\n")
            return Message(role="tool", content=text, tool_call_id=call_id, tool_name=names.get(call_id, ""))
        case "item_reference":
            raise malformed(f"{field}.type", "item_reference points to nothing: send the item itself")
        case other:
            return Message(role="user", content=omitted(other))


class _Answer:
    """One answer in the making. Its items come in the order in which we send them."""

    def __init__(self) -> None:
        self.begun = False
        self._text: str | None = None
        self._reasoning: str | None = None
        self._calls: list[ToolCall] = []
        self._carriers: list[str] = []

    def takes(self, item: Mapping[str, Any], field: str, names: dict[str, str]) -> bool:
        """Add the item if it belongs to this answer. `names` maps call ids to tool names and grows with each call."""
        match item.get("type", "message"):
            case "reasoning":
                if self.begun:
                    return False
                self._reasoning = _reasoning(item, field)
                self._carry(optional_text(item.get("encrypted_content"), f"{field}.encrypted_content"))
            case "message":
                if item.get("role") != "assistant" or self._text is not None or self._calls:
                    return False
                self._text = _text(item.get("content"), f"{field}.content", joint="")
            case "function_call" | "custom_tool_call":
                call = _call(item, field)
                names[call.id] = call.name
                self._calls.append(call)
                self._carry(call.id)
            case _:
                return False
        self.begun = True
        self._carry(optional_text(item.get("id"), f"{field}.id"))
        return True

    def _carry(self, name: str) -> None:
        if name and name not in self._carriers:
            self._carriers.append(name)

    def message(self) -> Message:
        return Message(
            role="assistant",
            content=self._text or "",
            reasoning=self._reasoning or None,
            tool_calls=tuple(self._calls),
            carriers=tuple(self._carriers),
        )


def _call(item: Mapping[str, Any], field: str) -> ToolCall:
    name = _flat(optional_text(item.get("namespace"), f"{field}.namespace"), as_text(item.get("name"), f"{field}.name"))
    if item["type"] == "custom_tool_call":
        arguments: dict[str, Any] | str = {INPUT: as_text(item.get("input"), f"{field}.input")}
    else:
        arguments = json_arguments(item.get("arguments"), f"{field}.arguments")
    return ToolCall(name=name, arguments=arguments, id=as_text(item.get("call_id"), f"{field}.call_id"))


def _reasoning(item: Mapping[str, Any], field: str) -> str:
    texts: list[str] = []
    for name in ("summary", "content"):
        parts: Sequence[Any] = as_list(item[name], f"{field}.{name}") if item.get(name) is not None else ()
        for index, part in enumerate(parts):
            at = f"{field}.{name}.{index}"
            texts.append(optional_text(as_mapping(part, at).get("text"), f"{at}.text"))
    return "".join(texts)


def _text(value: object, field: str, *, joint: str) -> str:
    """A content field: a string, null, or a list of parts. What is not text leaves a note."""
    if value is None or isinstance(value, str):
        return value or ""
    texts: list[str] = []
    for index, item in enumerate(as_list(value, field)):
        at = f"{field}.{index}"
        part = as_mapping(item, at)
        match part.get("type", "input_text"):
            case "input_text" | "output_text" | "text":
                texts.append(as_text(part.get("text"), f"{at}.text"))
            case "refusal":
                texts.append(as_text(part.get("refusal"), f"{at}.refusal"))
            case str() as other:
                texts.append(omitted(other.removeprefix("input_")))
            case other:
                texts.append(omitted(other))
    return joint.join(text for text in texts if text)
