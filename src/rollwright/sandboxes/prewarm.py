"""Images made ready before the first rollout, and all those named that cannot be."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio

from rollwright.errors import ConfigError, RollwrightError
from rollwright.sandboxes import Provider, SandboxSpec

__all__ = ["prewarm"]

_NAMED = 5


async def prewarm(
    provider: Provider,
    images: Sequence[str],
    *,
    boot: SandboxSpec | None = None,
    at_once: int = 8,
    done: Callable[[int, int], None] = lambda _done, _all: None,
) -> None:
    """Check every image, which fetches or unpacks it where the backend does so.

    `boot`: also boot a box of each, made of this spec, so that a cluster has it at hand and one that only a boot can
    tell of is found out. `done` hears how many of how many are ready. Raises `ConfigError` that names the images which
    are not, with the first reason.
    """
    failed: dict[str, RollwrightError] = {}
    owed = iter(images)
    ready = 0

    async def work() -> None:
        nonlocal ready
        for image in owed:
            try:
                await provider.check_image(image)
                if boot is not None:
                    box = await provider.create(replace(boot, image=image), key=f"prewarm-{secrets.token_hex(8)}")
                    with anyio.CancelScope(shield=True):
                        await box.close()
            except RollwrightError as error:  # one bad image must not hide the others
                failed[image] = error
            ready += 1
            done(ready, len(images))

    async with anyio.create_task_group() as group:
        for _ in range(min(at_once, len(images))):
            group.start_soon(work)
    if failed:
        names = [image for image in images if image in failed]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        first = failed[names[0]]
        if len(names) == 1:
            raise ConfigError(first.message, **first.details)
        shown = ", ".join(names[:_NAMED]) + more
        raise ConfigError(
            f"{len(names)} of {len(images)} images cannot be used: {shown}; the first: {first}", images=names
        )
