"""One connection for the keys of several shards: real processes, and clients that leave wherever they like."""

from __future__ import annotations

import itertools
import random
import resource
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rollwright.testing.tiny import tiny_tokenizer
from support.shard_soak import soak_shards
from support.sharded import FILES, LONG, SHORT, Leaving, Sharded, Wire, logged, request_of, sharded, until

MODELS = "/v1/models"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Generator[Sharded]:
    with sharded(tmp_path_factory.mktemp("gateway"), tokenizer) as served:
        yield served


def pair(gateway: Sharded) -> tuple[str, str, Path]:
    """Keys of sessions of both shards, and the log of the second one."""
    name = f"t{next(_numbers)}"
    return gateway.open(name, 0)[0], *gateway.open(name, 1)


def moved(gateway: Sharded, first: str, *, narrow: bool = False) -> Wire:
    """A connection that is served by the shard of this key."""
    wire = Wire(gateway.port, narrow=narrow)
    assert wire.ask(MODELS, first).answer()[0] == 200
    return wire


def marks(log: Path, turn: int) -> list[str]:
    """What is known of the delivery of a turn, over time."""
    lines = logged(log, "delivered", "undelivered")
    return [line["kind"] for line in lines if line["index"] == turn]


# --------------------------------------------------------------------------- who got what


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("read", [0, 1, 500])
def test_a_reply_that_a_client_left_is_undelivered_and_is_sent_again(
    gateway: Sharded, read: int, how: Leaving, stream: bool
) -> None:
    first, second, log = pair(gateway)
    wire = moved(gateway, first, narrow=True).chat(second, "LONG", stream=stream)
    wire.read(read)
    until(lambda: logged(log, "turn"))
    wire.leave(how)
    until(lambda: marks(log, 0) == ["undelivered"])

    with moved(gateway, first) as again:
        reply = again.chat(second, "LONG", stream=stream).raw()
    assert LONG.encode() in reply
    until(lambda: len(marks(log, 0)) == 2)
    assert (len(logged(log, "turn")), len(logged(log, "intent"))) == (1, 1)
    assert logged(log, "delivered") == [{"kind": "delivered", "index": 0}]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_a_client_has_read_to_its_end_is_delivered_though_it_leaves_at_once(
    gateway: Sharded, stream: bool
) -> None:
    first, second, log = pair(gateway)
    for turn in range(20):
        wire = moved(gateway, first).chat(second, f"turn {turn}", stream=stream)
        assert SHORT.encode() in wire.raw()
        wire.leave("close")
        until(lambda turn=turn: marks(log, turn) == ["delivered"])


def sizes(gateway: Sharded, stream: bool) -> Iterator[int]:
    first, second, _ = pair(gateway)
    with moved(gateway, first) as wire:
        size = len(wire.chat(second, "turn 1000", stream=stream).raw())
    yield from range(size + 1)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_wherever_a_client_leaves_its_next_request_gets_the_turn_that_the_log_says(
    gateway: Sharded, stream: bool
) -> None:
    places = list(sizes(gateway, stream))
    some = sorted({0, 1, places[-2], places[-1], *random.Random(stream).sample(places, 12)})
    leave_at(gateway, some, stream, end=places[-1])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_at_each_byte_of_a_reply_a_client_may_leave(
    gateway: Sharded, stream: bool, request: pytest.FixtureRequest
) -> None:
    if "soak" not in str(request.config.getoption("markexpr")):
        pytest.skip("opt-in: pytest -m soak")
    places = list(sizes(gateway, stream))
    for start in range(0, len(places), 50):
        leave_at(gateway, places[start : start + 50], stream, end=places[-1])


