"""Connect RPC framing."""

from __future__ import annotations

import contextlib
import struct

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.e2b_server.connect import RpcError, encode_end, encode_event, read_frame, read_message

JSON = st.dictionaries(st.text(max_size=8), st.text(max_size=20) | st.integers(0, 1 << 40), max_size=5)


def opened(frame: bytes) -> tuple[int, object]:
    flags, length = struct.unpack(">BI", frame[:5])
    assert len(frame) == 5 + length
    return flags, orjson.loads(frame[5:])


@given(message=JSON)
def test_an_event_is_one_frame_that_is_not_the_last(message: dict[str, object]) -> None:
    assert opened(encode_event(message)) == (0, {"event": message})


def test_the_last_frame_carries_the_error_or_nothing() -> None:
    assert opened(encode_end()) == (2, {})
    error = RpcError("unavailable", "gone")
    assert opened(encode_end(error)) == (2, {"error": {"code": "unavailable", "message": "gone"}})


@given(message=JSON)
def test_a_request_frame_is_read_back(message: dict[str, object]) -> None:
    body = orjson.dumps(message)
    assert read_frame(struct.pack(">BI", 0, len(body)) + body) == message


@given(body=st.binary(max_size=40))
def test_no_bytes_at_all_crash_the_reader(body: bytes) -> None:
    for read in (read_frame, read_message):
        with contextlib.suppress(RpcError):
            assert isinstance(read(body), dict)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0\0\0",
        b"\1" + struct.pack(">I", 2) + b"{}",
        b"\0" + struct.pack(">I", 3) + b"{}",
        b"\0" + struct.pack(">I", 2) + b"{}{}",
        b"\0" + struct.pack(">I", 2) + b"[]",
    ],
)
def test_a_request_that_is_not_one_plain_frame_is_refused(body: bytes) -> None:
    with pytest.raises(RpcError):
        read_frame(body)
