"""Boxes that survive the process that made them, for a while: killed orchestrators, and who comes after them."""

# What is asked of the machine here takes no time, and no loop has anything else to do.

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from rollwright.errors import SandboxGone
from rollwright.sandboxes import Attaches, JobSpec, Provider, Sandbox, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.sandboxes.namespaces.registry import Registry
from rollwright.testing.attach_contract import AttachContract, Elsewhere

pytestmark = pytest.mark.anyio

JOB = JobSpec(
    id="5" * 32,
    argv=("sh", "-c", "echo ran >>/tmp/ran; until [ -e /tmp/go ]; do sleep 0.05; done; echo out; exit 7"),
    user="agent",
    seconds=600,
)
SPEC = SandboxSpec(image="host", network="gateway_only", disk_mb=64, env={"SECRET": "kept"})

ORCHESTRATOR = """
import sys, anyio
from rollwright.sandboxes.namespaces import NamespacesProvider
from tests.faults.test_survive import JOB, SPEC

async def main():
    provider = NamespacesProvider(state_dir=sys.argv[1], survive=float(sys.argv[2]))
    box = await provider.create(SPEC, key="the key")
    await box.start(JOB)
    print(box.id, flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


@contextmanager
def orchestrator(state: Path, survive: float) -> Iterator[str]:
    """A process that makes a box and starts the job in it, and is then killed. Yields the box's id."""
    argv = [sys.executable, "-c", ORCHESTRATOR, str(state), str(survive)]
    here = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        box = process.stdout.readline().strip()
        process.kill()
        process.wait()
        assert box, "it could not make a box"
        yield box


async def until_true(check: object, seconds: float = 60) -> None:
    assert callable(check)
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never became true"
        await anyio.sleep(0.02)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def left_of(box: str, state: Path) -> list[str]:
    """What is left of a box and of the server that had it."""
    records = [str(path) for path in (state / "boxes").glob("*.json")]
    # Unlike glob, walk bears with groups of others that go meanwhile.
    groups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/rollwright/{box}")]
    return [*records, *groups, *(str(path) for path in (state / "servers").iterdir())]


async def test_another_process_takes_the_box_over_and_hears_the_jobs_end_once(tmp_path: Path) -> None:
    with orchestrator(tmp_path, 100) as made:
        async with NamespacesProvider(state_dir=tmp_path, survive=100) as provider:
            assert isinstance(provider, Attaches)
            assert (await provider.probe()).attach
            (waiting,) = await provider.list()
            assert (waiting.id, waiting.alive, waiting.owner_alive) == (made, True, False)
            assert await provider.reap() == [], "it waits for us"
            box = await provider.attach("the key")
            assert box.id == made
            assert await provider.attach("the key") is box
            (ours,) = await provider.list()
            assert ours.owner_alive
            assert ours.lease_seconds_left > 100, "the whole lifetime, not the wait"
            await box.put("/tmp/go", b"")
            # As a restarted orchestrator does it: by the same spec, whether it had started it or not.
            result = await box.run(JOB)
            assert (result.exit_code, result.stdout.data()) == (7, b"out\n")
            assert await box.get("/tmp/ran") == b"ran\n"
            assert (await box.exec(["sh", "-c", "echo $SECRET; id -un"], user="agent")).stdout == b"kept\nagent\n"
            await box.renew(50)
            await box.close()
            with pytest.raises(SandboxGone):
                await provider.attach("the key")
    await until_true(lambda: left_of(made, tmp_path) == [])


async def test_a_connection_made_in_between_waits_in_the_gateways_socket(tmp_path: Path) -> None:
    with orchestrator(tmp_path, 100):
        async with NamespacesProvider(state_dir=tmp_path, survive=100) as provider:
            box = await provider.attach("the key")
            assert box.gateway_socket is not None
            script = "exec 3<>/dev/tcp/127.0.0.1/18001; touch /tmp/connected; echo hello >&3; cat <&3"
            said: list[bytes] = []

            async def speak() -> None:
                said.append((await box.exec(["bash", "-c", script])).stdout)

            def serve() -> None:
                assert box.gateway_socket is not None
                box.gateway_socket.settimeout(30)
                client, _ = box.gateway_socket.accept()
                with client:
                    client.sendall(b"served: " + client.recv(100))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(speak)
                # It is connected although nobody accepts.
                await box.exec(["sh", "-c", "until [ -e /tmp/connected ]; do sleep 0.02; done"])
                await anyio.to_thread.run_sync(serve)
            assert said == [b"served: hello\n"]


async def test_a_box_that_nobody_takes_over_is_gone_with_all_it_had(tmp_path: Path) -> None:
    with orchestrator(tmp_path, 1.0) as made:
        # Its record goes when it is dead, and it may be so already.
        inits = [record.init for record in Registry(tmp_path / "boxes").records() if record.init is not None]
        await until_true(lambda: left_of(made, tmp_path) == [])
        assert not any(init.alive for init in inits)
        async with NamespacesProvider(state_dir=tmp_path, survive=1) as provider:
            with pytest.raises(SandboxGone):
                await provider.attach("the key")


class TestNamespacesThatSurvive(AttachContract):
    spec = replace(AttachContract.spec, network="gateway_only")

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> Elsewhere:
        provider = "rollwright.sandboxes.namespaces:NamespacesProvider"
        return Elsewhere(provider, state_dir=str(tmp_path), survive=100)

    @pytest.fixture
    async def provider(self, tmp_path: Path) -> AsyncIterator[Provider]:
        async with NamespacesProvider(state_dir=tmp_path, survive=100) as provider:
            yield provider

    @pytest.fixture(autouse=True)
    def registry(self, tmp_path: Path) -> None:
        self.boxes = Registry(tmp_path / "boxes")

    async def end(self, provider: Provider, box: Sandbox) -> None:
        (init,) = [record.init for record in self.boxes.records() if record.id == box.id]
        assert init is not None
        os.kill(init.pid, signal.SIGKILL)
        await until_true(lambda: not init.alive)


async def test_everything_reaped_means_those_that_wait_too(tmp_path: Path) -> None:
    with orchestrator(tmp_path, 100) as made:
        async with NamespacesProvider(state_dir=tmp_path, survive=100) as provider:
            assert await provider.reap(everything=True) == [made]
        await until_true(lambda: left_of(made, tmp_path) == [])


async def test_a_killed_server_takes_the_boxes_that_wait_along(tmp_path: Path) -> None:
    with orchestrator(tmp_path, 100) as made:
        (record,) = Registry(tmp_path / "boxes").records()
        assert record.init is not None
        os.kill(parent_of(record.init.pid), signal.SIGKILL)
        init = record.init
        await until_true(lambda: not init.alive)
        async with NamespacesProvider(state_dir=tmp_path, survive=100) as provider:
            with pytest.raises(SandboxGone):
                await provider.attach("the key")
            assert await provider.reap() == [made]
        assert left_of(made, tmp_path) == []