def leave_at(gateway: Sharded, places: list[int], stream: bool, *, end: int) -> None:
    """Whether the kernel had all of a reply that the client read a part of is chance; what follows from it is not."""
    first, second, log = pair(gateway)
    turns = 0
    for place, how in itertools.product(places, ("close", "reset")):
        text = f"turn {1000 + place} {how}"
        wire = moved(gateway, first).chat(second, text, stream=stream)
        wire.read(place)
        wire.leave(how)
        with moved(gateway, first) as again:
            again.chat(second, text, stream=stream).raw()
            until(lambda: marks(log, len(logged(log, "turn")) - 1)[-1:] == ["delivered"])
        made = len(logged(log, "turn")) - turns
        # A second turn is another sample: the first one was said to be delivered.
        assert made in (1, 2)
        if made == 2:
            assert marks(log, turns) == ["delivered"]
        if place == end and how == "close":
            assert made == 2
        turns += made


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_turn_is_lost_or_doubled_whoever_leaves_and_whichever_shard_is_killed(
    gateway: Sharded, request: pytest.FixtureRequest
) -> None:
    if "soak" not in str(request.config.getoption("markexpr")):
        pytest.skip("opt-in: pytest -m soak")
    result = soak_shards(gateway, clients=12, turns=60, seed=1)
    assert (result.soaked.violations, result.soaked.lost, result.soaked.doubled) == ([], 0, 0)
    assert result.soaked.turns == 2 * 12 * 60
    assert result.left > 0
    assert result.kills > 0


# --------------------------------------------------------------------------- how a connection moves


def test_a_request_of_megabytes_moves_with_its_connection(gateway: Sharded) -> None:
    first, second, log = pair(gateway)
    with Wire(gateway.port) as wire:
        assert wire.ask(MODELS, first).answer()[0] == 200
        assert wire.chat(second, "hi", padding=24 << 20).answer()[0] == 200
        assert wire.chat(first, "hi", padding=24 << 20).answer()[0] == 200
        assert wire.chat(second, "hi", padding=33 << 20).answer()[0] == 413
    assert len(logged(log, "turn")) == 1


def test_a_request_waits_until_the_reply_before_it_has_been_taken(gateway: Sharded) -> None:
    first, second, log = pair(gateway)
    with moved(gateway, second, narrow=True) as wire:
        wire.chat(second, "LONG")
        until(lambda: logged(log, "turn"))
        # More than is read of a request whose connection cannot move yet.
        sent = request_of(MODELS, first, {"filler": "x" * 100_000})
        wire.sock.setblocking(False)
        taken = wire.sock.send(sent)
        wire.sock.settimeout(60)
        assert LONG.encode() in wire.raw()
        wire.sock.sendall(sent[taken:])
        assert wire.raw().startswith(b"HTTP/1.1 404")
    until(lambda: marks(log, 0) == ["delivered"])


def test_requests_sent_in_one_piece_are_answered_or_the_connection_is_closed(gateway: Sharded) -> None:
    first, second, _ = pair(gateway)
    with moved(gateway, first) as wire:
        wire.sock.sendall(request_of(MODELS, first) * 3)
        assert [wire.answer()[0] for _ in range(3)] == [200] * 3
        wire.sock.sendall(request_of(MODELS, first) + request_of(MODELS, second))
        with pytest.raises(ConnectionResetError):
            assert [wire.answer()[0] for _ in range(2)] == [200, 200]
    with moved(gateway, first) as wire:
        wire.sock.sendall(request_of(MODELS, first) + request_of(MODELS, second) + request_of(MODELS, first))
        with pytest.raises(ConnectionResetError):
            assert [wire.answer()[0] for _ in range(2)] == [200, 200]


def test_a_request_that_comes_byte_by_byte_moves_its_connection(gateway: Sharded) -> None:
    first, second, _ = pair(gateway)
    with moved(gateway, first) as wire:
        for byte in b"\r\n" + request_of(MODELS, second):
            wire.sock.sendall(bytes([byte]))
        assert wire.answer()[0] == 200
        wire.sock.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 70_000)
        with pytest.raises(ConnectionResetError):
            wire.answer()


