"""What goes wrong with containers and their daemon, caused for real: the docker backend tells it apart."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest

from rollwright.errors import AmbiguousOutcome, ConfigError, PathNotFound, ProvisionFailed, SandboxGone, Unsupported
from rollwright.sandboxes import JobResult, SandboxSpec
from rollwright.sandboxes.docker import DockerProvider
from rollwright.testing.attach_contract import Elsewhere
from rollwright.testing.sandbox_contract import shell_job
from support.docker_daemon import BUSYBOX_IMAGE, IMAGE, DockerDaemon, docker_daemon, missing

_MISSING = missing()
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.docker,
    pytest.mark.skipif(_MISSING is not None, reason=_MISSING or ""),
]

SPEC = SandboxSpec(image=IMAGE, disk_mb=256)

ORCHESTRATOR = """
import sys, anyio
from rollwright.sandboxes import JobSpec, SandboxSpec
from rollwright.sandboxes.docker import DockerProvider

async def main():
    provider = DockerProvider(state_dir=sys.argv[1], url=sys.argv[2])
    box = await provider.create(SandboxSpec(image=sys.argv[3]), key="the key")
    await box.start(JobSpec(id="a" * 32, argv=("sleep", "100")))
    print(box.id, flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerDaemon]:
    with docker_daemon() as daemon:
        yield daemon


@pytest.fixture
async def provider(daemon: DockerDaemon, tmp_path: Path) -> AsyncIterator[DockerProvider]:
    async with DockerProvider(state_dir=tmp_path, url=daemon.url) as provider:
        yield provider


@pytest.fixture
def docker(daemon: DockerDaemon) -> Iterator[Any]:
    """The SDK's own client, to do harm with."""
    import docker

    client = docker.APIClient(base_url=daemon.url, version="auto")
    yield client
    client.close()


