"""The nodes of a Ray cluster that a run works on: who joins, who is heard of, who is lost, and what all are told."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from rollwright.config import RunConfig
from rollwright.errors import ConfigError, InfraError, RollwrightError
from rollwright.gateway.gate import PauseMode
from rollwright.integrations.ray.cluster import Actor, Cluster, NodeLost
from rollwright.integrations.ray.node import News
from rollwright.integrations.ray.parcel import Withdrawal
from rollwright.rollout import RolloutPlan, failure_of
from rollwright.run import Observer, Places, Room
from rollwright.sandboxes import Provider, Sweeps
from rollwright.types import Stage

__all__ = ["Member", "Nodes"]

log = logging.getLogger(__name__)

_LEFT_OUT = "node %s is left out: %s"
_MAY_STAY = "boxes of lost nodes may stay until their leases end: %s"
_NEW_NODES_SECONDS = 3.0
_CLOSE_SECONDS = 30.0
_PATIENCE = 5
"""Leases that a node may take to open, or a cluster may be without one."""
_CONTROLS = 5
"""Nodes that may be lost under the control of one group: it may be what kills them."""


@dataclass(slots=True, eq=False)
class Member:
    """A node that has joined, or is about to."""

    id: str
    address: str
    actor: Actor
    maker: str = ""
    """Names the boxes it makes (`Sweeps`); empty where they end with it."""
    busy: int = 0
    lost: bool = False
    graded: set[str] = field(default_factory=set[str])
    """Rollouts whose image it controls: those graded on it, and those it was asked to judge."""
    taken_back: int = 0
    """How many of its withdrawals were carried out."""


class Nodes:
    """`room` has `run.concurrency` places for each node that is in.

    `hear` is given the news of a node. `provider` reaches the nodes' boxes, where that can be done from
    here. What goes on in the background does so in `group`.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: RunConfig,
        places: Places,
        provider: Provider,
        group: TaskGroup,
        *,
        hear: Callable[[Member, News], Awaitable[None]],
    ) -> None:
        self.room = Room(0)
        self._cluster = cluster
        self._config = config
        self._places = places
        self._provider = provider
        self._group = group
        self._hear = hear
        self._members: dict[str, Member] = {}
        self._refused: dict[str, float] = {}
        """Nodes that could not be opened, or were lost, and when they may try again: a driver that stalls, or an actor
        that is killed for its memory, must not cost the run its nodes for good."""
        self._left: list[str] = []
        """Makers whose boxes may still be there."""
        self._changed = anyio.Event()
        """Set, and made anew, when a node came, went or got a place free."""
        self._paused: PauseMode | None = None
        self._weights: tuple[Path, str] | None = None
        """What `load_weights` was called with last: a node that comes later begins with older ones."""

    async def open(self, observer: Observer) -> None:
        """Open every node that is there; later ones join as they come. Raises `ConfigError` when there is none, and
        what the first one raises when none opens."""
        nodes = self._cluster.nodes()
        if not nodes:
            raise ConfigError("the Ray cluster has no node with a CPU to run rollouts on", field="ray.address")
        errors: dict[str, RollwrightError] = {}
        ready = 0

        async def one(node: str, address: str) -> None:
            nonlocal ready
            try:
                await self._join(node, address)
            except RollwrightError as error:
                errors[address] = error
            ready += 1
            observer.preparing(f"Ray nodes {ready}/{len(nodes)}")

        async with anyio.create_task_group() as opening:
            for node, address in nodes.items():
                opening.start_soon(one, node, address)
        if not self._members:
            raise next(iter(errors.values()), InfraError("the Ray cluster has no node any more"))
        for address, error in errors.items():
            log.warning(_LEFT_OUT, address, error.message)
        self._group.start_soon(self._welcome)
        self._group.start_soon(self._miss_nodes)

    async def close(self) -> None:
        """End everything on every node, and what lost ones have left."""
        async with anyio.create_task_group() as closing:
            for member in list(self._members.values()):
                closing.start_soon(self._dismiss, member)
        with anyio.move_on_after(_CLOSE_SECONDS) as sweeping:
            for maker in self._left:
                await self._sweep(maker)
        if sweeping.cancelled_caught:
            log.warning(_MAY_STAY, f"nobody answered within {_CLOSE_SECONDS:g} s")

    async def _dismiss(self, member: Member) -> None:
        member.lost = True
        closed = False
        try:
            with anyio.move_on_after(_CLOSE_SECONDS), suppress(NodeLost):
                closed = await member.actor.call("close")
        finally:
            member.actor.kill()
        if not closed:
            log.warning("node %s did not close", member.address)
            self._left.append(member.maker)

    @asynccontextmanager
    async def place(self, cut: anyio.Event | None) -> AsyncGenerator[Member | None]:
        """A place on the node with the fewest rollouts, as soon as there is one; None when `cut` was set before."""

        async def stop_waiting(cut: anyio.Event) -> None:
            await cut.wait()
            waiting.cancel_scope.cancel()

        member: Member | None = None
        try:
            async with anyio.create_task_group() as waiting:
                if cut is not None:
                    waiting.start_soon(stop_waiting, cut)
                member = await self._take_place()
                waiting.cancel_scope.cancel()
            yield member
        finally:
            if member is not None:
                member.busy -= 1
                self._tell_waiting()

    async def _take_place(self) -> Member:
        while not (free := [m for m in self._members.values() if m.busy < self._config.run.concurrency]):
            await self._changed.wait()
        member = min(free, key=lambda member: member.busy)
        member.busy += 1
        return member

    # ------------------------------------------------------------------ joining

    async def _welcome(self) -> None:
        """Open nodes as they come."""
        joining: set[str] = set()

        async def join(node: str, address: str) -> None:
            try:
                with anyio.fail_after(_PATIENCE * self._config.ray.lease_seconds):
                    await self._join(node, address)
            except RollwrightError as error:
                log.warning(_LEFT_OUT, address, error.message)
            except TimeoutError:
                self._refuse(node, leases=_PATIENCE)
                log.warning("node %s does not open", address)
            finally:
                joining.discard(node)

        async with anyio.create_task_group() as opening:
            while True:
                await anyio.sleep(_NEW_NODES_SECONDS)
                for node, address in (await anyio.to_thread.run_sync(self._cluster.nodes)).items():
                    waits = self._refused.get(node, 0) > anyio.current_time()
                    if node not in self._members and node not in joining and not waits:
                        joining.add(node)
                        opening.start_soon(join, node, address)

    def _refuse(self, node: str, *, leases: int) -> None:
        self._refused[node] = anyio.current_time() + leases * self._config.ray.lease_seconds

    async def _join(self, node: str, address: str) -> None:
        """Raises `RollwrightError`: what it cannot open, or that it went away."""
        actor = self._cluster.actor_on(node, self._config.dump(), str(self._config.base), self._places)
        member = Member(node, address, actor)
        try:
            await self._make_ready(member)
        except RollwrightError:
            actor.kill()
            raise
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._dismiss(member)
            raise
        self._members[node] = member
        self._resize()
        self._group.start_soon(self._follow, member)

    async def _make_ready(self, member: Member) -> None:
        try:
            member.maker = await member.actor.call("ready")
            await self._catch_up(member)
        except NodeLost as error:
            self._refuse(member.id, leases=1)
            raise InfraError(f"the node went away: {error}") from error
        except RollwrightError:
            self._refuse(member.id, leases=_PATIENCE)
            raise
        except Exception as error:  # another Python or other packages there: anything may come of it
            self._refuse(member.id, leases=_PATIENCE)
            raise InfraError(f"the node cannot be opened: {type(error).__name__}: {error}") from error

    async def _catch_up(self, member: Member) -> None:
        """Tell a new node what the others were told before it came, and while it is told."""
        weights, paused = None, None
        while (weights, paused) != (self._weights, self._paused):
            before, (weights, paused) = (weights, paused), (self._weights, self._paused)
            if paused is not None:
                await member.actor.call("pause", paused)
            if weights is not None and weights != before[0]:
                await member.actor.call("load_weights", *weights)
            if paused is None:
                await member.actor.call("resume", None)

    # ------------------------------------------------------------------ hearing and losing

    async def _follow(self, member: Member) -> None:
        """Hear of a node, until it is lost."""
        lease = self._config.ray.lease_seconds
        while not member.lost:
            try:
                with anyio.fail_after(lease):
                    news = await member.actor.call("listen", lease / 4)
            except TimeoutError:
                self.lose(member, "nothing was heard of it")
                return
            except NodeLost as error:
                self.lose(member, str(error))
                return
            await self._hear(member, news)

    async def hear_all(self) -> None:
        """The news of every node until now. One that does not answer is left out."""

        async def one(member: Member) -> None:
            try:
                with anyio.fail_after(min(self._config.ray.lease_seconds, _CLOSE_SECONDS)):
                    news = await member.actor.call("listen", 0.0)
            except (TimeoutError, NodeLost) as error:
                log.warning("node %s has not said what its controls took back last: %s", member.address, error)
                return
            await self._hear(member, news)

        async with anyio.create_task_group() as hearing:
            for member in list(self._members.values()):
                hearing.start_soon(one, member)

    def lose(self, member: Member, why: str) -> None:
        """It is out: what it has is owed again, whatever it still does is nobody's."""
        if member.lost:
            return
        first_line = why.partition("\n")[0]
        log.warning("node %s is lost (%s): its %d rollouts are owed again", member.address, first_line, member.busy)
        member.lost = True
        self._refuse(member.id, leases=1)
        del self._members[member.id]
        self._resize()
        member.actor.kill()  # what hangs on it ends, and a node that comes back does nothing more
        self._left.append(member.maker)
        self._group.start_soon(self._sweep_twice, member.maker)

    async def _sweep_twice(self, maker: str) -> None:
        """What a node asked for when it died may only come into being after it."""
        await self._sweep(maker)
        await anyio.sleep(self._config.ray.lease_seconds)
        await self._sweep(maker)

    async def _sweep(self, maker: str) -> None:
        if maker and isinstance(self._provider, Sweeps):
            try:
                for box in await self._provider.sweep(maker):
                    log.info("removed box %s, which a lost node had left", box)
            except RollwrightError as error:
                log.warning(_MAY_STAY, error.message)

    def _resize(self) -> None:
        self.room.resize(len(self._members) * self._config.run.concurrency)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _miss_nodes(self) -> None:
        """Raises `InfraError` when no node is left for long: rollouts may wait for a place without a node, too."""
        patience = _PATIENCE * self._config.ray.lease_seconds
        while True:
            with anyio.move_on_after(None if self._members else patience) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                raise InfraError(f"the Ray cluster has had no node for {patience:g} s")

    async def prove(self, plan: RolloutPlan, names: Collection[str]) -> Withdrawal | None:
        """`Executor.prove` on all nodes that are there, each for its own rollouts. What was graded on none of them, or
        on one that is lost meanwhile, another one judges. Returns those of `names` that nobody could."""
        answered: list[Member] = []

        async def ask(member: Member, strays: Collection[str]) -> None:
            try:
                news = await member.actor.call("prove", plan, sorted(strays))
            except NodeLost as error:
                self.lose(member, str(error))
                return
            await self._hear(member, news)
            member.graded.update(strays)
            answered.append(member)

        members = list(self._members.values())
        strays = set(names).difference(*(member.graded for member in members))
        async with anyio.create_task_group() as proving:
            for place, member in enumerate(members):
                proving.start_soon(ask, member, () if place else strays)
        for _ in range(_CONTROLS):
            strays = set(names).difference(*(member.graded for member in answered))
            if not strays:
                return None
            while not self._members:
                await self._changed.wait()
            await ask(next(iter(self._members.values())), strays)
        strays = set(names).difference(*(member.graded for member in answered))
        if not strays:
            return None
        error = InfraError(f"its node was lost, and {_CONTROLS} others under the control of its image")
        return Withdrawal(names=frozenset(strays), failure=failure_of(error, Stage.GRADED))

    # ------------------------------------------------------------------ weights

    async def pause(self, mode: PauseMode) -> None:
        self._paused = mode
        await self._tell_all("pause", mode)

    async def resume(self, version: str | None) -> None:
        self._paused = None
        await self._tell_all("resume", version)

    async def load_weights(self, folder: Path, version: str) -> None:
        """The folder must be there on every node, also on one that comes later. Raises what the nodes raise when all
        do: then they go on with what they have. One that fails where others do not is lost."""
        before, self._weights = self._weights, (folder, version)
        try:
            await self._tell_all("load_weights", folder, version)
        except BaseException:
            self._weights = before
            raise

    async def _tell_all(self, method: Literal["pause", "resume", "load_weights"], *arguments: Any) -> None:
        """A node that may not have heard it must not go on: it has other weights than the rest, or waits for ever."""
        members = list(self._members.values())
        failed: list[tuple[Member, RollwrightError]] = []

        async def tell(member: Member) -> None:
            try:
                await member.actor.call(method, *arguments)
            except NodeLost as error:
                self.lose(member, f"it did not hear of the weights: {error}")
            except RollwrightError as error:
                failed.append((member, error))

        async with anyio.create_task_group() as calls:
            for member in members:
                calls.start_soon(tell, member)
        if failed and all(member.lost or any(member is each for each, _ in failed) for member in members):
            raise failed[0][1]
        for member, error in failed:
            self.lose(member, f"it cannot {method.replace('_', ' ')} as the others did: {error.message}")
