"""`[run] executor = "ray"`: rollouts on the nodes of a Ray cluster, one writer of the run folder.

Each node has one actor with a gateway, sandboxes and an engine client of its own. The driver gives it rollouts, hears
of it at least every few seconds, and stores what it sends. A node that dies or falls silent loses its lease: its
rollouts are owed again and run elsewhere; whatever it may still send is nobody's.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import ConfigError, InfraError, RolloutCut, RollwrightError
from rollwright.gateway.gate import PauseMode
from rollwright.integrations.ray.node import Heard, Node
from rollwright.integrations.ray.parcel import Parcel, Withdrawal, unbegun, unpack
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, Observer, Places, Room, current_rollout
from rollwright.sandboxes.retry import Tally
from rollwright.store import RunWriter, withdrawn
from rollwright.types import Stage

__all__ = ["RayExecutor", "ray_executor"]

log = logging.getLogger(__name__)

_NEW_NODES_SECONDS = 3.0
_LEASES = 5
"""Nodes that may be lost under one rollout: it may be what kills them, and must not take the whole cluster down."""
_KILL_SECONDS = 30.0
_PATIENCE = 5
"""Leases that a node may take to open, or a cluster may be without one."""
_CONNECT_SECONDS = 10.0


class _Actor(Protocol):
    """A handle of a `Node` actor: each method's `remote` gives something to await."""

    ready: Any
    run: Any
    end: Any
    listen: Any
    pause: Any
    resume: Any
    load_weights: Any
    close: Any


@dataclass(slots=True, eq=False)
class _Member:
    """A node that has joined."""

    id: str
    actor: _Actor
    busy: int = 0
    lost: bool = False


@asynccontextmanager
async def ray_executor(
    config: RunConfig, places: Places, observer: Observer, open_writer: Callable[[], RunWriter]
) -> AsyncGenerator[RayExecutor]:
    """Connect to the cluster, open a node on each of its machines, then the run folder.

    Raises `ConfigError` for no Ray, no cluster and no node, and what the first node cannot open.
    """
    ray = _import_ray()
    own = not ray.is_initialized()
    if own:
        observer.preparing(f"Ray at {config.ray.address}")
        await _answers(config.ray.address)
        try:
            ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"ray.address: there is no Ray cluster at {config.ray.address}: {error}", field="ray.address"
            ) from error
    try:
        with plain_errors():
            async with anyio.create_task_group() as group:
                executor = RayExecutor(ray, config, places, group)
                try:
                    await executor.open(observer)
                    executor.writer = open_writer()
                    try:
                        yield executor
                    finally:
                        executor.writer.close()
                finally:
                    with anyio.CancelScope(shield=True):
                        await executor.close()
                group.cancel_scope.cancel()
    finally:
        if own:
            ray.shutdown()