@pytest.fixture
def orchestrator(daemon: DockerDaemon, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process with a box and a job in it, and the box's id."""
    argv = [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), daemon.url, IMAGE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@dataclass
class Proxy:
    """A socket before the daemon's. It cuts what it is told to, and counts."""

    url: str
    cuts: int = 0
    drop_answer_to: bytes = b""
    """The next request that has this in its first line is carried out, but not answered."""
    cut_after: float | None = None
    """Seconds that a connection may live."""


@asynccontextmanager
async def proxy_of(daemon: DockerDaemon, folder: Path) -> AsyncIterator[Proxy]:
    proxy = Proxy(url=f"unix://{folder}/proxy.sock")

    open_ones: set[asyncio.StreamWriter] = set()

    async def serve(from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        # asyncio's streams: one of anyio's that is cancelled while data comes in is an error of the event loop.
        from_server, to_server = await asyncio.open_unix_connection(daemon.socket)
        open_ones.update((to_client, to_server))
        dropping = False

        async def requests() -> None:
            nonlocal dropping
            while data := await from_client.read(65536):
                to_server.write(data)
                await to_server.drain()
                if proxy.drop_answer_to and proxy.drop_answer_to in data.split(b"\r\n", 1)[0]:
                    proxy.drop_answer_to = b""
                    dropping = True
            to_server.write_eof()

        async def answers() -> None:
            while data := await from_server.read(65536):
                if dropping:
                    proxy.cuts += 1
                    return
                to_client.write(data)
                await to_client.drain()
            to_client.write_eof()

        with anyio.move_on_after(proxy.cut_after) as limit:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(requests)
                    await answers()
                    tasks.cancel_scope.cancel()
            except* OSError:
                pass
        proxy.cuts += limit.cancelled_caught
        for writer in (to_client, to_server):
            open_ones.discard(writer)
            writer.close()

    async with await asyncio.start_unix_server(serve, folder / "proxy.sock"):
        yield proxy
        for writer in open_ones:
            writer.transport.abort()


# ---------------------------------------------------------------------- jobs


async def test_a_job_that_hides_from_its_supervisor_is_ended_all_the_same(provider: DockerProvider) -> None:
    box = await provider.create(SPEC, key="hiding")
    loop = "trap '' TERM; while :; do date +%s%N >>/tmp/mark; sleep 0.05; done"
    hide = f"env -i setsid sh -c 'env -i setsid sh -c \"{loop}\" </dev/null >/dev/null 2>&1 &' &"
    for end in ("exit 3", "sleep 60"):
        script = f"{hide}\nuntil [ -s /tmp/mark ]; do sleep 0.02; done; {end}"
        result = await box.run(shell_job(script, seconds=60 if end == "exit 3" else 3, grace_seconds=0.1))
        assert (result.state, result.survivors) == ("exited" if end == "exit 3" else "timeout", 0)
        assert len(await box.get("/tmp/mark")) > 0
        before = await box.get("/tmp/mark")
        await anyio.sleep(0.3)
        assert await box.get("/tmp/mark") == before
        await box.exec(["rm", "/tmp/mark"])


async def test_a_thousand_children_are_ended_in_time(provider: DockerProvider) -> None:
    box = await provider.create(SPEC, key="many")
    script = "for i in $(seq 1000); do env -i sleep 100 & done; echo started"
    result = await box.run(shell_job(script))
    assert (result.state, result.survivors, result.stdout.data()) == ("exited", 0, b"started\n")
    left = await box.exec(["sh", "-c", "cat /proc/[0-9]*/comm | grep -cx sleep"])
    assert int(left.stdout) <= 1, "only the lease's own sleep may be there"


async def test_a_job_that_fills_the_box_with_processes_is_ended_in_time(provider: DockerProvider) -> None:
    box = await provider.create(replace(SPEC, pids=60), key="full")
    bomb = "trap '' TERM; while :; do env -i setsid sleep 100 & done"
    result = await box.run(replace(shell_job("", seconds=3, grace_seconds=0.2), argv=("bash", "-c", bomb)))
    assert (result.state, result.survivors) == ("timeout", 0)
    assert b"fork" in result.stderr.data(), "it was full"
    assert (await box.run(shell_job("echo fine"))).stdout.data() == b"fine\n"


async def test_the_agent_cannot_reach_its_supervisor_or_its_records(provider: DockerProvider) -> None:
    box = await provider.create(SPEC, key="forger")
    script = "ls /run/rollwright; echo x >/run/rollwright/x; echo x >/proc/1/oom_score_adj; kill -9 1; kill -9 -1"
    result = await box.run(shell_job(script, merge_stderr=True))
    assert (result.state, result.exit_code) == ("exited", 0)
    assert result.stdout.data().count(b"denied") + result.stdout.data().count(b"not permitted") == 4
    assert (await box.run(shell_job("echo fine"))).stdout.data() == b"fine\n"


async def test_running_out_of_memory_is_a_jobs_end_and_not_the_boxs(provider: DockerProvider) -> None:
    box = await provider.create(replace(SPEC, memory_mb=64), key="memory")
    result = await box.run(shell_job("exec tail /dev/zero"))
    assert (result.state, result.signal) == ("oom", 9)
    assert (await box.run(shell_job("exit 0"))).ok


async def test_limits_reach_the_container(provider: DockerProvider, docker: Any) -> None:
    box = await provider.create(replace(SPEC, memory_mb=64, pids=50, env={"FROM": "spec"}), key="limits")
    told = docker.inspect_container(box.id)["HostConfig"]
    assert (told["Memory"], told["MemorySwap"], told["PidsLimit"], told["Init"]) == (64 << 20, 64 << 20, 50, True)
    result = await box.run(shell_job("echo $FROM; for i in $(seq 100); do sleep 5 & done", seconds=5))
    assert result.stdout.data() == b"spec\n"
    assert b"ork" in result.stderr.data(), "the shell says that it cannot fork"


async def test_busybox_is_enough_for_a_box(provider: DockerProvider) -> None:
    box = await provider.create(replace(SPEC, image=BUSYBOX_IMAGE), key="busybox")
    await box.put("/srv/file", b"\0\xff" * 100_000, mode=0o600)
    assert await box.get("/srv/file", offset=3, limit=2) == b"\xff\0"
    result = await box.run(shell_job("id -un; env -i setsid sleep 100 & exit 3"))
    assert (result.exit_code, result.survivors, result.stdout.data()) == (3, 0, b"agent\n")
    with pytest.raises(PathNotFound):
        await box.get("/srv/none")


# ---------------------------------------------------------------------- containers


async def test_a_killed_container_is_gone_for_its_job_and_for_what_comes_after(
    provider: DockerProvider, docker: Any
) -> None:
    box = await provider.create(SPEC, key="killed")
    job = await box.start(shell_job("sleep 60"))
    async with anyio.create_task_group() as tasks:

        async def kill() -> None:
            await anyio.sleep(0.5)
            await anyio.to_thread.run_sync(docker.kill, box.id)

        tasks.start_soon(kill)
        with anyio.fail_after(20), pytest.raises(SandboxGone) as gone:
            await job.wait()
    assert gone.value.details["reason"] == "killed"
    with pytest.raises(SandboxGone):
        await box.exec(["true"])
    with pytest.raises(SandboxGone):
        await box.put("/tmp/x", b"")
    await box.close()
    assert await provider.list() == []


async def test_a_removed_container_is_gone(provider: DockerProvider, docker: Any) -> None:
    box = await provider.create(SPEC, key="removed")
    docker.remove_container(box.id, force=True)
    for operation in (box.exec(["true"]), box.get("/etc/passwd"), box.run(shell_job("true"))):
        with pytest.raises(SandboxGone):
            await operation


async def test_a_box_ends_by_itself_when_its_lease_is_over(provider: DockerProvider) -> None:
    longer = await provider.create(replace(SPEC, lifetime_seconds=6), key="renewed")
    await longer.renew(60)
    box = await provider.create(replace(SPEC, lifetime_seconds=6), key="lease")
    job = await box.start(shell_job("sleep 60"))
    with anyio.fail_after(60), pytest.raises(SandboxGone) as gone:
        await job.wait()
    assert gone.value.details["reason"] == "expired"
    assert (await longer.run(shell_job("exit 0"))).ok
    assert await provider.reap() == [box.id]


# ---------------------------------------------------------------------- orchestrators


async def test_what_a_killed_orchestrator_left_is_reaped(
    provider: DockerProvider,
    daemon: DockerDaemon,
    orchestrator: tuple[subprocess.Popen[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    process, left = orchestrator
    assert await provider.reap() == [], "its owner lives"
    with pytest.raises(ProvisionFailed, match=str(process.pid)):
        await provider.create(SPEC, key="the key")
    process.kill()
    process.wait()
    async with DockerProvider(state_dir=tmp_path_factory.mktemp("other"), url=daemon.url) as stranger:
        assert await stranger.reap(everything=True) == [], "another registry's boxes are none of its business"
    mine = await provider.create(SPEC, key="mine")
    (info,) = [info for info in await provider.list() if info.id == left]
    assert (info.alive, info.owner_alive) == (True, False)
    assert await provider.reap() == [left]
    assert [info.id for info in await provider.list()] == [mine.id]


async def test_the_key_of_a_killed_orchestrator_gives_a_fresh_box(
    provider: DockerProvider, orchestrator: tuple[subprocess.Popen[str], str]
) -> None:
    process, left = orchestrator
    process.kill()
    process.wait()
    box = await provider.create(SPEC, key="the key")
    assert box.id != left
    assert [info.id for info in await provider.list()] == [box.id]


async def test_an_agent_that_took_the_gateways_port_meanwhile_is_not_taken_up(
    provider: DockerProvider, daemon: DockerDaemon, docker: Any, tmp_path: Path
) -> None:
    elsewhere = Elsewhere(
        "rollwright.sandboxes.docker:DockerProvider", state_dir=str(tmp_path), url=daemon.url, survive=100
    )
    spec = replace(SPEC, image=BUSYBOX_IMAGE, network="gateway_only")
    takes_it = shell_job("until nc -l -p 18001; do sleep 0.05; done", seconds=100)
    box = await elsewhere.left("the key", spec, takes_it)
    listens = ["sh", "-c", "until grep -q ':4651 .* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done"]

    def wait() -> None:
        docker.exec_start(docker.exec_create(box, listens)["Id"])

    # While its orchestrator lived, that one had the port.
    await anyio.to_thread.run_sync(wait)
    with pytest.raises(ProvisionFailed, match="18001"):
        await provider.attach("the key")
    assert await provider.list() == []


async def test_a_lost_answer_to_create_makes_no_second_container(
    daemon: DockerDaemon, tmp_path: Path, docker: Any
) -> None:
    before = {found["Id"] for found in docker.containers(all=True)}
    async with (
        proxy_of(daemon, tmp_path) as proxy,
        DockerProvider(state_dir=tmp_path, url=proxy.url) as provider,
    ):
        proxy.drop_answer_to = b"/containers/create"
        box = await provider.create(SPEC, key="lost answer")
        assert proxy.cuts == 1
        found = await anyio.to_thread.run_sync(lambda: docker.containers(all=True))
        assert {one["Id"] for one in found} - before == {box.id}
        assert (await box.run(shell_job("exit 4"))).exit_code == 4


async def test_jobs_outlive_the_connections_that_watch_them(daemon: DockerDaemon, tmp_path: Path) -> None:
    results: list[JobResult] = []
    async with (
        proxy_of(daemon, tmp_path) as proxy,
        DockerProvider(state_dir=tmp_path, url=proxy.url) as provider,
    ):
        box = await provider.create(SPEC, key="cut")
        proxy.cut_after = 1.0

        async def run(n: int) -> None:
            results.append(await box.run(shell_job(f"echo {n} >>/tmp/ran; sleep 2.5; exit {n}", seconds=20)))

        while len(results) < 5 or (len(results) < 50 and proxy.cuts < 10):
            async with anyio.create_task_group() as tasks:
                for n in range(len(results), len(results) + 5):
                    tasks.start_soon(run, n)
        proxy.cut_after = None
        assert sorted(map(int, (await box.get("/tmp/ran")).split())) == list(range(len(results)))
    assert sorted(result.exit_code or 0 for result in results) == list(range(len(results)))
    assert proxy.cuts >= 10


async def test_a_command_whose_connection_is_cut_is_not_run_again(daemon: DockerDaemon, tmp_path: Path) -> None:
    async with (
        proxy_of(daemon, tmp_path) as proxy,
        DockerProvider(state_dir=tmp_path, url=proxy.url) as provider,
    ):
        box = await provider.create(SPEC, key="raw")
        proxy.cut_after = 0.7
        with pytest.raises(AmbiguousOutcome):
            await box.exec(["sh", "-c", "echo ran >>/tmp/ran; sleep 2; echo ended >>/tmp/ran"])
        proxy.cut_after = None
        await box.exec(["sh", "-c", "until grep -q ended /tmp/ran; do sleep 0.05; done"])
        assert await box.get("/tmp/ran") == b"ran\nended\n"
        assert proxy.cuts >= 1


# ---------------------------------------------------------------------- daemons


async def test_a_daemon_that_restarts_takes_its_boxes_with_it_and_says_so(tmp_path: Path) -> None:
    with docker_daemon() as daemon:
        async with DockerProvider(state_dir=tmp_path, url=daemon.url) as provider:
            box = await provider.create(SPEC, key="restart")
            job = await box.start(shell_job("sleep 60"))
            async with anyio.create_task_group() as tasks:

                async def restart() -> None:
                    await anyio.sleep(0.3)
                    await anyio.to_thread.run_sync(daemon.stop)
                    await anyio.to_thread.run_sync(daemon.start)

                tasks.start_soon(restart)
                with anyio.fail_after(60), pytest.raises(SandboxGone):
                    await job.wait()
            await box.close()
            again = await provider.create(SPEC, key="restart")
            assert (await again.run(shell_job("exit 3"))).exit_code == 3


async def test_a_job_survives_the_killing_of_a_daemon_that_restores_its_containers(tmp_path: Path) -> None:
    with docker_daemon("--live-restore") as daemon:
        async with DockerProvider(state_dir=tmp_path, url=daemon.url) as provider:
            box = await provider.create(SPEC, key="restore")
            job = await box.start(shell_job("echo ran >>/tmp/ran; sleep 4; cat /tmp/ran; exit 5", seconds=50))
            async with anyio.create_task_group() as tasks:

                async def restart() -> None:
                    await anyio.sleep(0.3)
                    await anyio.to_thread.run_sync(daemon.stop, signal.SIGKILL)
                    await anyio.to_thread.run_sync(daemon.start)

                tasks.start_soon(restart)
                with anyio.fail_after(60):
                    result = await job.wait()
    assert (result.exit_code, result.stdout.data()) == (5, b"ran\n")


async def test_no_daemon_is_said_in_one_sentence(tmp_path: Path) -> None:
    async with DockerProvider(state_dir=tmp_path, url=f"unix://{tmp_path}/none.sock") as provider:
        with pytest.raises(Unsupported, match=r"no Docker daemon answers at unix:.*sandbox\.docker\.url"):
            await provider.probe()


async def test_no_sdk_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    async with DockerProvider(state_dir=tmp_path) as provider:
        with pytest.raises(Unsupported, match=r"pip install 'rollwright\[docker\]'"):
            await provider.probe()


async def test_what_the_daemon_cannot_do_is_named(daemon: DockerDaemon, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssh"):
        DockerProvider(state_dir=tmp_path, url="ssh://somewhere")
    async with DockerProvider(state_dir=tmp_path, url=daemon.url, runtime="no-such-runtime") as provider:
        with pytest.raises(Unsupported, match="no-such-runtime"):
            await provider.probe()
    async with DockerProvider(state_dir=tmp_path, url=daemon.url, pull=True) as provider:
        with pytest.raises(Unsupported, match="no bridge network"):
            await provider.create(replace(SPEC, network="open"), key="open")
        with pytest.raises(ProvisionFailed, match="no-such-image"):
            await provider.create(replace(SPEC, image="no-such-image"), key="image")
        assert await provider.list() == []


async def test_a_daemon_says_whether_it_bounds_what_a_box_writes(provider: DockerProvider) -> None:
    """Most storage cannot: then that is said before step 0, and no boot fails for it."""
    promised = (await provider.probe()).disk_limit
    box = await provider.create(replace(SPEC, disk_mb=16), key="disk")
    written = await box.exec(["sh", "-c", "head -c 40000000 /dev/zero >/srv/file"])
    kept = written.exit_code != 0
    assert (await provider.probe()).disk_limit == kept
    assert promised or not kept


async def test_a_daemon_at_a_tcp_address_is_as_good_but_for_what_needs_this_machine(
    daemon: DockerDaemon, tmp_path: Path
) -> None:
    async def forward(source: anyio.abc.ByteStream, target: anyio.abc.ByteStream) -> None:
        async for data in source:
            await target.send(data)
        await target.send_eof()

    async def serve(client: anyio.abc.ByteStream) -> None:
        async with client, await anyio.connect_unix(daemon.socket) as server, anyio.create_task_group() as both:
            both.start_soon(forward, client, server)
            both.start_soon(forward, server, client)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with DockerProvider(state_dir=tmp_path, url=f"tcp://127.0.0.1:{port}") as provider:
            has = await provider.probe()
            assert not has.mounts
            assert "gateway_only" not in has.networks
            box = await provider.create(SPEC, key="tcp")
            await box.put("/srv/file", bytes(1_000_000))
            result = await box.run(shell_job("cat /srv/file | wc -c; exit 3"))
            assert (result.exit_code, result.stdout.data().strip()) == (3, b"1000000")
        tasks.cancel_scope.cancel()
