"""Many sessions at once, whose clients leave in the middle of replies, ask again and ask twice."""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any, Literal

import anyio
import orjson
from anyio.abc import SocketAttribute

from rollwright.gateway.server import Gateway
from rollwright.gateway.session import SessionLimits
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import verify

Manner = Literal["whole", "leave_at_once", "leave_early", "leave_late", "twice"]
MANNERS: tuple[Manner, ...] = ("whole", "whole", "leave_at_once", "leave_early", "leave_late", "twice")
"""leave_*: closes or resets the connection after sending, after some bytes, with little left. twice: the same request
on two connections at once."""


@dataclass(slots=True)
class Soaked:
    """What became of all sessions."""

    turns: int = 0
    lost: int = 0
    """Replies a client got whole that are not trained."""
    doubled: int = 0
    """Trained turns beyond one for each reply that a client went on with."""
    violations: list[str] = field(default_factory=list[str])
    manners: Counter[str] = field(default_factory=Counter[str])


async def soak(gateway: Gateway, port: int, *, sessions: int, turns: int, seed: int, at_once: int = 64) -> Soaked:
    """Run them against an open gateway that listens on `port` of this machine."""
    soaked = Soaked()
    room = anyio.CapacityLimiter(at_once)

    async def one(number: int) -> None:
        async with room:
            session = gateway.open(f"soak.{number}", log=None, limits=SessionLimits(failures=None))
            client = _Client(port, session.secret, random.Random(f"{seed} {number}"), soaked)
            said = await client.talk(turns)
            judge(await session.close(), said, soaked)

    async with anyio.create_task_group() as group:
        for number in range(sessions):
            group.start_soon(one, number)
    return soaked


class _Client:
    """One CLI: it says its whole history each time, and asks again until it has a whole reply."""

    def __init__(self, port: int, key: str, chance: random.Random, soaked: Soaked) -> None:
        self._port = port
        self._key = key
        self._chance = chance
        self._soaked = soaked

    async def talk(self, turns: int) -> list[str]:
        """The replies it went on with."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix the bug in the file."}]
        said: list[str] = []
        for turn in range(turns):
            reply = await self._insist(orjson.dumps({"messages": messages, "stream": True}))
            said.append(reply)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": f"Turn {turn}: the tests fail still, {self._chance.random()}."},
            ]
        return said

    async def _insist(self, body: bytes) -> str:
        tries = 0
        while True:
            manner = self._chance.choice(MANNERS) if tries < 3 else "whole"
            self._soaked.manners[manner] += 1
            replies: list[str] = []
            async with anyio.create_task_group() as group:
                for _ in range(2 if manner == "twice" else 1):
                    group.start_soon(self._ask, body, manner, tries, replies)
            if replies:
                return replies[0]
            tries += 1
            assert tries < 50, "the gateway gives no whole reply"

    async def _ask(self, body: bytes, manner: Manner, tries: int, replies: list[str]) -> None:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: {self._key}\r\n"
            f"content-length: {len(body)}\r\nx-stainless-retry-count: {tries}\r\n"
            f"idempotency-key: {sha1(body).hexdigest()}\r\n\r\n"
        )
        keep = {"leave_at_once": 0, "leave_early": 200, "leave_late": 600}.get(manner)
        reset = False
        async with await anyio.connect_tcp("127.0.0.1", self._port) as stream:
            await stream.send(head.encode() + body)
            received = b""
            try:
                while keep is None or len(received) < keep:
                    received += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                keep = None
            if keep is not None and self._chance.random() < 0.5:
                reset = True
                sock = stream.extra(SocketAttribute.raw_socket)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Who resets a connection has not taken what came over it, whatever it had read.
        if b"data: [DONE]\n\n" in received and not reset:
            replies.append(text_of(received))


def text_of(received: bytes) -> str:
    """What a whole reply says, from its Chat stream."""
    deltas = [
        orjson.loads(line.removeprefix(b"data: "))["choices"][0]["delta"].get("content") or ""
        for line in received.split(b"\n")
        if line.startswith(b"data: {") and orjson.loads(line.removeprefix(b"data: "))["choices"]
    ]
    return "".join(deltas)


def judge(trajectory: Trajectory, said: list[str], soaked: Soaked) -> None:
    """Count in `soaked` what became of a session whose client went on with the replies `said`."""
    samples = build_samples(
        trajectory,
        task_id="t",
        group_id="t",
        rollout_id=trajectory.rollout_id,
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
    )
    report = verify(trajectory, samples, None)
    soaked.violations += [f"{trajectory.rollout_id}: {violation}" for violation in report.violations]
    kept = [turn for turn in trajectory.turns if turn.delivered]
    soaked.turns += len(said)
    soaked.lost += len(said) - sum(turn.reply.content == text for turn, text in zip(kept, said, strict=False))
    soaked.doubled += max(0, len(kept) - len(said))
    if report.trained != sum(len(turn.sampled) for turn in kept):
        soaked.violations.append(f"{trajectory.rollout_id}: {report.trained} tokens trained of {report.sampled}")