def test_the_admin_routes_and_wrong_keys_are_answered_on_any_connection(gateway: Sharded) -> None:
    first, second, _ = pair(gateway)
    with Wire(gateway.port) as wire:
        for _ in range(3):
            assert wire.ask("/admin/sessions", "admin-key").answer()[0] == 200
            assert wire.ask(MODELS, first).answer()[0] == 200
            assert wire.ask("/admin/sessions", first).answer()[0] == 401
            assert wire.ask(MODELS, second).answer()[0] == 200
            for wrong in ("s0.x", "s1.x", "s2.x", "s" + "9" * 5000 + ".x", "\xb2.", ""):
                assert wire.ask(MODELS, wrong).answer()[0] == 401


# --------------------------------------------------------------------------- what goes wrong


def test_a_shard_that_is_killed_within_a_reply_sends_the_same_turn_again(gateway: Sharded) -> None:
    first, second, log = pair(gateway)
    with moved(gateway, first, narrow=True) as wire:
        wire.chat(second, "LONG", stream=True).read(500)
        until(lambda: logged(log, "turn"))
        gateway.kill(1)
        with pytest.raises(ConnectionResetError):
            wire.raw()
    with moved(gateway, first) as again:
        assert LONG.encode() in again.chat(second, "LONG", stream=True).raw()
        assert again.ask("/admin/sessions", "admin-key").answer()[0] == 200
    until(lambda: marks(log, 0) == ["delivered"])
    assert len(logged(log, "turn")) == 1


@pytest.mark.parametrize("shown", ["nothing", "a wrong key"])
def test_more_strangers_than_there_are_files_keep_nobody_out(gateway: Sharded, shown: str) -> None:
    first, second, _ = pair(gateway)
    with strangers(gateway, first, shown), moved(gateway, second) as late:
        assert late.ask(MODELS, first).answer()[0] == 200
        assert late.ask("/admin/sessions", "admin-key").answer()[0] == 200


def test_nor_do_they_where_one_process_serves_all(tokenizer: Path, tmp_path: Path) -> None:
    with sharded(tmp_path, tokenizer, count=1) as gateway:
        key, _ = gateway.open("t", 0)
        with strangers(gateway, "admin-key", "a wrong key", path="/admin/sessions"), moved(gateway, key) as late:
            assert late.chat(key, "hi").answer()[0] == 200


@contextmanager
def strangers(gateway: Sharded, key: str, shown: str, path: str = MODELS) -> Generator[None]:
    """So many, while a connection that showed a key stays."""
    with ExitStack() as stack, Wire(gateway.port) as wire:
        assert wire.ask(path, key).answer()[0] == 200
        for _ in range(FILES + 50):
            stranger = stack.enter_context(Wire(gateway.port))
            if shown == "a wrong key":
                assert stranger.ask(MODELS, "s1.nobody").answer()[0] == 401
        assert wire.ask(path, key).answer()[0] == 200
        yield


def test_connections_beyond_the_files_that_may_be_open_end_no_process(gateway: Sharded) -> None:
    first, second, _ = pair(gateway)
    soft, hard = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (60, hard))
    try:
        with ExitStack() as idle:
            for _ in range(100):
                idle.enter_context(Wire(gateway.port))
            until(lambda: "Too many open files" in gateway.said.read_text())
    finally:
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (soft, hard))
    with moved(gateway, first) as wire:
        assert wire.ask(MODELS, second).answer()[0] == 200


def test_a_gateway_whose_front_is_killed_or_that_cannot_start_loses_no_session(tokenizer: Path, tmp_path: Path) -> None:
    with sharded(tmp_path, tokenizer) as gateway:
        first, second, log = pair(gateway)
        with moved(gateway, first) as wire:
            assert wire.chat(second, "turn 1").answer()[0] == 200
        gateway.kill_front()
    whole = log.read_bytes()
    log.write_bytes(b"damaged\n" + whole)
    with pytest.raises(AssertionError, match="damaged line"), sharded(tmp_path, tokenizer):
        pass
    log.write_bytes(whole)
    with sharded(tmp_path, tokenizer) as gateway, moved(gateway, first) as wire:
        assert wire.chat(second, "turn 2").answer()[0] == 200
    assert len(logged(log, "turn")) == 2
    assert len(logged(log, "sealed")) == 1
