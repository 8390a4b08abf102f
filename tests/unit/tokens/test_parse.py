from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.messages import ParsedTurn, ToolCall, ToolSpec
from rollwright.tokens import Renderer
from rollwright.tokens.parse import ToolParser, parse_turn
from rollwright.tokens.render_template import TemplateRenderer
from support.conversation import TOOLS, call_text

TYPES = ToolSpec(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "object": {"type": "object"},
            "maybe": {"type": ["integer", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "number_or_list": {"anyOf": [{"type": "integer"}, {"type": "array"}]},
        },
    },
)


def coder(text: str, *tools: ToolSpec, thinking_open: bool = False, reasoning: bool = False) -> ParsedTurn:
    return parse_turn(
        text,
        tools or (*TOOLS, TYPES),
        tool_parser="qwen3_coder",
        reasoning_parser="qwen3" if reasoning else None,
        thinking_open=thinking_open,
    )


def hermes(text: str) -> ParsedTurn:
    return parse_turn(text, TOOLS, tool_parser="hermes", reasoning_parser="qwen3")


def argument(key: str, value: str) -> Any:
    turn = coder(f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>")
    assert turn.ill_formed is None
    (call,) = turn.tool_calls
    assert not isinstance(call.arguments, str)
    return call.arguments[key]


# ------------------------------------------------------------------ text and reasoning


def test_plain_text_is_content_and_nothing_else() -> None:
    assert coder("  Hello\n") == ParsedTurn(content="  Hello\n")


def test_a_reasoning_block_is_split_off() -> None:
    turn = coder("<think>\nhm\n</think>\n\nHello", reasoning=True)
    assert turn == ParsedTurn(content="Hello", reasoning="hm")


def test_a_block_opened_by_the_prompt_is_split_off_too() -> None:
    turn = coder("hm\n</think>\n\nHello", reasoning=True, thinking_open=True)
    assert turn == ParsedTurn(content="Hello", reasoning="hm")


def test_a_block_opened_twice_is_one_block() -> None:
    turn = coder("<think>\nhm\n</think>\n\nHello", reasoning=True, thinking_open=True)
    assert turn == ParsedTurn(content="Hello", reasoning="hm")


def test_an_unclosed_block_is_all_reasoning_and_ill_formed() -> None:
    turn = coder("hm, and then", reasoning=True, thinking_open=True)
    assert (turn.reasoning, turn.content, turn.tool_calls) == ("hm, and then", "", ())
    assert turn.ill_formed == "<think> is not closed"


def test_a_call_ends_a_block_that_was_left_open() -> None:
    turn = coder("hm\n" + call_text("ls"), reasoning=True, thinking_open=True)
    assert turn.reasoning == "hm"
    assert [call.name for call in turn.tool_calls] == ["bash"]


def test_calls_drafted_inside_a_closed_block_are_thoughts() -> None:
    turn = coder("maybe " + call_text("rm -rf /") + "\n</think>\n\nNo.", reasoning=True, thinking_open=True)
    assert (turn.content, turn.tool_calls) == ("No.", ())


# ------------------------------------------------------------------ qwen3_coder


def test_parallel_calls_are_all_kept_in_order_with_the_text_around_them() -> None:
    turn = coder(f"First.\n\n{call_text('ls')}\nThen:\n{call_text('pwd')}\n{call_text('ls')}\nDone.\n")
    assert [call.arguments for call in turn.tool_calls] == [{"command": c} for c in ("ls", "pwd", "ls")]
    assert turn.content == "First.\nThen:\nDone."
    assert turn.ill_formed is None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "true", "true"),
        ("text", "12", "12"),
        ("text", "", ""),
        ("text", "  indented\n\n    more\n", "  indented\n\n    more\n"),
        ("text", "<parameter=x> and </parameter> in the text", "<parameter=x> and </parameter> in the text"),
        ("count", "12", 12),
        ("count", " 12 ", 12),
        ("count", "1.5", "1.5"),
        ("count", "many", "many"),
        ("count", "true", "true"),
        ("count", "9" * 5000, "9" * 5000),
        ("ratio", "0.5", 0.5),
        ("ratio", "3", 3),
        ("ratio", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("list", '["a", 1]', ["a", 1]),
        ("list", "a, b", "a, b"),
        ("object", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("object", "[" * 10000, "[" * 10000),
        ("maybe", "null", None),
        ("maybe", "3", 3),
        ("either", "3", "3"),
        ("number_or_list", "[3]", [3]),
        ("unknown", "3", "3"),
    ],
)
def test_a_value_has_the_type_its_schema_names(key: str, text: str, value: Any) -> None:
    found = argument(key, text)
    assert found == value
    assert type(found) is type(value)


def test_only_one_newline_on_each_side_of_a_value_is_markup() -> None:
    assert argument("text", "\n  x  \n") == "\n  x  \n"
    turn = coder("<tool_call><function=f><parameter=text>x</parameter></function></tool_call>")
    assert turn.tool_calls == (ToolCall(name="f", arguments={"text": "x"}),)


def test_a_call_without_parameters_is_a_call() -> None:
    assert coder("<tool_call>\n<function=f>\n</function>\n</tool_call>").tool_calls == (
        ToolCall(name="f", arguments={}),
    )


