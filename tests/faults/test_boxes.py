"""Boxes under attack from inside, and boxes whose makers are killed."""

# What is asked of the machine here takes no time, and no loop has anything else to do.
# ruff: noqa: ASYNC220, ASYNC222, ASYNC240

from __future__ import annotations

import contextlib
import gc
import os
import platform
import random
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

import rollwright
from rollwright.errors import PathNotFound, ProvisionFailed, SandboxBroken, SandboxGone, UsageError
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider, seccomp
from rollwright.sandboxes.namespaces.box import NamespacesSandbox
from rollwright.sandboxes.namespaces.registry import Record, Registry
from rollwright.testing.sandbox_contract import shell_job

pytestmark = pytest.mark.anyio

HOST = SandboxSpec(image="host", network="gateway_only", disk_mb=64)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
async def provider(state: Path) -> AsyncIterator[NamespacesProvider]:
    async with NamespacesProvider(state_dir=state) as provider:
        yield provider


@pytest.fixture
async def box(provider: NamespacesProvider) -> NamespacesSandbox:
    return await provider.create(HOST, key="box")


async def test_a_box_that_stays_does_not_keep_the_others(tmp_path: Path) -> None:
    provider = NamespacesProvider(state_dir=tmp_path)
    held = await provider.create(HOST, key="held")
    other = await provider.create(HOST, key="other")
    (record,) = [r for r in Registry(tmp_path / "boxes").records() if r.id == held.id]
    try:
        for group in record.cgroups:
            Path(group, "held").mkdir()
        with pytest.raises(SandboxBroken) if record.cgroups else contextlib.nullcontext():
            await provider.close()
    finally:
        for group in record.cgroups:
            Path(group, "held").rmdir()
    assert (held.dead, other.dead) == (True, True)
    assert [r.id for r in Registry(tmp_path / "boxes").records()] == [held.id for _ in record.cgroups[:1]]
    await provider.reap(everything=True)


def left_behind(mark: str) -> list[str]:
    """Processes whose command line or environment has `mark`, and cgroups of ours without an owner."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes() and folder.name != str(os.getpid()):
                found.append((folder / "cmdline").read_bytes().decode(errors="replace"))
    return found


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def children(name: str, parent: int) -> list[int]:
    """Pids of the processes of this name and parent."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            comm, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            if comm == name and rest.split()[1] == str(parent):
                found.append(int(folder.name))
    return found


def servers() -> list[int]:
    return children(f"box-server {os.getpid()}"[:15], os.getpid())


def inits() -> list[int]:
    """Inits of the boxes of this process' one server."""
    (server,) = servers()
    return children("box-init", server)


def records_of(provider: NamespacesProvider) -> list[Record]:
    return provider._registry.records()


def init_alive(records: Path) -> list[bool]:
    return [record.init is not None and record.init.alive for record in Registry(records).records()]


def cgroups_of(boxes: list[str]) -> list[Path]:
    # Unlike glob, walk bears with groups of others that go meanwhile.
    ours = tuple(f"/rollwright/{box}" for box in boxes)
    return [Path(path) for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(ours)]


async def until_true(check: object, seconds: float = 40) -> None:
    assert callable(check)
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never became true"
        await anyio.sleep(0.02)


ORCHESTRATOR = """
import anyio, os, secrets, sys
from rollwright.sandboxes import JobSpec, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider, seccomp

async def work(provider, n, mark):
    spec = SandboxSpec(image="host", network="gateway_only", disk_mb=64)
    box = await provider.create(spec, key=str(n))
    script = f"trap '' TERM; setsid setsid sleep 30{mark} & sleep 30{mark}"
    job = await box.start(JobSpec(id=secrets.token_hex(16), argv=("sh", "-c", script), user="agent"))
    os.write(1, b"up\\n")
    await box.exec(["sleep", f"31{mark}"], seconds=60)

async def main():
    provider = NamespacesProvider(state_dir=sys.argv[1])
    async with anyio.create_task_group() as tasks:
        for n in range(4):
            tasks.start_soon(work, provider, n, sys.argv[2])

anyio.run(main)
"""


