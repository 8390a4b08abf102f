"""Boxes made ahead, so that a rollout does not wait for its own: worth it where a boot takes seconds."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from rollwright.errors import RollwrightError, SandboxError
from rollwright.sandboxes import BoxInfo, Provider, Sandbox, SandboxSpec
from rollwright.sandboxes.wrapped import WrappedProvider

__all__ = ["WarmProvider"]

log = logging.getLogger(__name__)

_LABEL = "warm"
_KINDS = 8
"""Kinds of boxes that are kept ahead at the same time; the one that was not asked for longest makes room."""


@dataclass(slots=True)
class _Pool:
    """Boxes of one kind."""

    spec: SandboxSpec
    ready: deque[tuple[str, Sandbox]] = field(default_factory=deque[tuple[str, Sandbox]])
    booting: int = 0
    asked: float = 0.0


class WarmProvider(WrappedProvider):
    """A `Provider` that keeps `ahead` boxes ready of every kind of box that was asked for lately.

        async with WarmProvider(provider, ahead=2) as provider:
            ...

    A kind is a spec but for labels and lifetime. A box gets its lease when it is handed out; its labels are then known
    to this provider, in the backend's registry it stays a `warm` one, under the key that it is `known_as`. A kind that
    nobody asks for in `idle_seconds` is given up. At exit the boxes that nobody was given are removed. `clock` is there
    for tests.
    """

    def __init__(
        self,
        inner: Provider,
        *,
        ahead: int,
        idle_seconds: float = 120.0,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        super().__init__(inner)
        self._ahead = ahead
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._pools: dict[str, _Pool] = {}
        self._names: dict[str, str] = {}
        """Key of a caller → the key that the backend knows the box by."""
        self._labels: dict[str, Mapping[str, str]] = {}
        """Id of a box that was handed out → what for."""
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._give_up_idle)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        # The group is told of a cancellation only: any other error is the caller's own and leaves unwrapped.
        cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        try:
            return await self._group.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))
        finally:
            with anyio.CancelScope(shield=True):
                for name in list(self._pools):
                    await self._drop(name)

    async def create(self, spec: SandboxSpec, *, key: str) -> Sandbox:
        if key in self._names:
            return await self.inner.create(spec, key=self._names[key])
        pool = await self._pool_of(spec)
        while pool.ready:
            name, box = pool.ready.popleft()
            try:
                await box.renew(spec.lifetime_seconds)
            except SandboxError as error:
                log.info("a box made ahead is of no use any more: %s", error)
                with suppress(SandboxError):
                    await box.close()
                continue
            except BaseException:
                # It is nobody's now.
                with anyio.CancelScope(shield=True), suppress(SandboxError):
                    await box.close()
                raise
            self._names[key] = name
            self._labels[box.id] = spec.labels
            self._refill(pool)
            return box
        box = await self.inner.create(spec, key=key)
        self._refill(pool)
        return box

    def known_as(self, key: str) -> str:
        return super().known_as(self._names.get(key, key))

    async def list(self) -> list[BoxInfo]:
        """As the backend's, with the labels of whom boxes were handed to."""
        return [replace(info, labels=self._labels.get(info.id, info.labels)) for info in await self.inner.list()]

    @property
    def ready(self) -> int:
        """Boxes that nobody was given yet."""
        return sum(len(pool.ready) for pool in self._pools.values())

    async def _pool_of(self, spec: SandboxSpec) -> _Pool:
        kind = _kind(spec)
        if kind not in self._pools:
            self._pools[kind] = _Pool(spec)
            while len(self._pools) > _KINDS:
                await self._drop(min(self._pools, key=lambda name: self._pools[name].asked or self._clock()))
        pool = self._pools[kind]
        pool.asked = self._clock()
        return pool

    def _refill(self, pool: _Pool) -> None:
        assert self._group is not None, "the pool is not open"
        for _ in range(self._ahead - len(pool.ready) - pool.booting):
            pool.booting += 1
            self._group.start_soon(self._make, pool)

    async def _make(self, pool: _Pool) -> None:
        name = f"warm-{secrets.token_hex(8)}"
        try:
            box = await self.inner.create(replace(pool.spec, labels={_LABEL: "1"}), key=name)
        except RollwrightError as error:  # whoever needs a box of this kind will meet the error and tell it
            log.info("no box of image %s could be made ahead: %s", pool.spec.image, error)
            return
        finally:
            pool.booting -= 1
        if self._pools.get(_kind(pool.spec)) is pool:
            pool.ready.append((name, box))
        else:
            await box.close()

    async def _give_up_idle(self) -> None:
        while True:
            await anyio.sleep(self._idle_seconds / 4)
            for kind, pool in list(self._pools.items()):
                if self._clock() - pool.asked > self._idle_seconds:
                    await self._drop(kind)

    async def _drop(self, kind: str) -> None:
        pool = self._pools.pop(kind)
        with anyio.CancelScope(shield=True):
            while pool.ready:
                _, box = pool.ready.popleft()
                try:
                    await box.close()
                except SandboxError as error:
                    log.warning("a box made ahead could not be removed, its lease will end it: %s", error)


def _kind(spec: SandboxSpec) -> str:
    return repr(replace(spec, labels={}, env=dict(sorted(spec.env.items())), lifetime_seconds=1.0))
