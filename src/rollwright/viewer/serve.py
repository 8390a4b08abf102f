"""Serving the pages on the loopback address, and reading what indexes still miss meanwhile."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from rollwright.errors import ConfigError
from rollwright.gateway.connection import Front
from rollwright.viewer.app import App
from rollwright.viewer.library import Library
from rollwright.viewer.pages import Pages

__all__ = ["serving"]

_LOOK_SECONDS = 1.0
_BATCH = 400
"""Turn logs read between two looks at whether to stop."""


@asynccontextmanager
async def serving(pages: Pages, library: Library, *, port: int = 0) -> AsyncGenerator[str]:
    """Serve until the end of the block; yields the URL, with its token. Raises `ConfigError` when the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen(128)
        except OSError as error:
            raise ConfigError(f"port {port} of 127.0.0.1: {error.strerror}; choose another with --port") from error
        number: int = sock.getsockname()[1]
        token = secrets.token_urlsafe(18)
        await anyio.to_thread.run_sync(_read_indexes, library)
        async with Front(App(pages, token=token)).serving(sock, {}), anyio.create_task_group() as group:
            group.start_soon(_read_facts, library)
            yield f"http://127.0.0.1:{number}/{token}/"
            group.cancel_scope.cancel()
    finally:
        sock.close()


def _read_indexes(library: Library) -> None:
    """So that the first page need not wait for it."""
    for shown in library.runs():
        shown.index.sync()


async def _read_facts(library: Library) -> None:
    """Turn logs are large: they are read in the background, some at a time."""
    while True:
        read = 0
        for shown in library.runs():
            read += await anyio.to_thread.run_sync(shown.index.read_facts, _BATCH)
        if not read:
            await anyio.sleep(_LOOK_SECONDS)
