"""`[run] executor = "ray"`: rollouts on the nodes of a Ray cluster, one writer of the run folder.

Each node has one actor with a gateway, sandboxes and an engine client of its own. The driver gives it rollouts, hears
of it at least every few seconds, and stores what it sends. A node that dies or falls silent loses its lease: its
rollouts are owed again and run elsewhere; whatever it may still send is nobody's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import InfraError, RolloutCut
from rollwright.gateway.gate import PauseMode
from rollwright.gateway.versions import WeightOrder
from rollwright.integrations.ray.cluster import Cluster, NodeLost, connected
from rollwright.integrations.ray.node import News
from rollwright.integrations.ray.nodes import Member, Nodes
from rollwright.integrations.ray.parcel import Parcel, Withdrawal, unbegun, unpack
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Observer, Places, current_rollout
from rollwright.sandboxes import Provider
from rollwright.sandboxes.retry import Tally
from rollwright.store import RolloutRecord, RunWriter, withdrawn
from rollwright.types import Failure, Stage

__all__ = ["RayExecutor", "ray_executor"]

_LEASES = 5
"""Nodes that may be lost under one rollout: it may be what kills them, and must not take the whole cluster down."""
_END_SECONDS = 30.0


@asynccontextmanager
async def ray_executor(
    config: RunConfig,
    places: Places,
    provider: Provider,
    observer: Observer,
    open_writer: Callable[[], RunWriter],
) -> AsyncGenerator[RayExecutor]:
    """Connect to the cluster, open a node on each of its machines, then the run folder. Closes `provider` at its end.

    Raises `ConfigError` for no Ray, no cluster and no node, and what the first node cannot open.
    """
    observer.preparing(f"Ray at {config.ray.address}")
    async with connected(config.ray.address) as cluster:
        with plain_errors():
            async with anyio.create_task_group() as group:
                executor = RayExecutor(cluster, config, places, provider, group)
                try:
                    await executor.open(observer)
                    writer = open_writer()
                    try:
                        executor.write_into(writer)
                        yield executor
                    finally:
                        group.cancel_scope.cancel()  # from now on no node joins, and none is heard of
                        with anyio.CancelScope(shield=True):
                            await executor.close_writer()
                finally:
                    group.cancel_scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await executor.close()
                        await provider.close()


class RayExecutor:
    """Rollouts on the nodes of a cluster. Made by `ray_executor`."""

    def __init__(
        self, cluster: Cluster, config: RunConfig, places: Places, provider: Provider, group: TaskGroup
    ) -> None:
        self._nodes = Nodes(cluster, config, places, provider, group, hear=self._hear)
        self.room = self._nodes.room
        self._flying: dict[str, tuple[RolloutPlan, Observer]] = {}
        self._order = WeightOrder()
        self._stored_versions: list[str] = []
        self._taken_back: list[RolloutRecord] = []
        self._earlier = Tally()
        """What the processes counted that worked on this run before."""
        self._infra: dict[Member, Mapping[str, Any]] = {}
        self._withdrawn: dict[str, Withdrawal] = {}
        """By rollout, for those that are not stored yet."""
        self._storing = anyio.Lock()

    async def open(self, observer: Observer) -> None:
        """As `Nodes.open`. What comes of rollouts is stored when `write_into` has been called."""
        await self._nodes.open(observer)

    def write_into(self, writer: RunWriter) -> None:
        """Raises `StoreError`."""
        self.writer = writer
        self._stored_versions = writer.versions()
        self._order = WeightOrder(self._stored_versions)
        before = writer.infra()
        self._earlier = Tally.from_json(before) if before else Tally()

    async def close_writer(self) -> None:
        """When no rollout runs any more. Verdicts that nodes took back just before do not stay in the run folder."""
        try:
            await self._nodes.hear_all()
        finally:
            async with self._storing:
                self.writer.close()

    async def close(self) -> None:
        await self._nodes.close()

    # ------------------------------------------------------------------ running

    async def run(self, plan: RolloutPlan, observer: Observer, *, cut: anyio.Event | None = None) -> Attempt:
        token = current_rollout.set(plan.name)
        self._flying[plan.name] = (plan, observer)
        try:
            observer.started(plan)
            for lease in range(plan.lease, plan.lease + _LEASES):
                if cut is not None and cut.is_set():
                    break
                parcel = await self._on_some_node(replace(plan, lease=lease), cut)
                if parcel is not None:
                    return await self._keep(plan, parcel, observer)
            error = InfraError(f"{_LEASES} nodes were lost under it, one after the other")
            if cut is not None and cut.is_set():
                error = RolloutCut("ended before its time")
            parcel = await anyio.to_thread.run_sync(unbegun, plan, error)
            return await self._keep(plan, parcel, observer)
        finally:
            del self._flying[plan.name]
            current_rollout.reset(token)

    async def _on_some_node(self, plan: RolloutPlan, cut: anyio.Event | None) -> Parcel | None:
        """Its end; None when its node was lost, or it was cut before there was one."""
        async with self._nodes.place(cut) as member:
            if member is None:
                return None
            try:
                parcel = await self._on(member, plan, cut)
            except NodeLost as error:
                self._nodes.lose(member, str(error))
                self._withdrawn.pop(plan.name, None)  # it was about what is lost
                return None
            if parcel.record.graded:
                member.graded.add(plan.name)
            await self._take_back_heard(member, parcel.withdrawals)
            return parcel

    async def _on(self, member: Member, plan: RolloutPlan, cut: anyio.Event | None) -> Parcel:
        async def end_when_cut(cut: anyio.Event) -> None:
            await cut.wait()
            with suppress(NodeLost):  # `run` tells it, too
                await member.actor.call("end", plan.name, cut=True)

        parcels: list[Parcel] = []
        try:
            with plain_errors():
                async with anyio.create_task_group() as group:
                    if cut is not None:
                        group.start_soon(end_when_cut, cut)
                    parcels.append(await member.actor.call("run", plan))
                    group.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_END_SECONDS, shield=True), suppress(NodeLost):
                await member.actor.call("end", plan.name, cut=False)
            raise
        return parcels[0]

    # ------------------------------------------------------------------ what nodes send

    async def _hear(self, node: Member, news: News) -> None:
        for name, stage in news.heard:
            if name in self._flying:
                plan, observer = self._flying[name]
                observer.entered(plan, stage)
        self._order.heard(news.versions)
        if news.infra:
            self._infra[node] = news.infra
        await self._take_back_heard(node, news.withdrawals)

    async def _keep(self, plan: RolloutPlan, parcel: Parcel, observer: Observer) -> Attempt:
        record, samples = parcel.record, parcel.samples
        with anyio.CancelScope(shield=True):  # a finished rollout is not lost to a Ctrl-C that comes now
            async with self._storing:
                self._order.heard(parcel.versions)
                for version in record.versions:
                    self._order.seen(version)
                await self._store_versions()
                await anyio.to_thread.run_sync(self._write, parcel)
                withdrawal = self._withdrawn.pop(plan.name, None)
                if withdrawal is not None:
                    taken = await anyio.to_thread.run_sync(self.writer.withdraw, {plan.name}, withdrawal.failure)
                    self._taken_back += taken
                    record, samples = withdrawn(record, withdrawal.failure), []
                if self._infra:
                    borne = sum((Tally.from_json(each) for each in self._infra.values()), start=self._earlier)
                    await anyio.to_thread.run_sync(self.writer.store_infra, borne.to_json())
        observer.entered(plan, Stage.STORED)
        observer.stored(plan, record)
        return Attempt(plan=plan, record=record, samples=samples)

    def _write(self, parcel: Parcel) -> None:
        folder = self.writer.begin(parcel.record.rollout)
        unpack(parcel.files, folder)
        self.writer.store(parcel.record, folder, parcel.samples)

    async def _take_back_heard(self, node: Member, withdrawals: Sequence[Withdrawal]) -> None:
        """`withdrawals`: all of a node until now. Those that are new are carried out when this returns."""
        if len(withdrawals) <= node.taken_back:
            return
        with anyio.CancelScope(shield=True):
            async with self._storing:
                for withdrawal in withdrawals[node.taken_back :]:
                    await self._take_back(withdrawal)
                    node.taken_back += 1

    async def _take_back(self, withdrawal: Withdrawal) -> None:
        records = await anyio.to_thread.run_sync(self.writer.run.records)
        stored = {record.rollout for record in records}
        taken = await anyio.to_thread.run_sync(self.writer.withdraw, withdrawal.names, withdrawal.failure)
        self._taken_back += taken
        self._withdrawn |= dict.fromkeys(withdrawal.names - stored, withdrawal)

    async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> None:
        unproved = await self._nodes.prove(plan, earlier)
        if unproved is not None:
            with anyio.CancelScope(shield=True):
                async with self._storing:
                    await self._take_back(unproved)

    async def withdraw(self, names: Collection[str], failure: Failure) -> None:
        with anyio.CancelScope(shield=True):
            async with self._storing:
                await anyio.to_thread.run_sync(self.writer.withdraw, names, failure)

    @property
    def taken_back(self) -> Sequence[RolloutRecord]:
        return self._taken_back

    # ------------------------------------------------------------------ weights

    @property
    def versions(self) -> Sequence[str]:
        return self._order.versions

    async def _store_versions(self) -> None:
        versions = self._order.versions
        if versions != self._stored_versions:
            await anyio.to_thread.run_sync(self.writer.store_versions, versions)
            self._stored_versions = versions

    async def pause(self, mode: PauseMode) -> None:
        await self._nodes.pause(mode)

    async def resume(self, version: str | None) -> None:
        if version is not None:
            self._order.given(version)
        await self._nodes.resume(version)
        with anyio.CancelScope(shield=True):
            async with self._storing:
                await self._store_versions()

    async def load_weights(self, folder: Path, version: str) -> None:
        """The folder must be there on every node, also on one that comes later."""
        await self._nodes.load_weights(folder, version)
