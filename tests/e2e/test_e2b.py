"""Whole runs whose boxes are all made through the E2B SDK: real server, real pi, the gateway at a public address."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rollwright.e2b_server import FAULTS, E2BServer, Faults
from rollwright.sandboxes import Sandbox, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.store import RunDir
from support.commandline import Rollwright, graded

pytestmark = [pytest.mark.pi, pytest.mark.timeout(180)]

KEY = "e2b_0123456789"


class Watched(NamespacesProvider):
    """Remembers what boxes were asked for."""

    specs: list[SandboxSpec]

    async def create(self, spec: SandboxSpec, *, key: str) -> Sandbox:  # type: ignore[override]
        self.specs.append(spec)
        return await super().create(spec, key=key)


class Cluster:
    """A running E2B server, and the settings that send a run there."""

    def __init__(self, provider: Watched, server: E2BServer, faults: Faults, url: str, gateway_port: int) -> None:
        self.specs = provider.specs
        self._server = server
        self.faults = faults
        self.settings = [
            "engine.kind=scripted",
            "sandbox.kind=e2b",
            f"sandbox.e2b.api_key={KEY}",
            f"sandbox.e2b.api_url={url}",
            f"sandbox.e2b.sandbox_url={url}",
            "gateway.public_host=127.0.0.1",
            "gateway.bind=127.0.0.1",
            f"gateway.public_port={gateway_port}",
        ]

    def boxes(self) -> list[str]:
        return [box.id for box in self._server.boxes.all()]

    async def cut_off(self) -> None:
        """No box reaches the gateway any more."""
        for box in self._server.boxes.all():
            box.way.cancel()
            if box.sandbox.gateway_socket is not None:
                box.sandbox.gateway_socket.close()


@asynccontextmanager
async def cluster_at(folder: Path, images: Path, gateway_port: int) -> AsyncGenerator[Cluster]:
    faults = Faults(seed=1)
    async with Watched(state_dir=folder, images=images) as provider:
        provider.specs = []
        sock = socket.create_server(("127.0.0.1", 0), backlog=512)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = E2BServer(provider=provider, api_key=KEY, allowed_port=gateway_port, faults=faults)
        async with server, server.listening(sock):
            yield Cluster(provider, server, faults, url, gateway_port)
            faults.stop()
            assert server.boxes.all() == [], "a box was left behind"


def in_flight(run: RunDir) -> bytes:
    """The turn log of the one rollout, if it has a turn, without what a killed process had not written to the end."""
    try:
        log = (run.work / "cart.1" / "turns.log").read_bytes()
    except FileNotFoundError:
        return b""
    return log[: log.rfind(b"\n") + 1] if b'"kind":"turn"' in log else b""


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture
def cluster(tmp_path: Path, images: Path, portal: BlockingPortal) -> Iterator[Cluster]:
    with socket.socket() as held:
        # Bound, not listening: nobody else is given this port, and the run can have it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        opened = cluster_at(tmp_path / "cluster", images, held.getsockname()[1])
        with portal.wrap_async_context_manager(opened) as cluster:
            yield cluster


def test_agent_and_tests_run_on_e2b_and_leave_training_samples(rollwright: Rollwright, cluster: Cluster) -> None:
    run = rollwright.run(*cluster.settings, "run.limit=1", "run.attempts=1")
    (record,) = graded(run).values()
    assert (record.status, record.reward) == ("resolved", 1.0)
    assert record.trained_tokens == record.sampled_tokens > 0
    made = sorted((spec.image, spec.network) for spec in cluster.specs)
    assert made == [
        ("quickstart/cart", "gateway_only"),
        ("quickstart/cart", "none"),
    ]
    assert orjson.loads(rollwright("verify", run.path, "--json").stdout)["violations"] == []


def test_a_run_on_e2b_goes_on_while_its_requests_go_wrong(rollwright: Rollwright, cluster: Cluster) -> None:
    cluster.faults.at_random(0.2, FAULTS)
    for _ in range(5):
        run = rollwright.run(*cluster.settings, "run.limit=1", "run.attempts=2", "sandbox.e2b.patience_seconds=100")
        assert [(record.status, record.tries) for record in run.records()] == [("resolved", 1)] * 2
        borne = run.infra()
        assert borne["failures"]
        assert borne["unclassified"] == {}
        if sum(cluster.faults.counts.values()) >= 10:
            return
    raise AssertionError(f"too few faults: {cluster.faults.counts}")


def test_a_backend_elsewhere_without_a_public_address_is_refused_at_once(
    rollwright: Rollwright, cluster: Cluster
) -> None:
    settings = [setting for setting in cluster.settings if "public_host" not in setting]
    done = rollwright("run", rollwright.job, f"run.output={rollwright.home}", *settings, code=1)
    assert "gateway.public_host" in done.stderr
    assert cluster.specs == []


def test_an_agent_that_cannot_reach_its_policy_any_more_is_our_failure(
    rollwright: Rollwright, cluster: Cluster, portal: BlockingPortal, until: Callable[[Callable[[], bool], str], None]
) -> None:
    job = ("run", rollwright.job, f"run.output={rollwright.home}", "run.name=cut", *cluster.settings, "run.limit=1")
    process = rollwright.start(
        *job, "run.attempts=1", "run.retries=0", "harness.seconds=20", "engine.scripted.seconds_per_turn=1"
    )
    turns = rollwright.home / "cut" / "work" / "cart.1" / "turns.log"
    until(lambda: turns.exists() and b'"kind":"turn"' in turns.read_bytes(), "the first turn")
    portal.call(cluster.cut_off)
    process.communicate(timeout=110)
    (record,) = RunDir(rollwright.home / "cut").records()
    assert (record.status, record.reward) == ("ungraded", None)
    assert record.turns > 0
    assert record.failure is not None
    assert (record.failure.error, record.failure.fault) == ("AgentSilent", "infra")
    assert "not reached from its box any more" in record.failure.message


def test_an_agent_on_e2b_goes_on_with_the_next_orchestrator_when_its_own_is_killed(
    rollwright: Rollwright, cluster: Cluster, until: Callable[[Callable[[], bool], str], None]
) -> None:
    settings = (*cluster.settings, "sandbox.e2b.survive=60", "engine.scripted.seconds_per_turn=1")
    for n in range(5):
        run = RunDir(rollwright.home / f"run{n}")
        job = ("run", rollwright.job, f"run.output={rollwright.home}", f"run.name=run{n}", *settings)
        process = rollwright.start(*job, "run.limit=1", "run.attempts=1")
        until(lambda run=run, process=process: in_flight(run) != b"" or process.poll() is not None, "a turn")
        process.kill()
        process.communicate()
        before, boxes = in_flight(run), cluster.boxes()

        rollwright("resume", run.path)
        (record,) = run.records()
        assert (record.status, record.tries, record.violations) == ("resolved", 1, 0)
        assert record.trained_tokens == record.sampled_tokens > 0
        assert cluster.boxes() == []
        if before and run.rollout("cart.1").turns.read_bytes().startswith(before):
            assert len(boxes) == 1, "it lived on"
            assert [spec.network for spec in cluster.specs] == ["gateway_only", "none"], "no other box for the agent"
            return
        # On a slow machine it was done before we looked, or it had given up before we were back.
        cluster.specs.clear()
    raise AssertionError("no agent was gone on with")
