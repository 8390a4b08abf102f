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
from rollwright.integrations.ray.parcel import NodeStore, Parcel, Withdrawal
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
    grades: Path | None = None
    """Where it keeps rollouts, all of which it grades."""
    ended: dict[str, tuple[frozenset[str], tuple[str, ...]]] = field(default_factory=dict)
    """What its controls take back with the end of a rollout, and what it knows of the weights then."""
    withdrawals: list[Withdrawal] = field(default_factory=list)
    """So far."""
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
            elif name == "run" and self.grades is not None:
                return self._graded(*arguments)
            elif name == "prove":
                self.told.append((name, *arguments))
                if self.convicts is None:
                    raise errors.ActorDiedError()
                if self.convicts:
                    self.withdrawals.append(Withdrawal(names=self.convicts, failure=BROKEN))
            elif name == "listen" and arguments[0] and not self.infra:
                await anyio.sleep_forever()
            if name in ("prove", "listen"):
                infra, self.infra = self.infra, {}
                return News(heard=[], withdrawals=list(self.withdrawals), infra=infra, versions=[])
            if name == self.refuses:
                raise errors.RayTaskError(name, "", ConfigError(f"there is no {arguments[0]} here"))
            if name in ("pause", "resume", "load_weights"):
                if self.deaf:
                    raise errors.ActorUnavailableError("no answer", b"0" * 16)
                self.told.append((name, *arguments))
                await self.hears.wait()
            return None

        return Method(call)

    def _graded(self, plan: RolloutPlan) -> Parcel:
        assert self.grades is not None
        store = NodeStore(self.grades)
        taken_back, versions = self.ended.get(plan.name, (frozenset[str](), ("v0",)))
        attempt = scripted_attempt(plan, reward=1.0, versions=versions[:1])
        folder = store.begin(plan.name)
        folder.write_json(folder.verdict, {})
        store.store_versions(versions)
        store.store(attempt.record, folder, list(attempt.samples))
        if taken_back:
            self.withdrawals.append(Withdrawal(names=taken_back, failure=BROKEN))
        for withdrawal in self.withdrawals:
            store.withdraw(withdrawal.names, withdrawal.failure)
        return store.take(plan.name)


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


def plans(count: int) -> list[RolloutPlan]:
    return [RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=n + 1) for n in range(count)]


async def test_what_a_control_takes_back_at_a_rollouts_end_is_taken_back_when_the_rollout_has_ended(
    tmp_path: Path,
) -> None:
    node = Actor(grades=tmp_path / "node", ended={"a.2": (frozenset(["a.1", "a.2"]), ("v0",))})
    node.opens.set()
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={})
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(node), tmp_path, group)
        await driver.open(Silent())
        driver.write_into(writer)
        first, second, third = [await driver.run(plan, Silent()) for plan in plans(3)]
        assert first.record.graded
        assert (second.record.failure, second.record.reward, list(second.samples)) == (BROKEN, None, [])
        assert third.record.graded, "what was taken back before it says nothing of it"
        assert [record.rollout for record in driver.taken_back] == ["a.1", "a.2"]
        assert [record.failure for record in writer.run.records()] == [BROKEN, BROKEN, None]
        assert writer.run.samples("a.2") == []
        writer.close()
        group.cancel_scope.cancel()


async def test_what_was_taken_back_last_is_taken_back_in_the_run_folder_before_that_is_closed(tmp_path: Path) -> None:
    """The rollout at whose end it was is nobody's any more, as after a Ctrl-C."""
    node = Actor(grades=tmp_path / "node")
    node.opens.set()
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={})
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(node), tmp_path, group)
        await driver.open(Silent())
        driver.write_into(writer)
        for plan in plans(2):
            await driver.run(plan, Silent())
        node.withdrawals.append(Withdrawal(names=frozenset(["a.2", "a.3"]), failure=BROKEN))
        await driver.close_writer()
        assert [record.failure for record in RunDir(tmp_path / "run").records()] == [None, BROKEN]
        RunWriter.reopen(tmp_path / "run").close()
        group.cancel_scope.cancel()


async def test_a_try_whose_node_is_lost_takes_nothing_back_of_the_next_one(tmp_path: Path) -> None:
    dies, other = Actor(dies=True), Actor(grades=tmp_path / "node")
    for actor in (dies, other):
        actor.opens.set()
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(dies, other), tmp_path, group)
        await driver.open(Silent())
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        (member, _) = driver._nodes._members.values()
        assert member.actor._handle is dies
        broken = Withdrawal(names=frozenset(["a.1"]), failure=BROKEN)
        await driver._hear(member, News(heard=[], withdrawals=[broken], infra={}, versions=[]))
        (plan,) = plans(1)
        assert (await driver.run(plan, Silent())).record.graded
        driver.writer.close()
        group.cancel_scope.cancel()


