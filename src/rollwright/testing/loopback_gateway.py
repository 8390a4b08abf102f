"""A gateway with a scripted policy on a loopback port: what a harness, or any client, can be tried against."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollwright.engines import Engine
from rollwright.engines.scripted import Fault, Rule, Script, ScriptedEngine
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import Session, SessionLimits
from rollwright.gateway.traffic import TRAINED
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.types import HistoryPolicy, Sampling, TrafficClass

__all__ = ["LoopbackGateway", "load_scripted", "loopback_gateway", "scripted_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackGateway:
    """A running gateway with one open session."""

    gateway: Gateway
    session: Session
    engine: WatchedEngine
    url: str
    """Scheme, host and port."""


def scripted_engine(
    renderer: Renderer,
    *replies: str,
    faults: Sequence[Fault] = (),
    max_context: int = 200_000,
    seconds_per_turn: float = 0.0,
) -> WatchedEngine:
    """An engine that says `replies` in order, in the template's own markup."""
    script = Script(script=(Rule(replies=replies),), fault=tuple(faults), max_context=max_context)
    return WatchedEngine(ScriptedEngine(renderer=renderer, script=script, seconds_per_turn=seconds_per_turn))


def load_scripted(tokenizer: Path, *replies: str) -> tuple[Engine, Renderer]:
    """What a gateway in another process is made with: `partial(load_scripted, folder, ...)` can be pickled."""
    renderer = load_renderer(tokenizer, kind="template")
    return ScriptedEngine(renderer=renderer, script=Script(script=(Rule(replies=replies),))), renderer


@asynccontextmanager
async def loopback_gateway(
    renderer: Renderer,
    engine: WatchedEngine,
    *,
    log: Path | None = None,
    limits: SessionLimits | None = None,
    sampling: Sampling | None = None,
    keepalive_seconds: float = 10.0,
    send_buffer: int | None = None,
    history: HistoryPolicy = "exact",
    trained: frozenset[TrafficClass] = TRAINED,
    one_program: bool = False,
) -> AsyncGenerator[LoopbackGateway]:
    """Open engine, gateway and one session, and listen. `send_buffer`: bytes the kernel takes for a slow reader."""
    gateway = Gateway(
        engine=engine,
        renderer=renderer,
        sampling=sampling or Sampling(),
        model="policy",
        keepalive_seconds=keepalive_seconds,
    )
    with socket.create_server(("127.0.0.1", 0)) as sock:
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        async with engine, gateway:
            session = gateway.open(
                "task.1",
                log=log,
                limits=limits or SessionLimits(),
                history=history,
                trained=trained,
                one_program=one_program,
            )
            async with gateway.listening(sock, session):
                port: int = sock.getsockname()[1]
                url = f"http://127.0.0.1:{port}"
                yield LoopbackGateway(gateway=gateway, session=session, engine=engine, url=url)
