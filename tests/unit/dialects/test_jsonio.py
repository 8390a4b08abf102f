"""JSON that real clients and policies write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.dialects.jsonio import dumps, loads
from rollwright.messages import Message, ToolCall


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_half_an_emoji_is_read_as_a_replacement_character() -> None:
    assert loads(rb'{"out": "cut \ud83d", "k\udc00": ["\ud83d\ude00"]}') == {"out": "cut �", "k�": ["😀"]}


def test_a_huge_number_and_a_lone_surrogate_are_written() -> None:
    call = ToolCall(name="f", arguments={"n": 10**30, "s": "\ud83d"})
    message = Message(role="assistant", tool_calls=(call,))
    written = json.loads(dumps(message))
    assert written["tool_calls"][0]["arguments"] == {"n": 10**30, "s": "\ud83d"}


@pytest.mark.parametrize("depth", [260, 5000, 200_000])
def test_endless_nesting_is_a_value_error(depth: int) -> None:
    with pytest.raises(ValueError):
        dumps(loads(nested(depth)))


@pytest.mark.parametrize("text", [b"", b"{", b"nul", b"\xff\xfe{}", b'{"a": }'])
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        loads(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_is_written_reads_back(value: object) -> None:
    assert json.loads(dumps(value)) == value


def no_constant(name: str) -> object:
    raise AssertionError(f"{name} is not JSON")


@given(
    st.recursive(
        st.floats() | st.integers() | st.text(st.characters()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_every_reader_of_json_takes_what_is_written(value: object) -> None:
    json.loads(dumps(value), parse_constant=no_constant)
