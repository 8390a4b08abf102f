"""The gateway of one process: sessions by key, one app on any number of sockets."""

from __future__ import annotations

import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from starlette.routing import Router

from rollwright.dialects import Problem
from rollwright.engines import Engine
from rollwright.errors import StoreError, UsageError
from rollwright.gateway.app import build_app
from rollwright.gateway.connection import CONNECTIONS_OF_ONE, STRANGERS, Front, connections_of_all
from rollwright.gateway.exchange import Refused
from rollwright.gateway.gate import EngineGate, PauseMode
from rollwright.gateway.keys import SessionKey, forget_key, keyed_logs, read_key, write_key
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.log import TurnLog
from rollwright.gateway.session import CLOSED, Session
from rollwright.gateway.traffic import TRAINED, trained_classes
from rollwright.gateway.turn import Policy
from rollwright.gateway.versions import WeightOrder, read_order
from rollwright.tokens import Renderer
from rollwright.tokens.tree import Trajectory
from rollwright.types import HistoryPolicy, Sampling, TrafficClass

__all__ = ["Gateway"]

_THREADS = 2
"""For work that mostly holds the interpreter: more of them give no more turns a second, and the event loop waits for
each of them in turn."""
_REMEMBERED_KEYS = 100_000
_EXPECTED_SECONDS = 20.0
"""How long a request waits for its session to be reopened: less than a stranger may stay."""