def test_an_unknown_tool_stays_a_call() -> None:
    turn = coder("<tool_call>\n<function=nope>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>")
    assert turn == ParsedTurn(tool_calls=(ToolCall(name="nope", arguments={"n": "1"}),))


BROKEN_CODER = [
    "<tool_call>",
    "<tool_call>\n<function=bash",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>",
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</function>\n</tool_call>",
    "<tool_call>\n<function=bash>\nls\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "bash"}\n</tool_call>',
    "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
]


@pytest.mark.parametrize("text", BROKEN_CODER)
def test_a_broken_call_is_text_and_ill_formed(text: str) -> None:
    turn = coder("Before.\n" + text)
    assert turn.tool_calls == ()
    assert turn.ill_formed
    assert turn.content.startswith("Before.\n")
    assert text in turn.content


def test_a_good_call_after_a_broken_one_is_still_a_call() -> None:
    broken = "<tool_call>\n<function=bash>\n<parameter=command>\nls"
    turn = coder(f"{broken}\n{call_text('pwd')}")
    assert [call.arguments for call in turn.tool_calls] == [{"command": "pwd"}]
    assert turn.ill_formed
    assert turn.content == broken


def test_a_value_that_holds_a_whole_call_runs_nothing_of_the_outer_one() -> None:
    turn = coder(call_text(f"echo '{call_text('x')}'"))
    assert turn.ill_formed
    assert [call.arguments for call in turn.tool_calls] != [{"command": "ls"}]
    assert all("echo" not in str(call.arguments) for call in turn.tool_calls)


# ------------------------------------------------------------------ hermes


def test_hermes_calls_are_json() -> None:
    turn = hermes(
        'Look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"</tool_call>\\"", "n": [1, null]}}'
        "\n</tool_call>"
        '\n<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>'
    )
    assert turn.ill_formed is None
    assert turn.content == "Look."
    assert turn.tool_calls == (
        ToolCall(name="bash", arguments={"command": 'echo "</tool_call>"', "n": [1, None]}),
        ToolCall(name="x", arguments={"a": 1}),
    )


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}',
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>',
        "<tool_call>\n[]\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {"n": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "bash", "arguments": {"s": "\\ud800"}}\n</tool_call>',
        "<tool_call>" + "[" * 20000,
    ],
)
def test_a_broken_hermes_call_is_text_and_ill_formed(text: str) -> None:
    turn = hermes(text)
    assert turn.tool_calls == ()
    assert turn.ill_formed
    assert turn.content == text


# ------------------------------------------------------------------ any output at all

MARKUP = "<tool_call> </tool_call> <function=bash> <function= </function> <parameter=command> </parameter>"
THOUGHT = "<think> </think>"
JSON = '{"name": "bash", "arguments": {|"a": 1|}}|[|\\'
PIECES = st.sampled_from([*MARKUP.split(), *THOUGHT.split(), *JSON.split("|"), "\n", " ", "ls", "é", "\x00"])


@given(
    pieces=st.lists(PIECES | st.text(max_size=5), max_size=25),
    parser=st.sampled_from(["qwen3_coder", "hermes", None]),
    thinking_open=st.booleans(),
)
def test_no_text_makes_the_parser_raise(pieces: list[str], parser: ToolParser | None, thinking_open: bool) -> None:
    turn = parse_turn("".join(pieces), TOOLS, tool_parser=parser, reasoning_parser="qwen3", thinking_open=thinking_open)
    assert all(call.name for call in turn.tool_calls)
    assert all(not isinstance(call.arguments, str) for call in turn.tool_calls)


@given(
    value=st.text(alphabet=st.characters(codec="utf-8"), max_size=60).filter(
        lambda s: not any(tag in s for tag in ("</parameter>", "</function>", "<tool_call>", "</tool_call>"))
    )
)
def test_any_text_value_comes_back_as_it_was(value: str) -> None:
    assert argument("text", value) == value


@settings(max_examples=60)
@given(data=st.data())
def test_no_ids_make_a_renderer_raise_and_stop_tokens_never_show(
    data: st.DataObject, plain: TemplateRenderer, thinking: TemplateRenderer, qwen3: Renderer, qwen35: Renderer
) -> None:
    ids = data.draw(
        st.lists(st.integers(-2, plain.vocab_size + 2) | st.integers(440, plain.vocab_size - 1), max_size=60)
    )
    for renderer in (plain, thinking, qwen3, qwen35):
        turn = renderer.parse(ids, TOOLS)
        shown = turn.content + (turn.reasoning or "") + "".join(str(call) for call in turn.tool_calls)
        for stop in renderer.stop_ids:
            assert renderer.decode([stop]) not in shown


def test_reading_a_long_broken_reply_is_quick(plain: TemplateRenderer) -> None:
    spam = "<tool_call>\n<function=bash>\n<parameter=command>\n" * 8000
    assert coder(spam).ill_formed
    assert coder(spam + "</function>\n</tool_call>").ill_formed
    assert hermes('<tool_call>\n{"name": "bash", "arguments": {"a": "' * 8000).ill_formed
