from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.tokens.canonical import chain, digest, echoed_ids, same_reasoning, tools_digest
from support.conversation import BASH, TOOLS, assistant, tool, user

ARGUMENTS = {"command": "ls", "timeout": 3, "deep": {"b": [1, 2.5, None, True], "a": "x"}}
CALL = assistant("I look.", ("bash", ARGUMENTS, "call_1"))

SAME = {
    "surrounding whitespace": assistant("\n I look.\t\n", ("bash", ARGUMENTS, "call_1")),
    "another id": assistant("I look.", ("bash", ARGUMENTS, "call_1__qwen_dup_2")),
    "carriers": replace(CALL, carriers=("sig",)),
    "key order": assistant(
        "I look.", ("bash", {"deep": {"a": "x", "b": [1, 2.5, None, True]}, "timeout": 3, "command": "ls"}, "")
    ),
    "arguments as compact text": assistant(
        "I look.", ("bash", '{"command":"ls","timeout":3,"deep":{"b":[1,2.5,null,true],"a":"x"}}', "")
    ),
    "arguments as spaced text": assistant(
        "I look.",
        ("bash", ' {"deep": {"a": "\\u0078", "b": [1, 2.5, null, true]}, "timeout": 3, "command": "ls"}\n', ""),
    ),
    "numbers as JavaScript writes them": assistant("I look.", ("bash", ARGUMENTS | {"timeout": 3.0}, "")),
    "trimmed strings": assistant("I look.", ("bash", ARGUMENTS | {"command": "ls\n"}, "")),
    "reasoning": replace(CALL, reasoning="Hm."),
}
DIFFERENT = {
    "text": assistant("I looked.", ("bash", ARGUMENTS, "")),
    "tool": assistant("I look.", ("sh", ARGUMENTS, "")),
    "argument": assistant("I look.", ("bash", ARGUMENTS | {"timeout": 4}, "")),
    "argument type": assistant("I look.", ("bash", ARGUMENTS | {"timeout": "3"}, "")),
    "boolean for a number": assistant("I look.", ("bash", ARGUMENTS | {"timeout": True}, "")),
    "missing argument": assistant("I look.", ("bash", {"command": "ls"}, "")),
    "missing call": assistant("I look."),
    "call twice": assistant("I look.", ("bash", ARGUMENTS, ""), ("bash", ARGUMENTS, "")),
    "role": Message(role="user", content="I look."),
}


@pytest.mark.parametrize("name", SAME)
def test_what_a_client_may_change_makes_no_difference(name: str) -> None:
    assert digest(SAME[name]) == digest(CALL)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_change_of_meaning_makes_one(name: str) -> None:
    assert digest(DIFFERENT[name]) != digest(CALL)


def test_numbers_beyond_a_double_come_back_rounded_and_are_the_same() -> None:
    exact = assistant("", ("f", {"n": 2**60 + 1}, ""))
    rounded = assistant("", ("f", {"n": float(2**60)}, ""))
    assert digest(exact) == digest(rounded)
    assert digest(assistant("", ("f", {"n": 10**400}, ""))) != digest(assistant("", ("f", {"n": 10**401}, "")))


def test_arguments_that_are_no_object_are_compared_as_text() -> None:
    assert digest(assistant("", ("f", "ls -la", ""))) == digest(assistant("", ("f", " ls -la ", "")))
    assert digest(assistant("", ("f", "[1]", ""))) != digest(assistant("", ("f", "[1 ]", "")))


def test_two_texts_cannot_imitate_one() -> None:
    assert digest(user("a")) != digest(user("a 1 b"))
    assert digest(assistant("x", ("f", "g", ""))) != digest(assistant("x 1 f 1 g"))
    assert chain(chain("", digest(user("a"))), digest(user("b"))) != chain(
        chain("", digest(user("b"))), digest(user("a"))
    )


def test_reasoning_is_the_same_when_dropped_or_trimmed() -> None:
    assert same_reasoning(None, "Hm.")
    assert same_reasoning("", "Hm.")
    assert same_reasoning(" Hm.\n", "Hm.")
    assert same_reasoning(None, None)
    assert not same_reasoning("Hm?", "Hm.")
    assert not same_reasoning("Hm.", None)


def test_tools_differ_by_any_word_of_theirs() -> None:
    digests = {
        tools_digest(tools)
        for tools in (
            (),
            TOOLS,
            (BASH, BASH),
            (replace(BASH, description="Run."),),
            (replace(BASH, parameters={}),),
            (replace(BASH, name="sh"),),
        )
    }
    assert len(digests) == 6
    assert tools_digest((replace(BASH, parameters=dict(reversed(BASH.parameters.items()))),)) == tools_digest(TOOLS)


def test_the_ids_a_client_echoes_are_the_carriers_and_the_calls() -> None:
    assert echoed_ids(replace(CALL, carriers=("sig",))) == {"sig", "call_1"}
    assert echoed_ids(tool()) == frozenset()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(text=st.text(), arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=4) | st.text())
def test_any_message_has_a_digest(text: str, arguments: dict[str, object] | str) -> None:
    message = Message(role="assistant", content=text, tool_calls=(ToolCall(name=text[:3], arguments=arguments),))
    assert len(digest(message)) == 32
    assert digest(message) == digest(replace(message, content=f"\n{text.strip()} "))
    assert tools_digest([ToolSpec(name="f", parameters={"default": arguments})])