class RayExecutor:
    """Rollouts on the nodes of a cluster. Made by `ray_executor`."""

    writer: RunWriter

    def __init__(self, ray: Any, config: RunConfig, places: Places, group: TaskGroup) -> None:
        self.room = Room(0)
        self._ray = ray
        self._config = config
        self._places = places
        self._group = group
        self._actor_class = ray.remote(Node)
        self._members: dict[str, _Member] = {}
        self._refused: dict[str, float] = {}
        """Nodes that could not be opened, or were lost, and when they may try again: a driver that stalls, or an actor
        that is killed for its memory, must not cost the run its nodes for good."""
        self._changed = anyio.Event()
        """Set, and made anew, when a node came, went or got a place free."""
        self._flying: dict[str, tuple[RolloutPlan, Observer]] = {}
        self._versions: list[str] = []
        self._infra: dict[str, Mapping[str, Any]] = {}
        self._withdrawn: dict[str, Withdrawal] = {}
        """By rollout, for those that are not stored yet."""
        self._paused: PauseMode | None = None
        self._weights: tuple[Path, str] | None = None
        """What `load_weights` was called with last: a node that comes later begins with older ones."""
        self._storing = anyio.Lock()

    # ------------------------------------------------------------------ nodes

    async def open(self, observer: Observer) -> None:
        """Open every node that is there; later ones join as they come. Raises what the first one raises when none
        opens."""
        ids = self._machines()
        if not ids:
            raise ConfigError("the Ray cluster has no node with a CPU to run rollouts on", field="ray.address")
        errors: list[RollwrightError] = []
        ready = 0

        async def one(node: str) -> None:
            nonlocal ready
            try:
                await self._join(node)
            except RollwrightError as error:
                errors.append(error)
            ready += 1
            observer.preparing(f"Ray nodes {ready}/{len(ids)}")

        async with anyio.create_task_group() as opening:
            for node in ids:
                opening.start_soon(one, node)
        if not self._members:
            raise errors[0] if errors else InfraError("the Ray cluster has no node any more")
        for error in errors:
            log.warning("a node is left out: %s", error.message)
        self._group.start_soon(self._welcome)
        self._group.start_soon(self._miss_nodes)

    async def close(self) -> None:
        async with anyio.create_task_group() as closing:
            for member in list(self._members.values()):
                closing.start_soon(self._dismiss, member)

    async def _dismiss(self, member: _Member) -> None:
        member.lost = True
        with anyio.move_on_after(_KILL_SECONDS):
            try:
                await member.actor.close.remote()
            except self._ray.exceptions.RayError as error:
                log.warning("node %s did not close: %s", member.id[:8], error)
        self._ray.kill(member.actor)

    def _machines(self) -> list[str]:
        """Ids of the nodes that are alive and may run something."""
        nodes: list[dict[str, Any]] = self._ray.nodes()
        return sorted(node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0)

    async def _welcome(self) -> None:
        """Open nodes as they come."""
        joining: set[str] = set()

        async def join(node: str) -> None:
            try:
                with anyio.fail_after(_PATIENCE * self._config.ray.lease_seconds):
                    await self._join(node)
            except TimeoutError:
                self._refuse(node, leases=_PATIENCE)
                log.warning("node %s does not open", node[:8])
            except RollwrightError as error:
                log.warning("a node is left out: %s", error.message)
            finally:
                joining.discard(node)

        async with anyio.create_task_group() as opening:
            while True:
                await anyio.sleep(_NEW_NODES_SECONDS)
                for node in await anyio.to_thread.run_sync(self._machines):
                    waits = self._refused.get(node, 0) > anyio.current_time()
                    if node not in self._members and node not in joining and not waits:
                        joining.add(node)
                        opening.start_soon(join, node)

    def _refuse(self, node: str, *, leases: int) -> None:
        self._refused[node] = anyio.current_time() + leases * self._config.ray.lease_seconds

    async def _join(self, node: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = self._actor_class.options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=10_000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        actor = cast("_Actor", options.remote(self._config.dump(), str(self._config.base), self._places))
        try:
            await actor.ready.remote()
            await self._catch_up(actor)
        except self._ray.exceptions.RayTaskError as error:
            self._refuse(node, leases=_PATIENCE)
            self._ray.kill(actor)
            cause = error.cause
            raise cause if isinstance(cause, RollwrightError) else InfraError(f"node {node[:8]}: {cause}") from error
        except self._ray.exceptions.RayError as error:
            self._refuse(node, leases=1)
            raise InfraError(f"node {node[:8]} went away: {error}") from error
        member = self._members[node] = _Member(node, actor)
        self._resize()
        self._group.start_soon(self._follow, member)

    async def _catch_up(self, actor: _Actor) -> None:
        """Tell a new node what the others were told before it came, and while it is told."""
        weights, paused = None, None
        while (weights, paused) != (self._weights, self._paused):
            before, (weights, paused) = (weights, paused), (self._weights, self._paused)
            if paused is not None:
                await actor.pause.remote(paused)
            if weights is not None and weights != before[0]:
                await actor.load_weights.remote(*weights)
            if paused is None:
                await actor.resume.remote(None)

    def _lose(self, member: _Member, why: str) -> None:
        if member.lost:
            return
        log.warning("node %s is lost (%s): its %d rollouts are owed again", member.id[:8], why, member.busy)
        member.lost = True
        self._refuse(member.id, leases=1)
        del self._members[member.id]
        self._resize()
        self._ray.kill(member.actor)  # what hangs on it ends, and a node that comes back does nothing more

    def _resize(self) -> None:
        self.room.resize(len(self._members) * self._config.run.concurrency)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _follow(self, member: _Member) -> None:
        """Hear of a node, until it is lost."""
        lease = self._config.ray.lease_seconds
        while not member.lost:
            try:
                with anyio.fail_after(lease):
                    news = await member.actor.listen.remote(lease / 4)
            except (TimeoutError, self._ray.exceptions.RayError) as error:
                self._lose(member, "nothing was heard of it" if isinstance(error, TimeoutError) else "its process died")
                return
            self._hear(news.heard)
            self._versions += [version for version in news.versions if version not in self._versions]
            if news.infra and news.infra != self._infra.get(member.id):
                self._infra[member.id] = news.infra
            for withdrawal in news.withdrawals:
                await self._withdraw(withdrawal)

    def _hear(self, heard: Sequence[Heard]) -> None:
        for name, what in heard:
            plan, observer = self._flying.get(name, (None, None))
            if plan is not None and observer is not None and isinstance(what, Stage):
                observer.entered(plan, what)

    # ------------------------------------------------------------------ rollouts

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
        """Its end; None when its node was lost."""
        member = await self._free_member()
        member.busy += 1
        try:
            return await self._on(member, plan, cut)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            self._lose(member, f"its process died: {type(error).__name__}")
            return None
        finally:
            member.busy -= 1
            self._tell()

    async def _on(self, member: _Member, plan: RolloutPlan, cut: anyio.Event | None) -> Parcel:
        async def end_when_cut(cut: anyio.Event) -> None:
            await cut.wait()
            await member.actor.end.remote(plan.name, cut=True)

        parcels: list[Parcel] = []
        ref = member.actor.run.remote(plan)
        try:
            with plain_errors():
                async with anyio.create_task_group() as group:
                    if cut is not None:
                        group.start_soon(end_when_cut, cut)
                    parcels.append(await ref)
                    group.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_KILL_SECONDS, shield=True):
                await self._quietly(member.actor.end.remote(plan.name, cut=False))
            raise
        return parcels[0]

    async def _quietly(self, call: Awaitable[Any]) -> None:
        """A node that is gone has nothing left to end."""
        try:
            await call
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            log.info("a node did not answer: %s", error)

    async def _free_member(self) -> _Member:
        """The node with the fewest rollouts, when it has a place."""
        while True:
            free = [m for m in self._members.values() if m.busy < self._config.run.concurrency]
            if free:
                return min(free, key=lambda member: member.busy)
            await self._changed.wait()

    async def _miss_nodes(self) -> None:
        """Raises `InfraError` when no node is left for long: rollouts may wait for a place without a node, too."""
        patience = _PATIENCE * self._config.ray.lease_seconds
        while True:
            with anyio.move_on_after(None if self._members else patience) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                raise InfraError(f"the Ray cluster has had no node for {patience:g} s")

    async def _keep(self, plan: RolloutPlan, parcel: Parcel, observer: Observer) -> Attempt:
        record, samples = parcel.record, parcel.samples
        with anyio.CancelScope(shield=True):  # a finished rollout is not lost to a Ctrl-C that comes now
            async with self._storing:
                await anyio.to_thread.run_sync(self._write, parcel)
                withdrawal = self._withdrawn.pop(plan.name, None)
                if withdrawal is not None:
                    await anyio.to_thread.run_sync(self.writer.withdraw, {plan.name}, withdrawal.failure)
                    record, samples = withdrawn(record, withdrawal.failure), []
                if self._infra:
                    borne = sum((Tally.from_json(each) for each in self._infra.values()), start=Tally())
                    await anyio.to_thread.run_sync(self.writer.store_infra, borne.to_json())
        observer.entered(plan, Stage.STORED)
        observer.stored(plan, record)
        return Attempt(plan=plan, record=record, samples=samples)

    def _write(self, parcel: Parcel) -> None:
        folder = self.writer.begin(parcel.record.rollout)
        unpack(parcel.files, folder)
        self.writer.store(parcel.record, folder, parcel.samples)

    async def _withdraw(self, withdrawal: Withdrawal) -> None:
        async with self._storing:
            records = await anyio.to_thread.run_sync(self.writer.run.records)
            stored = {record.rollout for record in records}
            await anyio.to_thread.run_sync(self.writer.withdraw, withdrawal.names & stored, withdrawal.failure)
            self._withdrawn |= dict.fromkeys(withdrawal.names - stored, withdrawal)

    # ------------------------------------------------------------------ weights

    @property
    def versions(self) -> Sequence[str]:
        return self._versions

    async def pause(self, mode: PauseMode) -> None:
        self._paused = mode
        await self._on_all("pause", mode)

    async def resume(self, version: str | None) -> None:
        self._paused = None
        if version is not None and version not in self._versions:
            self._versions.append(version)
        await self._on_all("resume", version)

    async def load_weights(self, folder: Path, version: str) -> None:
        """The folder must be there on every node, also on one that comes later."""
        before, self._weights = self._weights, (folder, version)
        try:
            await self._on_all("load_weights", folder, version)
        except BaseException:
            self._weights = before
            raise

    async def _on_all(self, method: Literal["pause", "resume", "load_weights"], *arguments: Any) -> None:
        async with anyio.create_task_group() as calls:
            for member in list(self._members.values()):
                calls.start_soon(self._told, member, getattr(member.actor, method).remote(*arguments))

    async def _told(self, member: _Member, call: Awaitable[Any]) -> None:
        """A node that may not have heard it must not go on: it has other weights than the rest, or waits for ever."""
        try:
            await call
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            self._lose(member, f"it did not hear of the weights: {type(error).__name__}")


async def _answers(address: str) -> None:
    """Ray itself would try for minutes. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # `auto`, `local`, a client's URL
    try:
        with anyio.fail_after(_CONNECT_SECONDS):
            stream = await anyio.connect_tcp(host, int(port))
        await stream.aclose()
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"ray.address: there is no Ray cluster at {address}: {error}", field="ray.address") from error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "run.executor = 'ray' needs Ray: pip install 'rollwright[ray]'", field="run.executor"
        ) from error
    return ray