@pytest.mark.parametrize("phase", ["running", "booting 1", "booting 2", "booting 3"])
async def test_nothing_outlives_a_killed_orchestrator(state: Path, phase: str) -> None:
    mark = f"{secrets.randbelow(10**9):09d}"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORCHESTRATOR), str(state), mark], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    records = state / "boxes"
    if phase == "running":
        for _ in range(4):
            assert await anyio.to_thread.run_sync(child.stdout.readline) == b"up\n"
        await until_true(lambda: len(left_behind(mark)) > 8)
    else:
        await until_true(lambda: records.is_dir() and any(records.iterdir()))
        await anyio.sleep(random.Random(phase).uniform(0, 0.15))
    child.kill()
    child.wait()
    child.stdout.close()
    # They die by themselves, without anybody's doing.
    await until_true(lambda: not left_behind(mark) and not left_behind(f"box-server {child.pid}\0"))
    async with NamespacesProvider(state_dir=state) as later:
        await until_true(lambda: not any(init_alive(records)))
        listed = await later.list()
        assert listed, "the kill came before anything was made"
        assert not any(info.owner_alive for info in listed)
        assert sorted(await later.reap()) == sorted(info.id for info in listed)
        assert await later.list() == []
    assert cgroups_of([info.id for info in listed]) == []
    assert str(state) not in Path("/proc/mounts").read_text()


async def test_a_killed_server_takes_its_boxes_along_and_is_replaced(
    provider: NamespacesProvider, box: NamespacesSandbox
) -> None:
    await box.start(shell_job("sleep 60"))
    (server,) = servers()
    os.kill(server, signal.SIGKILL)
    with pytest.raises(SandboxGone):
        await box.exec(["true"])
    with pytest.raises(SandboxGone):
        await box.get("/etc/passwd")
    other = await provider.create(HOST, key="other")
    assert (await other.exec(["true"])).exit_code == 0
    await box.close()


async def test_a_boot_that_is_cancelled_leaves_no_box(provider: NamespacesProvider) -> None:
    cut = 0
    for n in range(12):
        with anyio.move_on_after(0.002 * n) as scope:
            await provider.create(HOST, key=f"cut-{n}")
        if scope.cancelled_caught:
            cut += 1
            assert f"cut-{n}" not in [record.key for record in await anyio.to_thread.run_sync(records_of, provider)]
    assert cut > 0, "no boot was cut"
    made = 12 - cut
    await until_true(lambda: len(inits()) == made)


async def test_a_key_whose_box_died_gets_a_new_one(provider: NamespacesProvider, box: NamespacesSandbox) -> None:
    assert await provider.reap(everything=True) == [box.id]
    again = await provider.create(HOST, key="box")
    assert again.id != box.id
    assert (await again.exec(["true"])).exit_code == 0


async def test_a_provider_that_is_dropped_without_close_leaves_nothing(state: Path) -> None:
    open_before = open_files()
    provider = NamespacesProvider(state_dir=state)
    box = await provider.create(HOST, key="dropped")
    box_id = box.id
    await box.close()
    del provider, box
    gc.collect()
    assert open_files() == open_before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    async with NamespacesProvider(state_dir=state) as later:
        assert box_id not in [info.id for info in await later.list()]


async def test_a_box_whose_lease_ran_out_is_gone_and_one_renewed_is_not(provider: NamespacesProvider) -> None:
    spec = SandboxSpec(image="host", disk_mb=64, lifetime_seconds=0.7)
    while True:
        renewed = await provider.create(spec, key="renewed")
        try:
            await renewed.renew(600)
        except SandboxGone:  # a machine as slow as that gets more time
            await renewed.close()
            spec = replace(spec, lifetime_seconds=spec.lifetime_seconds * 2)
        else:
            break
    short = await provider.create(spec, key="short")
    with pytest.raises(SandboxGone, match="expired"):
        await short.exec(["sleep", "20"])
    assert (await renewed.exec(["true"])).exit_code == 0
    assert await provider.reap() == [short.id]


