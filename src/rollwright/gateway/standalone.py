"""A gateway that serves alone on a port of this machine, for any trainer."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import anyio
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from rollwright.engines import Engine
from rollwright.errors import ConfigError
from rollwright.gateway.admin import SessionBook, admin_routes
from rollwright.gateway.bench import bench_routes
from rollwright.gateway.connection import STRANGERS, Connection, Front, connections_of_all
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.server import Gateway
from rollwright.gateway.settings import SessionSettings
from rollwright.gateway.traffic import TRAINED
from rollwright.responsive import responsive
from rollwright.tokens import Renderer
from rollwright.types import HistoryPolicy, Sampling, TrafficClass

__all__ = ["listen", "opened_gateway", "serve_gateway", "url_of"]


async def serve_gateway(
    *,
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    model: str,
    port: int,
    host: str = "127.0.0.1",
    folder: Path | None = None,
    admin_key: str | None = None,
    bench_admin: bool = False,
    limits: SessionLimits | None = None,
    history: HistoryPolicy = "exact",
    trained: frozenset[TrafficClass] = TRAINED,
    keepalive_seconds: float = 10.0,
    on_ready: Callable[[str, int], None] | None = None,
) -> None:
    """Serve until cancelled. The engine is the caller's to open and close.

    `port`: 0 takes a free one. `folder`: for the turn logs and the order of the weights; the sessions a killed gateway
    left open there go on. `admin_key`: with it the routes under `/admin` are there, for callers on this machine.
    `bench_admin`: those under `/_bench`, likewise and without a key. `sampling`, `limits`, `history`, `trained`: of
    sessions that are opened without own ones; with a seed in `sampling` each rollout has its own, made from it.
    `on_ready`: told the URL and the number of sessions taken up, once connections are accepted.

    Raises `ConfigError` naming the port when it cannot be had, `StoreError` for logs that cannot be taken up.
    """
    gateway = opened_gateway(
        engine=engine,
        renderer=renderer,
        model=model,
        folder=folder,
        admin_key=admin_key,
        bench_admin=bench_admin,
        settings=SessionSettings(sampling=sampling, limits=limits or SessionLimits(), history=history, trained=trained),
        keepalive_seconds=keepalive_seconds,
    )
    with listen(host, port) as sock:
        async with (
            gateway as (app, book),
            Front(app).serving(sock, {"only": None}, max_connections=connections_of_all(), strangers=STRANGERS),
        ):
            if on_ready is not None:
                on_ready(url_of(sock), len(book.sessions))
            await anyio.sleep_forever()


@asynccontextmanager
async def opened_gateway(
    *,
    engine: Engine,
    renderer: Renderer,
    model: str,
    folder: Path | None,
    admin_key: str | None,
    bench_admin: bool,
    settings: SessionSettings,
    keepalive_seconds: float,
    secret_prefix: str = "",
) -> AsyncGenerator[tuple[ASGIApp, SessionBook]]:
    """The routes of a gateway that serves alone, and its sessions, those of a killed one taken up. See `serve_gateway`.

    `secret_prefix`: how the keys of new sessions begin.
    """
    if folder is not None:
        await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
    gateway = Gateway(
        engine=engine,
        renderer=renderer,
        sampling=settings.sampling,
        model=model,
        keepalive_seconds=keepalive_seconds,
        weights=None if folder is None else folder / "weights.json",
    )
    async with gateway:
        book = SessionBook(gateway, folder, settings, secret_prefix=secret_prefix)
        book.reopen()
        routes: dict[str, list[BaseRoute]] = {}
        if admin_key is not None:
            routes["/admin/"] = [*admin_routes(book, admin_key)]
        if bench_admin:
            routes["/_bench/"] = [*bench_routes(gateway, folder)]
        with responsive():
            yield _beside(gateway.app, {prefix: Router(routes=own) for prefix, own in routes.items()}), book


def url_of(sock: socket.socket) -> str:
    """Of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _beside(main: ASGIApp, others: Mapping[str, ASGIApp]) -> ASGIApp:
    """`others` by the beginning of the path; what clients ask goes straight to `main`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for prefix, other in others.items():
            if scope["path"].startswith(prefix):
                if scope["client"] is not None and ip_address(scope["client"][0]).is_loopback:
                    # Others find nothing there and stay strangers.
                    connection: Connection = scope["state"]["connection"]
                    connection.trust()
                return await other(scope, receive, send)
        await main(scope, receive, send)

    return app


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` naming the port."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, not {port}", field="port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
        raise ConfigError(f"port {port} of {host} {why}", field="port") from error
