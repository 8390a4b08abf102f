"""The body of a Ray actor: one node's gateway, sandboxes and engine client, and the rollouts on them."""

from __future__ import annotations

import asyncio
import importlib
import tempfile
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from rollwright.config import RunConfig
from rollwright.gateway.gate import PauseMode
from rollwright.integrations.background import Background
from rollwright.integrations.ray.parcel import NodeStore, Parcel, Withdrawal
from rollwright.rollout import RolloutPlan
from rollwright.run import LocalExecutor, Observer, Places, Silent, make_parts, opened
from rollwright.sandboxes import Sweeps
from rollwright.store import RolloutRecord
from rollwright.types import Stage

__all__ = ["Cancelled", "Heard", "News", "Node", "node_settings", "with_own_address"]

_STOP_SECONDS = 60.0

Heard = tuple[str, Stage]
"""Rollout and what it has reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What happened on a node."""

    heard: list[Heard]
    withdrawals: list[Withdrawal]
    """All so far, in order."""
    infra: Mapping[str, Any]
    """What it has borne with so far."""
    versions: list[str]


@dataclass(slots=True)
class _Running:
    """One rollout in flight."""

    cut: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True, kw_only=True)
class _Open:
    """What the node's own event loop holds."""

    executor: LocalExecutor
    store: NodeStore
    maker: str = ""
    running: dict[str, _Running] = field(default_factory=dict[str, _Running])
    early: dict[str, bool] = field(default_factory=dict[str, bool])
    """Rollouts that were ended before they came (Ray may change the order of calls), and whether they were cut."""
    heard: list[Heard] = field(default_factory=list[Heard])
    news: anyio.Event = field(default_factory=anyio.Event)


class _Ears(Observer):
    """Keeps what happens for the driver."""

    def __init__(self, opened_node: _Open) -> None:
        self._open = opened_node

    def preparing(self, what: str) -> None: ...

    def started(self, plan: RolloutPlan) -> None: ...

    def entered(self, plan: RolloutPlan, stage: Stage) -> None:
        if stage is not Stage.STORED:  # it is not, before the driver has it
            self._open.heard.append((plan.name, stage))
            self._open.news.set()

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None: ...


class Node:
    """Made by Ray, one on each node. Its methods are the driver's; each may be called while others run."""

    def __init__(self, config: Mapping[str, Any], base: str, places: Places) -> None:
        """`config`: `RunConfig.dump` of the driver. Paths must be the same on each node."""
        settings = node_settings(config, Path(base))
        self._background = Background(lambda: _open(settings, places), name="rollwright-node")
        self._background.start()

    async def ready(self) -> str:
        """Returns when everything is open: the name of the boxes' maker (`Sweeps`), empty where boxes end with this
        node. Raises `UsageError` and `InfraError` as `rollwright.run.opened` does."""
        return await self._background.call(_maker)

    async def run(self, plan: RolloutPlan) -> Parcel:
        """One rollout to its end. Raises `Cancelled` after `end(name, cut=False)`."""
        return await self._background.call(_run, plan)

    async def end(self, name: str, *, cut: bool) -> None:
        """Cut a rollout, or cancel it; cancelled, it is gone when this returns. One that has not come yet
        ends as soon as it comes."""
        await self._background.call(_end, name, cut)

    async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> News:
        """`Executor.prove` of this node. Returns what happened until its end."""
        return await self._background.call(_prove, plan, earlier)

    async def listen(self, seconds: float) -> News:
        """What happened since the last call, at the latest after `seconds`: also the sign that the node is alive."""
        return await self._background.call(_listen, seconds)

    async def pause(self, mode: PauseMode) -> None:
        await self._background.call(_pause, mode)

    async def resume(self, version: str | None) -> None:
        await self._background.call(_resume, version)

    async def load_weights(self, folder: Path, version: str) -> None:
        await self._background.call(_load_weights, folder, version)

    async def close(self) -> bool:
        """End everything; whether that was done in time."""
        return await asyncio.to_thread(self._background.stop, _STOP_SECONDS)


def node_settings(config: Mapping[str, Any], base: Path) -> RunConfig:
    """The driver's settings as they are on a node."""
    settings = RunConfig.resolve({k: v for k, v in config.items() if k != "base"}, base=base, where="the run")
    settings = with_own_address(settings)
    # Nobody comes back for what a lost node's actor has left: it is owed again, elsewhere.
    options = {
        kind: own | {"survive": 0} if "survive" in own else own for kind, own in settings.sandbox.options.items()
    }
    sandbox = settings.sandbox.model_copy(update={"options": options})
    return settings.model_copy(update={"sandbox": sandbox})


def with_own_address(settings: RunConfig) -> RunConfig:
    """`gateway.public_host = "node"` as this Ray node's own address."""
    if settings.gateway.public_host != "node":
        return settings
    ray: Any = importlib.import_module("ray")
    gateway = settings.gateway.model_copy(update={"public_host": str(ray.util.get_node_ip_address())})
    return settings.model_copy(update={"gateway": gateway})


@asynccontextmanager
async def _open(config: RunConfig, places: Places) -> AsyncGenerator[_Open]:
    parts = make_parts(config, places)
    with tempfile.TemporaryDirectory(prefix="rollwright-node-") as work:
        async with opened(parts, places, Silent()) as tools:
            store = NodeStore(Path(work))
            maker = tools.provider.maker if isinstance(tools.provider, Sweeps) else ""
            yield _Open(executor=LocalExecutor(tools, store), store=store, maker=maker)


async def _maker(node: _Open) -> str:
    await anyio.lowlevel.checkpoint()
    return node.maker


async def _run(node: _Open, plan: RolloutPlan) -> Parcel:
    cut = node.early.pop(plan.name, None)
    if cut is False:
        raise Cancelled(plan.name)
    running = node.running[plan.name] = _Running()
    if cut:
        running.cut.set()
    try:
        with running.scope:
            await node.executor.run(plan, _Ears(node), cut=running.cut)
            return node.store.take(plan.name)
    finally:
        del node.running[plan.name]
        running.ended.set()
    raise Cancelled(plan.name)


async def _end(node: _Open, name: str, cut: bool) -> None:
    running = node.running.get(name)
    if running is None:
        node.early[name] = cut
    elif cut:
        running.cut.set()
    else:
        running.scope.cancel()
        await running.ended.wait()


async def _prove(node: _Open, plan: RolloutPlan, earlier: Collection[str]) -> News:
    await node.executor.prove(plan, earlier)
    return _news(node)


async def _listen(node: _Open, seconds: float) -> News:
    with anyio.move_on_after(seconds):
        await node.news.wait()
    node.news = anyio.Event()
    return _news(node)


def _news(node: _Open) -> News:
    heard, node.heard = node.heard, []
    withdrawals, infra = node.store.so_far()
    return News(heard=heard, withdrawals=withdrawals, infra=infra, versions=list(node.executor.versions))


async def _pause(node: _Open, mode: PauseMode) -> None:
    await node.executor.pause(mode)


async def _resume(node: _Open, version: str | None) -> None:
    await node.executor.resume(version)


async def _load_weights(node: _Open, folder: Path, version: str) -> None:
    await node.executor.load_weights(folder, version)


class Cancelled(Exception):
    """The driver has ended this rollout."""
