"""Going wrong on request: what networks, proxies and servers do to a client, seeded and counted."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, cast

import anyio
import orjson
from anyio.abc import TaskGroup
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollwright.e2b_server.connect import RpcError, encode_end
from rollwright.gateway.connection import Connection

__all__ = ["FAULTS", "Fault", "Faults", "FaultyApp"]

Fault = Literal[
    "bad_gateway",
    "late_bad_gateway",
    "busy",
    "rate_limited",
    "drop_reply",
    "delay",
    "duplicate",
    "late_duplicate",
    "cut_stream",
    "lost_end",
    "unavailable",
    "truncate",
]
"""What happens to one request.

bad_gateway, busy, rate_limited: 502, 503, 429 and nothing is done. late_bad_gateway: it is done, and then 502.
drop_reply: it is done, then the connection breaks. delay: it comes late. duplicate: it comes twice at once, and either
one's reply is given. late_duplicate: it comes again after its reply. cut_stream: the connection breaks in the middle of
a stream. lost_end: a stream ends in order, but without the process's end. unavailable: a stream ends with that error.
truncate: the connection breaks in the middle of a file.
"""

_STREAMS = ("/process.Process/Start", "/process.Process/Connect")
_ONLY_STREAMS: frozenset[Fault] = frozenset({"cut_stream", "lost_end", "unavailable"})
FAULTS: tuple[Fault, ...] = (
    "bad_gateway",
    "late_bad_gateway",
    "busy",
    "drop_reply",
    "delay",
    "duplicate",
    "late_duplicate",
    "cut_stream",
    "lost_end",
    "unavailable",
    "truncate",
)
"""All that a client may have to bear with often; a 429 names its own pace."""


class Faults:
    """What is to go wrong, and `counts` of what did. Change it at any time; tasks of one loop share it."""

    def __init__(self, *, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[Fault] = Counter()
        self.random = random.Random(seed)
        self._clock = clock
        self._once: deque[tuple[Fault, str]] = deque()
        self._kinds: tuple[Fault, ...] = ()
        self._interval = 0.0
        self._rate = 0.0
        self._next = 0.0

    def once(self, fault: Fault, *, path: str = "", times: int = 1) -> None:
        """The next requests whose path begins with `path`."""
        self._once.extend((fault, path) for _ in range(times))

    def every(self, seconds: float, kinds: Iterable[Fault]) -> None:
        """One request each so many seconds, the kinds in turn; each waits for a request that it can happen to."""
        self._kinds, self._interval, self._rate = tuple(kinds), seconds, 0.0
        self._next = self._clock() + seconds

    def at_random(self, rate: float, kinds: Iterable[Fault]) -> None:
        """Each request with this probability."""
        self._kinds, self._interval, self._rate = tuple(kinds), 0.0, rate

    def stop(self) -> None:
        self._kinds = ()
        self._once.clear()

    def pick(self, method: str, path: str) -> Fault | None:
        """What is to happen to this request."""
        for planned in self._once:
            if path.startswith(planned[1]) and _fits(planned[0], method, path):
                self._once.remove(planned)
                return planned[0]
        # How the box is doing is asked after each failure; without an answer every failure looks like the box's end.
        if not self._kinds or path == "/health":
            return None
        if self._interval:
            first, *others = self._kinds
            if self._clock() < self._next or not _fits(first, method, path):
                return None
            self._next = self._clock() + self._interval
            self._kinds = (*others, first)
            return first
        kinds: list[Fault] = [kind for kind in self._kinds if _fits(kind, method, path)]
        if not kinds:
            return None
        return self.random.choice(kinds) if self.random.random() < self._rate else None


def _fits(fault: Fault, method: str, path: str) -> bool:
    if fault in _ONLY_STREAMS:
        return path in _STREAMS
    return fault != "truncate" or (method == "GET" and path == "/files")


class FaultyApp:
    """The app with its faults. Late work goes on in `group`."""

    def __init__(self, app: ASGIApp, faults: Faults, group: TaskGroup) -> None:
        self._app = app
        self._faults = faults
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._faults.pick(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
        else:
            await _Spoiled(self._app, self._faults, self._group, scope, receive, send).run(fault)


class _Spoiled:
    """One request that goes wrong."""

    def __init__(
        self, app: ASGIApp, faults: Faults, group: TaskGroup, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._app = app
        self._faults = faults
        self._group = group
        self._scope = scope
        self._receive = receive
        self._send = send

    async def run(self, fault: Fault) -> None:
        match fault:
            case "bad_gateway":
                await self._answer(fault, 502)
            case "busy":
                await self._answer(fault, 503)
            case "rate_limited":
                await self._answer(fault, 429, {"retry-after": "1"})
            case "late_bad_gateway":
                await self._silently(self._receive)
                await self._answer(fault, 502)
            case "drop_reply":
                await self._silently(self._receive)
                await self._hang_up(fault)
            case "delay":
                self._faults.counts[fault] += 1
                await anyio.sleep(self._faults.random.uniform(0.1, 1.0))
                await self._app(self._scope, self._receive, self._send)
            case "duplicate" | "late_duplicate":
                await self._twice(fault)
            case "cut_stream" | "truncate":
                await self._cut(fault)
            case "lost_end" | "unavailable":
                await self._without_end(fault)

    async def _answer(self, fault: Fault, status: int, headers: Mapping[str, str] | None = None) -> None:
        self._faults.counts[fault] += 1
        body = orjson.dumps({"code": status, "message": f"injected: {fault}"})
        fields = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})

    async def _silently(self, receive: Receive) -> None:
        """Have it done, up to where a reply would begin, and keep the reply."""
        done = anyio.Event()

        async def hear(message: Message) -> None:
            done.set()

        async def work() -> None:
            try:
                await self._app(self._scope, receive, hear)
            finally:
                done.set()

        self._group.start_soon(work)
        await done.wait()

    async def _hang_up(self, fault: Fault) -> None:
        self._faults.counts[fault] += 1
        cast(Connection, self._scope["state"]["connection"]).hang_up()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _twice(self, fault: Fault) -> None:
        body, more = b"", True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)

        def again() -> Receive:
            given = False

            async def receive() -> Message:
                nonlocal given
                if given:
                    return await self._receive()
                given = True
                return {"type": "http.request", "body": body, "more_body": False}

            return receive

        self._faults.counts[fault] += 1
        if fault == "late_duplicate":
            await self._app(self._scope, again(), self._send)
            await anyio.sleep(self._faults.random.uniform(0.0, 1.0))
            await self._silently(again())
        elif self._faults.random.random() < 0.5:
            await self._silently(again())
            await self._app(self._scope, again(), self._send)
        else:
            self._group.start_soon(self._silently, again())
            await self._app(self._scope, again(), self._send)

    async def _cut(self, fault: Fault) -> None:
        chunks = self._faults.random.randint(1, 2)

        async def send(message: Message) -> None:
            nonlocal chunks
            if message["type"] == "http.response.body":
                chunks -= 1
                if fault == "truncate":
                    half = message["body"][: len(message["body"]) // 2]
                    await self._send({"type": "http.response.body", "body": half, "more_body": True})
                if fault == "truncate" or chunks < 0:
                    await self._hang_up(fault)
                    return
            await self._send(message)

        await self._app(self._scope, self._receive, send)

    async def _without_end(self, fault: Fault) -> None:
        async def send(message: Message) -> None:
            if b'{"event":{"end":' in message.get("body", b""):
                self._faults.counts[fault] += 1
                if fault == "unavailable":
                    error = RpcError("unavailable", "injected: the connection to the sandbox ended")
                    await self._send({"type": "http.response.body", "body": encode_end(error), "more_body": False})
                return
            if fault == "unavailable" and not message.get("more_body", True):
                return
            await self._send(message)

        await self._app(self._scope, self._receive, send)
