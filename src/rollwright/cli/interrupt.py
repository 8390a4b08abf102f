"""Ctrl-C: the first one cleans up, the second stops at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollwright.cli.output import INTERRUPTED, say
from rollwright.concurrency import plain_errors

T = TypeVar("T")

_SHOW_CURSOR = b"\x1b[?25h"
"""The live table hides it."""


def until_interrupted(go: Callable[[], Awaitable[T]]) -> tuple[T | None, bool]:
    """Run `go`. The first Ctrl-C (or TERM) cancels it, so that everything it opened is closed; the second exits at
    once, and the sandboxes die with this process."""

    async def main() -> tuple[T | None, bool]:
        result: T | None = None
        scope = anyio.CancelScope()
        with plain_errors():
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_on_signal, scope)
                with scope:
                    result = await go()
                group.cancel_scope.cancel()
        return result, scope.cancelled_caught

    return anyio.run(main, backend_options={"use_uvloop": True})


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if scope.cancel_called:
                if sys.stderr.isatty():
                    os.write(sys.stderr.fileno(), _SHOW_CURSOR)
                os._exit(INTERRUPTED)
            say("interrupted: cleaning up (again to stop at once)")
            scope.cancel()
