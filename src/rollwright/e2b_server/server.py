"""The server as one object to enter, and as a process."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from rollwright.e2b_server.app import build_app
from rollwright.e2b_server.boxes import Boxes, Template
from rollwright.e2b_server.faults import Faults, FaultyApp
from rollwright.errors import ConfigError
from rollwright.gateway.connection import Front
from rollwright.sandboxes import Provider
from rollwright.sandboxes.namespaces import NamespacesProvider

__all__ = ["E2BServer", "serve"]


class E2BServer:
    """Speaks E2B's API over boxes of the namespaces backend.

        async with E2BServer(provider=provider, api_key=key) as server, server.listening(sock):
            ...  # the E2B SDK, with E2B_API_URL and E2B_SANDBOX_URL set to the address of sock

    The provider is the caller's to open and close; at exit all boxes that were made through the server are removed.
    """

    def __init__(
        self,
        *,
        provider: Provider,
        api_key: str,
        templates: Mapping[str, Template] | None = None,
        image_metadata_key: str | None = None,
        allowed_port: int = 18001,
        faults: Faults | None = None,
        forgetful: bool = False,
    ) -> None:
        """`templates`: names beside those of images. `image_metadata_key`: the metadata that names a box's image.

        `allowed_port`: of the one host that a box without internet access may be allowed, the port it reaches.

        For tests of clients: `faults` is what is to go wrong, a `forgetful` server does not know idempotency keys.
        """
        if not api_key:
            raise ConfigError("the E2B server needs an API key", field="api_key")
        self._provider = provider
        self._api_key = api_key
        self._templates = templates or {}
        self._image_key = image_metadata_key
        self._allowed_port = allowed_port
        self._faults = faults
        self._forgetful = forgetful
        self._group: TaskGroup | None = None
        self._boxes: Boxes | None = None
        self._front: Front | None = None

    @property
    def boxes(self) -> Boxes:
        """The boxes it has now."""
        assert self._boxes is not None, "the server is not open"
        return self._boxes

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        boxes = Boxes(
            self._provider,
            self._group,
            templates=self._templates,
            image_key=self._image_key,
            allowed_port=self._allowed_port,
            forgetful=self._forgetful,
        )
        app = build_app(boxes, api_key=self._api_key)
        self._boxes = boxes
        self._front = Front(app if self._faults is None else FaultyApp(app, self._faults, self._group))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        with anyio.CancelScope(shield=True):
            for box in self.boxes.all():
                await self.boxes.kill(box)
        self._group.cancel_scope.cancel()
        # The group is told of a cancellation only: any other error is the caller's own and leaves unwrapped.
        cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        return await self._group.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    @asynccontextmanager
    async def listening(self, sock: socket.socket) -> AsyncGenerator[None]:
        """Serve a listening TCP socket; it is closed at the end."""
        assert self._front is not None, "the server is not open"
        async with self._front.serving(sock, {}):
            yield


async def serve(
    *,
    host: str,
    port: int,
    api_key: str,
    state_dir: Path,
    images: Path | None,
    image_metadata_key: str | None,
    allowed_port: int = 18001,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is told the address. Raises `Unsupported` where no box can be made."""
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(NamespacesProvider(state_dir=state_dir, images=images))
        await provider.probe()
        server = await stack.enter_async_context(
            E2BServer(
                provider=provider,
                api_key=api_key,
                image_metadata_key=image_metadata_key,
                allowed_port=allowed_port,
            )
        )
        sock = socket.create_server((host, port), backlog=512)
        await stack.enter_async_context(server.listening(sock))
        signals = stack.enter_context(anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM))
        ready(f"http://{host}:{sock.getsockname()[1]}")
        async for _ in signals:
            return
