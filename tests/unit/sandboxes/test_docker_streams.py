"""The streams of a command in a container are taken apart exactly, however the connection cuts them up."""

from __future__ import annotations

import itertools
import socket
import struct

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.sandboxes.docker.command import STDERR, STDOUT, Command, Frames, Stream

NONCE = b"0123456789abcdef0123456789abcdef"

pieces = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=40)), max_size=12)
cuts = st.lists(st.integers(0, 400), max_size=20)


def framed(number: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", number, len(data)) + data


def cut_up(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted({min(place, len(data)) for place in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(pieces, cuts)
def test_frames_come_out_as_they_went_in(sent: list[tuple[int, bytes]], places: list[int]) -> None:
    frames = Frames()
    streams = {STDOUT: b"", STDERR: b""}
    for part in cut_up(b"".join(framed(number, data) for number, data in sent), places):
        for number, data in frames.feed(part):
            streams[number] += data
    for number, whole in streams.items():
        assert whole == b"".join(data for n, data in sent if n == number)


@given(st.binary(max_size=100), st.integers(0, 255), st.binary(max_size=30), cuts)
def test_a_stream_ends_where_the_nonce_says(before: bytes, code: int, after: bytes, places: list[int]) -> None:
    stream = Stream(NONCE, most=1000)
    for part in cut_up(before + NONCE + b" %d\n" % code + after, places):
        stream.feed(part)
    assert stream.exit_code == code
    assert stream.data() == before


@given(st.binary(max_size=100))
def test_without_the_nonce_nothing_has_ended(data: bytes) -> None:
    stream = Stream(NONCE, most=1000)
    stream.feed(data)
    stream.feed(NONCE[:-1])
    assert stream.exit_code is None


def test_too_much_is_noticed() -> None:
    stream = Stream(NONCE, most=10)
    stream.feed(b"0123456789")
    assert not stream.too_long
    stream.feed(b"0")
    assert stream.too_long


@pytest.mark.anyio
async def test_a_command_is_told_once_and_hears_both_ends() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(10)
    command = Command("exec", ours, most=1000)
    assert not command.given_up

    def guest() -> None:
        said = b""
        while part := theirs.recv(1000):
            said += part
        nonce, rest = said.split(b"\n", 1)
        assert rest == b"input"
        theirs.sendall(framed(STDOUT, b"77\nout") + framed(STDOUT, nonce + b" 3\n") + framed(STDERR, nonce + b" 3\n"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, guest)
        ended = await command.run(b"input")
    assert ended is not None
    assert (ended.exit_code, ended.stdout, ended.stderr, command.pid) == (3, b"out", b"", 77)
    assert not command.given_up
    command.close()
    theirs.close()


@pytest.mark.anyio
async def test_a_connection_that_ends_before_the_command_says_so() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.sendall(framed(STDOUT, b"77\nhalf")[:-1])
    theirs.shutdown(socket.SHUT_WR)
    command = Command("exec", ours, most=1000)
    assert await command.run(b"") is None
    assert command.pid == 77
    assert not command.given_up, "there is nothing to wait for"
    command.close()
    theirs.close()


@pytest.mark.anyio
async def test_a_command_that_is_not_waited_for_to_its_end_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    command = Command("exec", ours, most=1000)
    theirs.sendall(framed(STDOUT, b"77\n"))
    with anyio.move_on_after(0.05):
        await command.run(b"")
    assert command.given_up
    assert await command.hear_pid() == 77
    command.close()
    theirs.close()