class Gateway:
    """Serves CLIs the policy and records each turn.

        async with Gateway(engine=engine, renderer=renderer, sampling=sampling, model="policy") as gateway:
            session = gateway.open("task.1", log=folder / "turns.log", limits=SessionLimits())
            async with gateway.listening(sock, session):
                ...  # the CLI runs, with session.secret as its API key
            trajectory = await session.close()

    The engine is the caller's to open and close. At exit every session still open is closed.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        model: str,
        keepalive_seconds: float = 10.0,
        weights: Path | None = None,
    ) -> None:
        """`model`: the name the policy goes by. `keepalive_seconds`: the longest silence of a stream. `weights`: the
        file in which the order of weight versions outlives this process."""
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._model = model
        self._keepalive = keepalive_seconds
        self._weights = weights
        self._gate = EngineGate(engine, weights)
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._expected: dict[str, anyio.Event] = {}
        self._group: TaskGroup | None = None
        self._policy: Policy | None = None
        self._app: Router | None = None
        self._front: Front | None = None

    async def __aenter__(self) -> Self:
        """Raises `StoreError` when what an earlier process knew of the weights cannot be read."""
        if self._weights is not None:
            self.know(await anyio.to_thread.run_sync(read_order, self._weights))
        self._policy = Policy(
            engine=self._engine,
            gate=self._gate,
            renderer=self._renderer,
            model=self._model,
            threads=anyio.CapacityLimiter(_THREADS),
        )
        self._app = build_app(self, self._policy, keepalive_seconds=self._keepalive)
        self._front = Front(self._app)
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        failed: StoreError | None = None
        try:
            with anyio.CancelScope(shield=True):
                for session in list(self._open.values()):
                    try:
                        await session.close()
                    except StoreError as error_of_log:
                        failed = failed or error_of_log
        finally:
            self._group.cancel_scope.cancel()
            # The group is told of a cancellation only: any other error is the caller's own and leaves unwrapped.
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            told = (kind, error, trace) if cancelled else (None, None, None)
            swallowed = await self._group.__aexit__(*told)
        if failed is not None and error is None:
            raise failed
        return swallowed

    def open(
        self,
        rollout_id: str,
        *,
        log: Path | None,
        limits: SessionLimits,
        seed: int | None = None,
        sampling: Sampling | None = None,
        secret: str | None = None,
        routing: str | None = None,
        history: HistoryPolicy = "exact",
        trained: frozenset[TrafficClass] = TRAINED,
        one_program: bool = False,
    ) -> Session:
        """A new session.

        `log` is made and must not exist; None keeps no log, and then a killed process loses the session.
        `sampling` stands in for the gateway's, `seed` for the sampling's; `secret` and `routing` (the engine's
        session key) for random ones. `history`: what to do where the client rewrites what others than the
        policy said. `trained`: the classes of traffic that are to be trained; the turns of others are kept and
        excluded. `one_program`: what another program asks than the one that asked first is `foreign`.

        Raises `StoreError`, and `UsageError` for the secret of another open session.
        """
        assert self._group is not None, "the gateway is not open"
        assert self._policy is not None
        own = self._sampling if sampling is None else sampling
        own = own if seed is None else replace(own, seed=seed)
        header = {
            "rollout_id": rollout_id,
            "model": self._model,
            "renderer": self._renderer.name,
            "fingerprint": self._renderer.fingerprint,
            "engine": asdict(self._engine.capabilities),
            "sampling": asdict(own),
            "history": history,
            "trained": sorted(trained),
            "one_program": one_program,
        }
        key = SessionKey(
            secret=secrets.token_urlsafe(32) if secret is None else secret,
            routing=f"{rollout_id}-{secrets.token_hex(4)}" if routing is None else routing,
            opened=time.time(),
            limits=limits,
        )
        if key.secret in self._open:
            raise UsageError("this secret already is an open session's")
        turn_log = None
        if log is not None:
            turn_log = TurnLog(log, header)
            try:
                write_key(log, key)
            except StoreError:
                turn_log.release()
                log.unlink()
                raise
        session = Session(
            rollout_id,
            key=key,
            trajectory=Trajectory(rollout_id, history=history),
            policy=self._policy,
            log=turn_log,
            sampling=own,
            trained=trained,
            one_program=one_program,
            group=self._group,
            on_close=self._retire,
        )
        self._open[session.secret] = session
        return session

    def reopen(self, log: Path) -> Session:
        """The session of a gateway that was killed: same secret, limits and turns; its CLI just goes on.

        Only with the tokenizer and template the log was made with. Raises `StoreError`.
        """
        assert self._group is not None, "the gateway is not open"
        assert self._policy is not None
        key = read_key(log)
        turn_log, past = TurnLog.resume(log, round(time.time(), 3))
        if past.header["fingerprint"] != self._renderer.fingerprint:
            turn_log.release()
            raise StoreError(f"the turn log {log} was made with another tokenizer or chat template", path=str(log))
        session = Session(
            past.trajectory.rollout_id,
            key=key,
            trajectory=past.trajectory,
            policy=self._policy,
            log=turn_log,
            sampling=Sampling(**past.header["sampling"]),
            trained=trained_classes(past.header["trained"]),
            one_program=past.header.get("one_program", False),
            group=self._group,
            on_close=self._retire,
            past=past,
        )
        self._open[session.secret] = session
        if (expected := self._expected.pop(session.secret, None)) is not None:
            expected.set()
        return session

    def expect(self, folder: Path) -> None:
        """The sessions below `folder` that were open when their gateway was killed may be reopened soon: requests of
        their CLIs that come before wait for that a while. To be called before anything is served."""
        for log in keyed_logs(folder):
            # One whose key cannot be read will not be reopened either.
            with suppress(StoreError):
                self._expected[read_key(log).secret] = anyio.Event()

    def reopen_all(self, folder: Path) -> list[Session]:
        """Every session below `folder` that was open when its gateway was killed. Raises `StoreError`."""
        sessions: list[Session] = []
        for log in keyed_logs(folder):
            try:
                sessions.append(self.reopen(log))
            except StoreError as error:
                if not error.details.get("sealed"):
                    raise
                # It was killed between the seal and the end of its key.
                forget_key(log)
        return sessions

    @property
    def app(self) -> Router:
        """The routes for clients, to be served by `Front` with others beside them."""
        assert self._app is not None, "the gateway is not open"
        return self._app

    @property
    def versions(self) -> list[str]:
        """Weight versions in the order in which they came: told by `resume`, or by the engine with its tokens."""
        return self._gate.order.versions

    def know(self, versions: Sequence[str]) -> None:
        """What `versions` was in an earlier process of the run, before anything is asked of this one."""
        self._gate.order = WeightOrder(versions)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Let no new engine call begin until `resume`. Clients wait; their streams stay alive.

        Returns when no call runs, so that the weights can be changed; with `keep` at once. Raises what `Engine.abort`
        raises, and the pause stays in force; `UsageError` when there is a `resume` before no call runs.
        """
        await self._gate.shut_for(mode)

    def resume(self, version: str | None = None) -> None:
        """Go on after `pause`. `version`: what the engine calls its new weights."""
        if version is not None:
            self._gate.given(version)
        self._gate.open()

    async def store_versions(self) -> None:
        """What `resume` was told is in the file `weights`. Versions of tokens are there before their turns are
        committed. Raises `StoreError`."""
        await self._gate.store_order()

    @asynccontextmanager
    async def listening(self, sock: socket.socket, session: Session | None = None) -> AsyncGenerator[None]:
        """Serve a listening TCP socket, wherever its network namespace is; it is closed at the end.

        With `session`, only that session's key is accepted here: a sandbox cannot use the key of another one. Without,
        the key alone says whose a request is, and the socket may be a public one: a connection that shows no key that
        is known is closed after half a minute, and at once when the socket is full or its key has too many.
        """
        assert self._front is not None, "the gateway is not open"
        limit, strangers = (CONNECTIONS_OF_ONE, None) if session is not None else (connections_of_all(), STRANGERS)
        async with self._front.serving(sock, {"only": session}, max_connections=limit, strangers=strangers):
            yield

    async def session(self, secret: str, only: Session | None) -> Session:
        """See `Doorkeeper`."""
        if only is None and (expected := self._expected.get(secret)) is not None:
            with anyio.move_on_after(_EXPECTED_SECONDS) as waiting:
                await expected.wait()
            if waiting.cancelled_caught:
                raise Refused(Problem(kind="unavailable", message="this session may be reopened"))
        session = self._open.get(secret)
        if only is not None and secret != only.secret:
            session = None
        elif session is None and secret in self._closed:
            raise Refused(CLOSED)
        if session is None:
            raise Refused(Problem(kind="unauthorized", message="unknown API key"))
        return session

    def _retire(self, session: Session) -> None:
        assert self._front is not None
        self._front.disown(session)
        del self._open[session.secret]
        self._closed[session.secret] = None
        if len(self._closed) > _REMEMBERED_KEYS:
            self._closed.popitem(last=False)