async def test_what_a_lost_node_has_graded_another_one_controls(tmp_path: Path) -> None:
    graded_it = Actor(grades=tmp_path / "node", convicts=None)
    dies_too, other = Actor(convicts=None), Actor(convicts=frozenset(["a.1"]))
    for actor in (graded_it, dies_too, other):
        actor.opens.set()
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(graded_it, dies_too, other), tmp_path, group)
        await driver.open(Silent())
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        (plan,) = plans(1)
        assert (await driver.run(plan, Silent())).record.graded
        await driver.prove(plan, ["a.1"])
        assert other.told[-1] == ("prove", plan, ["a.1"])
        assert [record.failure for record in driver.taken_back] == [BROKEN]
        driver.writer.close()
        group.cancel_scope.cancel()


async def test_what_was_graded_on_a_node_that_is_there_only_that_one_controls(tmp_path: Path) -> None:
    graded_it, other = Actor(grades=tmp_path / "node", convicts=frozenset()), Actor(convicts=frozenset())
    for actor in (graded_it, other):
        actor.opens.set()
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(graded_it, other), tmp_path, group)
        await driver.open(Silent())
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        (plan,) = plans(1)
        await driver.run(plan, Silent())
        await driver.prove(plan, ["a.1"])
        assert graded_it.told == other.told == [("prove", plan, [])], "each knows itself what it has not proved"
        driver.writer.close()
        group.cancel_scope.cancel()


async def test_what_no_node_can_prove_ends_ungraded(tmp_path: Path) -> None:
    """A control that takes down node after node."""
    first = [Actor(grades=tmp_path / "node", convicts=None)]
    cluster = Module(*first, *(Actor(convicts=None) for _ in range(9)))
    for actor in cluster.actors:
        actor.opens.set()
    async with anyio.create_task_group() as group:
        nodes, cluster.actors = cluster.actors, first
        driver = driver_of(cluster, tmp_path, group)
        await driver.open(Silent())
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        (plan,) = plans(1)
        await driver.run(plan, Silent())

        async def join_one_by_one() -> None:
            for place, actor in enumerate(nodes[1:], start=1):
                await driver._nodes._join(f"{place:056x}", "192.0.2.1")
                while ("prove", plan, ["a.1"]) not in actor.told:
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as joining:
            joining.start_soon(join_one_by_one)
            await driver.prove(plan, ["a.1"])
            joining.cancel_scope.cancel()
        (record,) = driver.writer.run.records()
        assert not record.graded
        assert record.failure is not None
        assert (record.failure.fault, record.failure.error) == ("infra", "InfraError")
        assert "under the control" in record.failure.message
        assert list(driver.taken_back) == [record]
        assert sum(bool(actor.told) for actor in nodes) == 6, "the rest of the cluster is left alone"
        driver.writer.close()
        group.cancel_scope.cancel()


async def test_weights_that_are_heard_of_after_newer_ones_are_older(tmp_path: Path) -> None:
    """The engine's first version is known to nobody before it has sampled."""
    node = Actor(grades=tmp_path / "node", ended={"a.1": (frozenset(), ("0", "step-1"))})
    node.opens.set()
    node.hears.set()
    async with anyio.create_task_group() as group:
        driver = driver_of(Module(node), tmp_path, group)
        await driver.open(Silent())
        driver.write_into(RunWriter.create(tmp_path / "run", run_file=b"", resolved={}))
        await driver.resume("step-1")
        (member,) = driver._nodes._members.values()
        (plan,) = plans(1)
        await driver.run(plan, Silent())
        assert driver.versions == driver.writer.versions() == ["0", "step-1"]
        await driver.resume("step-2")
        news = News(heard=[], withdrawals=[], infra={}, versions=["00", "0", "step-1", "between"])
        await driver._hear(member, news)
        assert driver.versions == ["00", "0", "step-1", "between", "step-2"]
        driver.writer.close()
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


class Convicting:
    """Its control takes back what it has just stored."""

    def __init__(self, store: NodeStore) -> None:
        self.store = store

    async def run(self, plan: RolloutPlan, observer: Any, *, cut: anyio.Event) -> None:
        attempt = scripted_attempt(plan, reward=1.0)
        self.store.store_versions(["v0"])
        self.store.store(attempt.record, self.store.begin(plan.name), list(attempt.samples))
        self.store.withdraw([plan.name], BROKEN)


async def test_a_node_sends_what_it_takes_back_with_the_rollout_and_says_it_again(tmp_path: Path) -> None:
    """The driver may have gone away from the rollout, and its answer with it."""
    store = NodeStore(tmp_path)
    executor: Any = Convicting(store)
    (plan,) = plans(1)
    parcel = await _run(_Open(executor=executor, store=store), plan)
    withdrawn = [Withdrawal(names=frozenset(["a.1"]), failure=BROKEN)]
    assert parcel.withdrawals == store.so_far()[0] == store.so_far()[0] == withdrawn
    assert parcel.versions == ["v0"]


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
