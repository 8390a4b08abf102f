"""Runs on a real Ray cluster of several nodes on this machine: a node killed in the middle, a broken image, Ctrl-C, no
cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from anyio.from_thread import start_blocking_portal

from rollwright.store import RunDir
from support.breaking_image import image_that_may_break
from support.commandline import Rollwright
from support.e2b_rig import API_KEY, e2b_rig

pytest.importorskip("ray", reason="needs the ray extra")


class Ray:
    """A cluster whose head runs nothing, and what a run on it is called with."""

    def __init__(self, cluster: Any, rollwright: Rollwright) -> None:
        self.cluster = cluster
        self.rollwright = rollwright
        self.settings = (
            "run.executor=ray",
            f"ray.address={cluster.address}",
            "ray.lease_seconds=10",
            "run.concurrency=2",
            "run.limit=4",
            "run.attempts=2",
            "engine.kind=scripted",
            f"engine.scripted.script={rollwright.job.parent / 'replies.toml'}",
            "engine.scripted.seconds_per_turn=0.4",
        )


@pytest.fixture
def ray_cluster(rollwright: Rollwright, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    from ray.cluster_utils import Cluster

    # what a node of this machine starts must find the test's own state folder
    monkeypatch.setenv("XDG_STATE_HOME", str(rollwright.home / "state"))
    small = {"num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 0, **small})
    try:
        yield Ray(cluster, rollwright)
    finally:
        cluster.shutdown()


def test_a_node_that_is_killed_loses_no_rollout(
    ray_cluster: Ray, rollwright: Rollwright, until: Callable[[Callable[[], bool], str], None]
) -> None:
    nodes = [ray_cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    home = rollwright.home
    process = rollwright.start("run", rollwright.job, f"run.output={home}", "run.name=r", *ray_cluster.settings)
    run = RunDir(home / "r")
    until(lambda: run.index.exists() and len(run.records()) >= 1, "the first stored rollout")
    ray_cluster.cluster.remove_node(nodes[0], allow_graceful=False)
    assert process.wait(timeout=110) == 0, process.communicate()
    records = run.records()
    names = [record.rollout for record in records]
    assert len(names) == len(set(names)) == 8
    assert all(record.graded for record in records)
    assert rollwright("verify", run.path).returncode == 0
    log = (run.logs / "run.log").read_text()
    assert "is lost" in log
    assert "owed again" in log
    rollwright("sandbox", "reap")
    assert rollwright.boxes() == []


def test_boxes_elsewhere_that_a_killed_node_leaves_are_removed(
    ray_cluster: Ray, rollwright: Rollwright, images: Path, until: Callable[[Callable[[], bool], str], None]
) -> None:
    nodes = [ray_cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    home = rollwright.home
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(e2b_rig(home / "e2b", images=images)) as rig,
    ):
        settings = (
            *ray_cluster.settings,
            *("sandbox.kind=e2b", f"sandbox.e2b.api_key={API_KEY}", "sandbox.e2b.network_rules=false"),
            *(f"sandbox.e2b.api_url={rig.url}", f"sandbox.e2b.sandbox_url={rig.url}"),
            *("gateway.public_host=127.0.0.1", "gateway.bind=127.0.0.1", "gateway.public_port=0"),
            *("run.concurrency=1", "run.limit=1", "engine.scripted.seconds_per_turn=30"),
        )
        process = rollwright.start("run", rollwright.job, f"run.output={home}", "run.name=r", *settings)
        until(lambda: len(rig.server.boxes.all()) == 2, "a box of each node")
        ray_cluster.cluster.remove_node(nodes[0], allow_graceful=False)
        until(lambda: len(rig.server.boxes.all()) == 1, "the end of the box that the killed node left")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 130, process.communicate()
        assert rig.server.boxes.all() == []


def test_the_last_control_takes_verdicts_back_as_it_does_without_ray(
    ray_cluster: Ray, rollwright: Rollwright, images: Path
) -> None:
    ray_cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    image_that_may_break(images, rollwright.home / "images")()
    settings = (
        *(*ray_cluster.settings, "engine.scripted.seconds_per_turn=0", "run.concurrency=1", "run.limit=1"),
        *("run.retries=0", "grading.controls=2", f"sandbox.namespaces.images={rollwright.home / 'images'}"),
    )
    rollwright("run", rollwright.job, f"run.output={rollwright.home}", "run.name=r", *settings, code=2)
    run = RunDir(rollwright.home / "r")
    records = run.records()
    assert [(record.rollout, record.status) for record in records] == [("cart.1", "ungraded"), ("cart.2", "ungraded")]
    assert [record.failure.error for record in records if record.failure] == ["ImageQuarantined"] * 2
    assert [run.samples(record.rollout) for record in records] == [[], []]


def test_a_cluster_without_nodes_and_no_cluster_are_said_in_one_line(ray_cluster: Ray, rollwright: Rollwright) -> None:
    home = rollwright.home
    empty = rollwright("run", rollwright.job, f"run.output={home}", "run.name=a", *ray_cluster.settings, code=1)
    assert "no node with a CPU" in empty.stderr
    settings = [s for s in ray_cluster.settings if not s.startswith("ray.address")]
    nowhere = "ray.address=127.0.0.1:1"
    missing = rollwright("run", rollwright.job, f"run.output={home}", "run.name=b", *settings, nowhere, code=1)
    assert "no Ray cluster at 127.0.0.1:1" in missing.stderr
    assert not (home / "a").exists()
    assert not (home / "b").exists()


def test_the_doctor_looks_at_every_node(ray_cluster: Ray, rollwright: Rollwright) -> None:
    job = (rollwright.job, *ray_cluster.settings)
    assert "no node with a CPU" in rollwright("doctor", *job, code=1).stdout
    ray_cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    none = f"sandbox.namespaces.images={rollwright.home}"
    seen = orjson.loads(rollwright("doctor", *job, none, "--json", code=1).stdout)
    (missing,) = (each for each in seen if each["check"].startswith("node ") and each["check"].endswith(": images"))
    assert missing["state"] == "fail"
    assert str(rollwright.home) in missing["seen"]


def test_ctrl_c_leaves_no_box_on_any_node(
    ray_cluster: Ray, rollwright: Rollwright, until: Callable[[Callable[[], bool], str], None]
) -> None:
    ray_cluster.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    home = rollwright.home
    process = rollwright.start("run", rollwright.job, f"run.output={home}", "run.name=r", *ray_cluster.settings)
    until(lambda: len(rollwright.boxes()) >= 1, "a box")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130, process.communicate()
    assert rollwright.boxes() == []