async def test_reap_everything_ends_living_boxes(provider: NamespacesProvider, box: NamespacesSandbox) -> None:
    assert box.id in await provider.reap(everything=True)
    with pytest.raises(SandboxGone):
        await box.exec(["true"])


async def test_many_orphans_leave_no_zombies(box: NamespacesSandbox) -> None:
    await box.exec(["bash", "-c", "for i in $(seq 300); do (sleep 0.01 &) ; done"])
    count = "until ! grep -l '^State:.Z' /proc/[0-9]*/status; do sleep 0.05; done"
    assert (await box.exec(["bash", "-c", count])).exit_code == 0


# ----------------------------------------------------------------------------- from inside


async def test_the_host_is_not_in_sight(box: NamespacesSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for path in (str(secret), "/etc/shadow", "/proc/1/environ", "/work", "/root/.ssh"):
        with pytest.raises((PathNotFound, UsageError)):
            await box.get(path)
    mounts = await box.exec(["cat", "/proc/self/mountinfo"])
    assert b"overlay" in mounts.stdout
    assert str(tmp_path).encode() not in mounts.stdout
    seen = await box.exec(["sh", "-c", "cat /proc/[0-9]*/comm"])
    assert b"pytest" not in seen.stdout
    # What every process may read of every other tells neither where we are nor what the task is.
    for reader in ("root", "agent"):
        look = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/[0-9]*/mountinfo /proc/[0-9]*/cgroup 2>&-; true"
        told = (await box.run(shell_job(look, user=reader))).stdout.data()
        assert b"box" in told
        for ours in (sys.executable, str(Path(rollwright.__file__).parent), str(tmp_path), box.id):
            assert ours.encode() not in told, ours
    first = await box.exec(["sh", "-c", "tr -d '\\0' </proc/1/cmdline"], user="agent")
    assert first.stdout == b"box-init"


@pytest.mark.parametrize("user", ["root", "agent"])
async def test_no_way_out_is_open(box: NamespacesSandbox, user: str) -> None:
    """Each line is one way out of a badly made box; the numbers of those that work are printed."""
    attempts = [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /dev",
        "umount /proc/sys",
        "mknod /tmp/disk b 8 0",
        "chmod 0 /dev/null",
        "echo '|/tmp/x' >/proc/sys/kernel/core_pattern",
        "echo 1 >/proc/sys/vm/drop_caches",
        "echo h >/proc/sysrq-trigger",
        "head -c1 /proc/kcore",
        "ls -l /proc/1/exe",
        "ls /proc/1/root/",
        "nsenter -t 1 -m true",
        "kill -KILL 1 && sleep 0.2 && ! kill -0 1",
        "unshare -m true",
        "hostname elsewhere",
        "date -s 2000-01-01",
        "ip link add x type dummy",
        "chroot /proc/1/root true",
        "test -e /sys/fs/cgroup",
        "test -w /proc/sys/kernel/hostname",
        "exec 3<>/dev/tcp/8.8.8.8/53",
    ]
    lines = [f"({attempt}) >/dev/null 2>&1 && echo '{n}: {attempt.split()[0]}'" for n, attempt in enumerate(attempts)]
    result = await box.exec(["bash", "-c", "\n".join([*lines, "true"])], user=user)
    assert result.stdout.decode() == ""
    assert Path("/dev/null").stat().st_mode & 0o777 == 0o666


@pytest.mark.skipif(seccomp.program(platform.machine()) is None, reason="no filter of system calls for this machine")
@pytest.mark.parametrize("user", ["root", "agent"])
async def test_no_program_reaches_the_hypervisor_or_the_kernels_odd_corners(box: NamespacesSandbox, user: str) -> None:
    script = """
import ctypes, os, socket
def error(call, *args):
    try:
        call(*args)
    except OSError as e:
        return e.errno
libc = ctypes.CDLL(None, use_errno=True)
def raw(name, *args):
    return ctypes.get_errno() if getattr(libc, name)(*args) < 0 else None
assert error(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM) == 97
assert raw("unshare", 0x10000000) == raw("umount2", b"/proc", 0) == raw("setns", 0, 0) == 1
socket.socket(socket.AF_INET6).close()
assert os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0
print("fine")
"""
    result = await box.exec(["python3", "-c", script], user=user)
    assert result.stdout == b"fine\n", result.stderr


async def test_a_program_with_the_setuid_bit_gives_the_agent_nothing(box: NamespacesSandbox) -> None:
    await box.exec(["sh", "-c", "cp /usr/bin/id /usr/local/bin/id; chmod 4755 /usr/local/bin/id"])
    for result in (
        await box.exec(["/usr/local/bin/id", "-u"], user="agent"),
        await box.exec(["sh", "-c", "/usr/local/bin/id -u"], user="agent"),
    ):
        assert result.stdout.strip() != b"0"


async def test_the_hosts_programs_cannot_be_changed(box: NamespacesSandbox) -> None:
    before = Path("/usr/bin/env").read_bytes()
    result = await box.exec(["sh", "-c", "echo changed >/usr/bin/env; rm /usr/bin/id; cat /usr/bin/env"])
    # Who maps no other uid than its own does not own these files inside either.
    assert result.stdout in (b"changed\n", before)
    assert Path("/usr/bin/env").read_bytes() == before
    assert Path("/usr/bin/id").exists()


async def test_planted_links_lead_nowhere_but_into_the_box(box: NamespacesSandbox, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("host")
    plant = f"ln -s {tmp_path} /home/agent/d; ln -s {tmp_path}/host /home/agent/f; ln -s / /home/agent/root"
    await box.exec(["sh", "-c", plant], user="agent")
    with pytest.raises(PathNotFound):
        await box.get("/home/agent/f")
    with pytest.raises(PathNotFound):
        await box.get("/home/agent/d/host")
    assert (await box.get("/home/agent/root/etc/hostname")) == b"box\n"
    await box.put("/home/agent/f", b"ours")
    assert await box.get("/home/agent/f") == b"ours"
    assert (tmp_path / "host").read_text() == "host"


async def test_a_fork_bomb_is_held_by_the_limit_and_the_box_can_be_closed(provider: NamespacesProvider) -> None:
    if not (await provider.probe()).pids_limit:
        pytest.skip("no pids cgroup here")
    box = await provider.create(SandboxSpec(image="host", disk_mb=64, pids=100), key="bomb")
    await box.exec(["bash", "-c", "b() { b | b & }; b; sleep 0.5"], user="agent")
    with anyio.fail_after(30):
        await box.close()


# ----------------------------------------------------------------------------- the machine says no


async def test_a_port_that_cannot_be_had_is_named(provider: NamespacesProvider) -> None:
    with pytest.raises(ProvisionFailed, match=r"127\.0\.0\.1:70000|port"):
        await provider.create(SandboxSpec(image="host", network="gateway_only", gateway_port=70000), key="port")
    assert "port" not in [info.labels.get("key") for info in await provider.list()]


def test_without_user_namespaces_one_sentence_says_what_to_enable(tmp_path: Path) -> None:
    script = """
        import anyio, sys
        from rollwright.errors import Unsupported
        from rollwright.sandboxes.namespaces import NamespacesProvider, seccomp
        async def main():
            async with NamespacesProvider(state_dir=sys.argv[1]) as provider:
                try:
                    await provider.probe()
                except Unsupported as e:
                    print(e)
        anyio.run(main)
    """
    without = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"',
        "sh",
    ]
    result = subprocess.run(
        [*without, sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "max_user_namespaces" in result.stdout, result.stderr
    assert result.stdout.count("\n") == 1
