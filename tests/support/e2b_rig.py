"""Our E2B server on a loopback port, and what a test needs to drive it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from rollwright.e2b_server import E2BServer, Faults, Template
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.e2b import E2BProvider, E2BSandbox
from rollwright.sandboxes.namespaces import NamespacesProvider

API_KEY = "e2b_0123456789"
IMAGE_KEY = "cluster-image"
SPEC = SandboxSpec(image="host", network="none")


@dataclass
class Rig:
    """The running server. `url` may be replaced by that of something in between."""

    server: E2BServer
    faults: Faults
    namespaces: NamespacesProvider
    state: Path
    port: int
    url: str
    gateway: socket.socket
    """Listens on loopback at the one port that closed boxes may be allowed to reach."""

    def provider(self, **more: Any) -> E2BProvider:
        options: dict[str, Any] = {"api_key": API_KEY, "api_url": self.url, "sandbox_url": self.url}
        return E2BProvider(**options | {"state_dir": self.state} | more)


@asynccontextmanager
async def e2b_rig(
    state: Path, *, seed: int = 0, forgetful: bool = False, images: Path | None = None
) -> AsyncGenerator[Rig]:
    faults = Faults(seed=seed)
    templates = {"small": Template(image="host", disk_mb=16)}
    async with AsyncExitStack() as stack:
        gateway = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        namespaces = await stack.enter_async_context(NamespacesProvider(state_dir=state / "server", images=images))
        server = await stack.enter_async_context(
            E2BServer(
                provider=namespaces,
                api_key=API_KEY,
                templates=templates,
                image_metadata_key=IMAGE_KEY,
                allowed_port=gateway.getsockname()[1],
                faults=faults,
                forgetful=forgetful,
            )
        )
        sock = socket.create_server(("127.0.0.1", 0), backlog=512)
        port = sock.getsockname()[1]
        await stack.enter_async_context(server.listening(sock))
        url = f"http://127.0.0.1:{port}"
        yield Rig(
            server=server,
            faults=faults,
            namespaces=namespaces,
            state=state / "client",
            port=port,
            url=url,
            gateway=gateway,
        )


async def boxes_of(provider: E2BProvider, count: int) -> list[E2BSandbox]:
    made: list[E2BSandbox] = []

    async def make() -> None:
        made.append(await provider.create(SPEC, key=secrets.token_hex(8)))

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(make)
    return made
