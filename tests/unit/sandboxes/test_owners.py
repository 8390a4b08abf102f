"""One living process has a box, whoever made it."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rollwright.errors import StoreError, UsageError
from rollwright.sandboxes.namespaces.registry import Process
from rollwright.sandboxes.owners import Holders, Owner


@pytest.fixture
def dead() -> Owner:
    process = subprocess.Popen(["sleep", "100"])
    known = Process.of(process.pid)
    process.kill()
    process.wait()
    assert known is not None
    return replace(Owner.myself(), process=known)


def test_an_owner_is_what_its_text_says(dead: Owner) -> None:
    assert Owner.parse(str(dead)) == dead
    assert Owner.myself().alive
    assert not dead.alive
    assert not replace(Owner.myself(), boot="another boot").alive
    assert replace(dead, host="elsewhere").alive, "nothing is known of it here"
    for wrong in ("", "a b c", "a b c d", "host boot 1 2 3"):
        assert Owner.parse(wrong) is None


def test_a_box_of_a_dead_maker_is_taken_once(dead: Owner, tmp_path: Path) -> None:
    holders = Holders(tmp_path / "holders")
    assert holders.all() == {}
    holders.take("box/../1", maker=dead)
    assert holders.all() == {"box/../1": Owner.myself()}
    with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
        holders.take("box/../1", maker=dead)
    holders.drop("box/../1")
    holders.drop("box/../1")
    holders.take("box/../1", maker=dead)


def test_of_many_who_want_a_box_at_once_one_gets_it(dead: Owner, tmp_path: Path) -> None:
    start, results = threading.Barrier(8), list[bool]()

    def take() -> None:
        start.wait()
        try:
            Holders(tmp_path / "holders").take("box", maker=dead)
            results.append(True)
        except UsageError:
            results.append(False)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]


def test_a_box_of_a_living_or_unknown_maker_is_not_taken(dead: Owner, tmp_path: Path) -> None:
    holders = Holders(tmp_path)
    with pytest.raises(UsageError, match="in use by process"):
        holders.take("box", maker=Owner.myself())
    with pytest.raises(UsageError, match="of elsewhere, as far as is known here"):
        holders.take("box", maker=replace(dead, host="elsewhere"))
    with pytest.raises(UsageError, match="do not name"):
        holders.take("box", maker=None)
    assert holders.all() == {}


def test_who_held_boxes_that_are_gone_is_forgotten_when_he_is_gone_too(dead: Owner, tmp_path: Path) -> None:
    holders = Holders(tmp_path)
    for box in ("mine", "kept", "gone"):
        holders.take(box, maker=dead)
    for box in ("kept", "gone"):
        holders._write(box, dead)
    holders.drop_dead({"kept"})
    assert set(holders.all()) == {"mine", "kept"}
    assert socket.gethostname() in str(holders.all()["mine"])


def test_a_file_that_does_not_tell_who_holds_a_box_is_named(dead: Owner, tmp_path: Path) -> None:
    holders = Holders(tmp_path)
    holders.take("box", maker=dead)
    (path,) = tmp_path.glob("*.json")
    for wrong in (b"", b"[]", b"{}", b'{"schema": 1, "box": "box", "owner": "me"}'):
        path.write_bytes(wrong)
        with pytest.raises(StoreError, match=path.name):
            holders.all()
        with pytest.raises(StoreError, match=path.name):
            holders.take("box", maker=dead)
