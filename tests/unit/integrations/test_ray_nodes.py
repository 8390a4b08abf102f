"""What the driver tells the nodes of a Ray cluster reaches all of them, also those that come or go just then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import ConfigError, InfraError, RolloutCut
from rollwright.integrations.ray.cluster import Cluster
from rollwright.integrations.ray.executor import RayExecutor
from rollwright.integrations.ray.node import Cancelled, News, _end, _Open, _run, node_settings
from rollwright.integrations.ray.nodes import Member, Nodes
from rollwright.integrations.ray.parcel import NodeStore, Withdrawal
from rollwright.rollout import RolloutPlan, not_started
from rollwright.run import Attempt, Places, Silent
from rollwright.sandboxes import Provider
from rollwright.sandboxes.retry import Tally
from rollwright.store import RunDir, RunWriter
from rollwright.testing.scripted_executor import plain_task, scripted_attempt
from rollwright.types import Failure, Stage
from support.scripted_provider import Script

errors = pytest.importorskip("ray.exceptions", reason="needs the ray extra")

pytestmark = pytest.mark.anyio

DATA: dict[str, Any] = {
    "run": {"concurrency": 2},
    "tasks": {"path": "rows.jsonl"},
    "policy": {"path": "policy"},
    "sandbox": {"namespaces": {"survive": 600}, "e2b": {"survive": 600, "size": "small"}},
}


BROKEN = Failure(stage=Stage.GRADED, error="ImageQuarantined", message="broken", fault="infra", retryable=False)


@dataclass
class Method:
    """A method of an actor, as Ray has it."""

    function: Callable[..., Any]

    def remote(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@dataclass
class Actor:
    """A node that only keeps what it is told."""

    opens: anyio.Event = field(default_factory=anyio.Event)
    hears: anyio.Event = field(default_factory=anyio.Event)
    deaf: bool = False
    refuses: str = ""
    """A call that it has its reasons not to do."""
    dies: bool = False
    """With the first rollout."""
    infra: dict[str, Any] = field(default_factory=dict)
    """Told when it is first listened to."""
    closes: bool = False
    maker: str = ""
    convicts: frozenset[str] | None = None
    """What a control takes back; None: it dies of it."""
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Method:
        async def call(*arguments: Any) -> Any:
            if name == "ready":
                await self.opens.wait()
                return self.maker
            if name == "close":
                return self.closes
            if name == "run" and self.dies:
                raise errors.ActorDiedError()
            elif name == "prove":
                self.told.append((name, *arguments))
                if self.convicts is None:
                    raise errors.ActorDiedError()
                return [Withdrawal(names=self.convicts, failure=BROKEN)] if self.convicts else []
            if name == "listen":
                if not self.infra:
                    await anyio.sleep_forever()
                infra, self.infra = self.infra, {}
                return News(heard=[], withdrawals=[], infra=infra, versions=[])
            if name == self.refuses:
                raise errors.RayTaskError(name, "", ConfigError(f"there is no {arguments[0]} here"))
            if name in ("pause", "resume", "load_weights"):
                if self.deaf:
                    raise errors.ActorUnavailableError("no answer", b"0" * 16)
                self.told.append((name, *arguments))
                await self.hears.wait()
            return None

        return Method(call)


class Module:
    """As much of the module `ray` as the driver uses."""

    exceptions = errors

    def __init__(self, *actors: Actor) -> None:
        self.actors = list(actors)
        self.killed: list[Actor] = []
        self._left = list(actors)

    def nodes(self) -> list[dict[str, Any]]:
        alive = {"Alive": True, "Resources": {"CPU": 1}, "NodeManagerAddress": "192.0.2.1"}
        return [{"NodeID": f"{i:056x}", **alive} for i in range(len(self.actors))]

    def remote(self, cls: type) -> Any:
        return self

    def options(self, **_: Any) -> Method:
        return Method(lambda *_: self._left.pop(0))

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


def driver_of(
    cluster: Module,
    folder: Path,
    group: anyio.abc.TaskGroup,
    *,
    lease_seconds: float = 60,
    provider: Provider | None = None,
) -> RayExecutor:
    config = RunConfig.resolve(DATA | {"ray": {"lease_seconds": lease_seconds}}, base=folder, where="run.toml")
    return RayExecutor(Cluster(cluster), config, Places(cache=folder, state=folder), provider or Script(), group)


def state_of(actor: Actor) -> tuple[Any, bool]:
    """Its weights, and whether it is paused."""
    weights, paused = None, False
    for name, *arguments in actor.told:
        if name == "load_weights":
            weights = arguments[1]
        else:
            paused = name == "pause"
    return weights, paused


async def test_a_node_that_comes_while_weights_change_has_them_and_is_not_left_paused(tmp_path: Path) -> None:
    first, late = Actor(), Actor()
    first.opens.set()
    first.hears.set()
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(first, late), tmp_path, group)
        group.start_soon(driver.open, Silent())
        await anyio.wait_all_tasks_blocked()
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        await driver.pause("abort")
        await driver.load_weights(tmp_path, "v1")
        late.opens.set()
        await anyio.wait_all_tasks_blocked()
        assert late.told == [("pause", "abort")], "it hears of the pause while it joins"
        await driver.resume("v1")
        late.hears.set()
        await anyio.wait_all_tasks_blocked()
        assert driver.room.places == 4
        assert driver.versions == RunDir(tmp_path / "run").versions() == ["v1"]
        driver.writer.close()
        assert state_of(first) == state_of(late) == ("v1", False)
        group.cancel_scope.cancel()


async def test_a_node_that_does_not_hear_of_new_weights_is_lost(tmp_path: Path) -> None:
    good, deaf = Actor(), Actor(deaf=True)
    for actor in (good, deaf):
        actor.opens.set()
        actor.hears.set()
    cluster = Module(good, deaf)
    async with anyio.create_task_group() as group:
        driver = driver_of(cluster, tmp_path, group)
        await driver.open(Silent())
        assert driver.room.places == 4
        await driver.load_weights(tmp_path, "v1")
        assert (driver.room.places, cluster.killed) == (2, [deaf])
        group.cancel_scope.cancel()


async def test_a_node_that_cannot_take_the_new_weights_is_lost_and_the_others_have_them(tmp_path: Path) -> None:
    good, bad = Actor(), Actor(refuses="load_weights")
    for actor in (good, bad):
        actor.opens.set()
        actor.hears.set()
    cluster = Module(good, bad)
    async with anyio.create_task_group() as group:
        driver = driver_of(cluster, tmp_path, group)
        await driver.open(Silent())
        await driver.load_weights(tmp_path, "v1")
        assert (driver.room.places, cluster.killed) == (2, [bad])
        assert ("load_weights", tmp_path, "v1") in good.told
        group.cancel_scope.cancel()


async def test_weights_that_no_node_can_take_are_the_trainers_error_and_lose_none(tmp_path: Path) -> None:
    actors = [Actor(refuses="load_weights"), Actor(refuses="load_weights")]
    for actor in actors:
        actor.opens.set()
        actor.hears.set()
    cluster = Module(*actors)
    async with anyio.create_task_group() as group:
        driver = driver_of(cluster, tmp_path, group)
        await driver.open(Silent())
        with pytest.raises(ConfigError, match="there is no"):
            await driver.load_weights(tmp_path, "v1")
        assert (driver.room.places, cluster.killed, driver.versions) == (4, [], [])
        group.cancel_scope.cancel()


@dataclass
class Reaching(Script):
    """A provider whose boxes elsewhere can be removed from here."""

    maker: str = ""
    swept: list[str] = field(default_factory=list)

    async def sweep(self, maker: str) -> list[str]:
        self.swept.append(maker)
        return [f"box of {maker}"]


async def test_what_lost_nodes_and_those_that_do_not_close_leave_elsewhere_is_removed(tmp_path: Path) -> None:
    lost, stuck, closed = Actor(maker="lost", deaf=True), Actor(maker="stuck"), Actor(maker="closed", closes=True)
    for actor in (lost, stuck, closed):
        actor.opens.set()
        actor.hears.set()
    provider = Reaching()
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(lost, stuck, closed), tmp_path, group, provider=provider)
        await driver.open(Silent())
        await driver.pause("abort")
        await anyio.wait_all_tasks_blocked()
        assert provider.swept == ["lost"]
        await driver.close()
        assert provider.swept == ["lost", "lost", "stuck"], "what it had just asked for may have come since"
        group.cancel_scope.cancel()


async def test_what_kills_node_after_node_ends_ungraded_and_leaves_the_rest(tmp_path: Path) -> None:
    actors = [Actor(dies=True) for _ in range(7)]
    for actor in actors:
        actor.opens.set()
    cluster = Module(*actors)
    plan = RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=1)
    async with anyio.create_task_group() as group:
        driver = driver_of(cluster, tmp_path, group)
        await driver.open(Silent())
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        attempt = await driver.run(plan, Silent())
        assert attempt.record.failure is not None
        assert "5 nodes were lost" in attempt.record.failure.message
        assert len(cluster.killed) == 5
        assert driver.writer.run.records() == [attempt.record]
        driver.writer.close()
        group.cancel_scope.cancel()


async def test_a_control_is_asked_for_on_every_node_and_its_verdict_is_there_when_it_has_been(tmp_path: Path) -> None:
    nodes = [Actor(convicts=names) for names in (frozenset(["a.1", "a.9"]), frozenset[str](), None)]
    for actor in nodes:
        actor.opens.set()
        actor.hears.set()
    plan = RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=1)
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={})
    attempt = scripted_attempt(plan, reward=1.0)
    writer.store(attempt.record, writer.begin("a.1"), list(attempt.samples))
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(*nodes), tmp_path, group)
        await driver.open(Silent())
        driver.write_into(writer)
        await driver.prove(plan, ["a.0"])
        assert [record.rollout for record in driver.taken_back] == ["a.1"]
        assert [record.failure for record in writer.run.records()] == [BROKEN]
        asked = [told for actor in nodes for told in actor.told if told[0] == "prove"]
        assert [names for *_, names in asked].count(["a.0"]) == 1, "what nobody of now has graded is judged once"
        assert len(asked) == 3
        assert driver.room.places == 4, "one has died of it"
        writer.close()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("steps", range(8))
async def test_who_is_cancelled_just_when_it_gets_a_place_gives_it_back(tmp_path: Path, steps: int) -> None:
    actor = Actor()
    actor.opens.set()
    config = RunConfig.resolve(DATA, base=tmp_path, where="run.toml")

    async def hear(member: Member, news: News) -> None:
        pytest.fail(f"{member} says {news}")

    async with anyio.create_task_group() as group:
        places = Places(cache=tmp_path, state=tmp_path)
        nodes = Nodes(Cluster(Module(actor)), config, places, Script(), group, hear=hear)
        await nodes.open(Silent())

        async def want() -> None:
            async with nodes.place(anyio.Event()):
                await anyio.sleep_forever()

        async with anyio.create_task_group() as wanting:
            wanting.start_soon(want)
            for _ in range(steps):
                await anyio.lowlevel.cancel_shielded_checkpoint()
            wanting.cancel_scope.cancel()
        async with nodes.place(None) as member:
            assert member is not None
            assert member.busy == 1
        group.cancel_scope.cancel()


async def test_a_cluster_without_nodes_ends_the_run_even_if_nothing_was_running(tmp_path: Path) -> None:
    """Who waits for a place would wait for ever."""
    only = Actor(deaf=True)
    only.opens.set()

    async def wait_for_a_place() -> None:
        with plain_errors():
            async with anyio.create_task_group() as group:
                driver = driver_of(Module(only), tmp_path, group, lease_seconds=0.1)
                await driver.open(Silent())
                await driver.pause("abort")  # it does not hear of it, and is lost
                await driver.room.acquire()

    with pytest.raises(InfraError, match="no node"):
        await wait_for_a_place()


async def test_what_is_cut_before_it_begins_waits_for_no_node(tmp_path: Path) -> None:
    cut = anyio.Event()
    cut.set()
    plan = RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=1)
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(), tmp_path, group)
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        attempt = await driver.run(plan, Silent(), cut=cut)
        assert attempt.record.failure is not None
        assert attempt.record.failure.error == "RolloutCut"
        assert RunDir(tmp_path / "run").rollout("a.1").verdict.exists()
        driver.writer.close()
        group.cancel_scope.cancel()


async def test_what_failed_beneath_the_rollouts_is_counted_over_nodes_and_processes(tmp_path: Path) -> None:
    once = Tally(failures={("boot", "Unreachable"): 1}).to_json()
    nodes = [Actor(infra=once), Actor(infra=once)]
    for node in nodes:
        node.opens.set()
    cut = anyio.Event()
    cut.set()
    plan = RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=1)
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(*nodes), tmp_path, group)
        await driver.open(Silent())
        writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={})
        writer.store_infra(once)
        driver.write_into(writer)
        await anyio.wait_all_tasks_blocked()
        await driver.run(plan, Silent(), cut=cut)
        assert Tally.from_json(writer.infra()).failures == {("boot", "Unreachable"): 3}
        writer.close()
        group.cancel_scope.cancel()


async def test_what_is_cut_while_it_waits_for_a_node_ends_at_once(tmp_path: Path) -> None:
    cut = anyio.Event()
    plan = RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=1)
    ended: list[Attempt] = []
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(), tmp_path, group)
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))

        async def run() -> None:
            ended.append(await driver.run(plan, Silent(), cut=cut))

        async with anyio.create_task_group() as running:
            running.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            assert ended == []
            cut.set()
        failure = ended[0].record.failure
        assert failure is not None
        assert failure.error == "RolloutCut"
        driver.writer.close()


class Cuttable:
    """Runs until it is cut."""

    def __init__(self, store: NodeStore) -> None:
        self.store = store
        self.begun: list[str] = []

    async def run(self, plan: RolloutPlan, observer: Any, *, cut: anyio.Event) -> None:
        self.begun.append(plan.name)
        await cut.wait()
        finished = not_started(plan, self.store.begin(plan.name), RolloutCut("cut"))
        self.store.store(finished.record, finished.folder, finished.samples)


async def test_an_end_that_overtakes_its_rollout_is_not_lost(tmp_path: Path) -> None:
    """Ray carries out the calls of an actor in any order: a large plan is still on its way when its end is there."""
    store = NodeStore(tmp_path)
    executor: Any = Cuttable(store)
    node = _Open(executor=executor, store=store)
    cut, cancelled = (
        RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=attempt) for attempt in (1, 2)
    )
    await _end(node, cut.name, True)
    await _end(node, cancelled.name, False)
    failure = (await _run(node, cut)).record.failure
    assert failure is not None
    assert failure.error == "RolloutCut"
    with pytest.raises(Cancelled):
        await _run(node, cancelled)
    assert executor.begun == [cut.name]
    assert node.early == {}


def test_a_nodes_boxes_end_with_it(tmp_path: Path) -> None:
    config = RunConfig.resolve(DATA, base=tmp_path, where="run.toml")
    on_node = node_settings(config.dump(), tmp_path).sandbox
    for kind in ("namespaces", "e2b"):
        assert config.sandbox.options[kind]["survive"] == 600
        assert on_node.options[kind]["survive"] == 0
    assert on_node.options["e2b"]["size"] == "small"
