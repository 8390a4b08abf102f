"""The executor that a run file asks for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from rollwright.run import Executor, LocalExecutor, Observer, Places, Prepared, opened
from rollwright.store import RunDir, RunWriter

__all__ = ["executor_of"]


@asynccontextmanager
async def executor_of(
    prepared: Prepared,
    places: Places,
    observer: Observer,
    open_writer: Callable[[], RunWriter],
    *,
    run: RunDir | None = None,
) -> AsyncGenerator[tuple[Executor, RunWriter]]:
    """Open everything, and the run folder last: a run that cannot start leaves none. Raises `UsageError`.

    `run`: the folder of one that may be gone on with.
    """
    if prepared.config.run.executor == "ray":
        from rollwright.integrations.ray import ray_executor

        async with ray_executor(prepared.config, places, prepared.parts.provider, observer, open_writer) as executor:
            yield executor, executor.writer
        return
    async with opened(prepared.parts, places, observer, images=prepared.images, left=run and run.work) as tools:
        writer = open_writer()
        try:
            yield LocalExecutor(tools, writer), writer
        finally:
            writer.close()
