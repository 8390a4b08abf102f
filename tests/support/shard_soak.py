"""Clients with sessions of both shards on one connection, which leave it anywhere, and shards that are killed."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from typing import Any

from rollwright.gateway.log import read_turn_log
from support.sharded import Leaving, Sharded, Wire
from support.soak import Soaked, judge, text_of

_LEAVING: tuple[Leaving, ...] = ("close", "reset")
_PLACES = (1, 200, 500, 600, 700)
"""Bytes of the reply after which a client leaves. After none its end could overtake its request, and then nothing says
that it has read the reply before."""
_BETWEEN_KILLS_SECONDS = 2.0


@dataclass(slots=True)
class ShardSoaked:
    """What became of all sessions."""

    soaked: Soaked = field(default_factory=Soaked)
    left: int = 0
    kills: int = 0


def soak_shards(gateway: Sharded, *, clients: int, turns: int, seed: int) -> ShardSoaked:
    """Run them. Each client has a session of each shard, and one connection for both."""
    result = ShardSoaked()
    done: list[_Client] = []
    chance = random.Random(seed)

    def one(number: int) -> None:
        client = _Client(gateway, number, random.Random(f"{seed} {number}"))
        client.talk(turns)
        done.append(client)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(_BETWEEN_KILLS_SECONDS * (0.5 + chance.random()))
            if thread.is_alive() and gateway.kill_if_there(chance.randrange(2)):
                result.kills += 1
    assert len(done) == clients, "a client failed"
    for client in done:
        result.left += client.left
        for (_, log), said in zip(client.sessions, client.said, strict=True):
            judge(read_turn_log(log).trajectory, said, result.soaked)
    return result


class _Client:
    """It says its whole history each time, and asks again until it has a whole reply."""

    def __init__(self, gateway: Sharded, number: int, chance: random.Random) -> None:
        self.sessions: list[tuple[str, Path]] = [gateway.open(f"soak{number}", shard) for shard in (0, 1)]
        self.said: list[list[str]] = [[], []]
        self.left = 0
        self._gateway = gateway
        self._chance = chance
        self._wire: Wire | None = None

    def talk(self, turns: int) -> None:
        histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": "Fix it."}] for _ in self.sessions]
        for turn in range(turns):
            for (key, _), messages, said in zip(self.sessions, histories, self.said, strict=True):
                said.append(self._insist(key, json.dumps({"messages": messages, "stream": True}).encode()))
                more = f"Turn {turn}: the tests fail still, {self._chance.random()}."
                messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": more}]
        self._hang_up()
        for _, log in self.sessions:
            self._close(log.name.removesuffix(".turns.log"))

    def _insist(self, key: str, body: bytes) -> str:
        for tries in range(200):
            try:
                if (reply := self._ask(key, body, tries)) is not None:
                    return reply
            except OSError:
                self._hang_up()
        raise AssertionError("the gateway gives no whole reply")

    def _ask(self, key: str, body: bytes, tries: int) -> str | None:
        """None: it has left."""
        if self._wire is None:
            self._wire = Wire(self._gateway.port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n"
            f"x-stainless-retry-count: {tries}\r\nidempotency-key: {sha1(body).hexdigest()}\r\n\r\n"
        )
        self._wire.sock.sendall(head.encode() + body)
        if tries < 3 and self._chance.random() < 0.5:
            self._wire.read(self._chance.choice(_PLACES))
            self._wire.leave(self._chance.choice(_LEAVING))
            self._wire = None
            self.left += 1
            return None
        return text_of(self._wire.raw())

    def _close(self, rollout: str) -> None:
        while True:
            try:
                with Wire(self._gateway.port) as wire:
                    status, told = wire.ask(f"/admin/sessions/{rollout}/close", "admin-key", {"reward": 1.0}).answer()
            except OSError:
                continue
            # An answer that was lost with its shard is asked for again; the shard that comes back may be starting.
            if status != 500:
                assert status == 200, told
                return

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.sock.close()
            self._wire = None
