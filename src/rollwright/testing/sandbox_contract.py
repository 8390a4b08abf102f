"""The contract of `rollwright.sandboxes.Provider` and its boxes as tests. A backend passes them by subclassing:

class TestMyBackend(SandboxContract):
    @pytest.fixture
    async def provider(self):
        async with MyProvider(...) as provider:
            yield provider
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from rollwright.errors import ConfigError, JobLost, LimitError, PathNotFound, SandboxGone, Unreachable, UsageError
from rollwright.sandboxes import JobResult, JobSpec, Provider, Sandbox, SandboxSpec
from rollwright.sandboxes.jobs import job_id

__all__ = ["JobContract", "SandboxContract", "shell_job"]

_ESCAPEE = """
trap '' TERM
setsid sh -c 'trap "" TERM; setsid sh -c "trap \\"\\" TERM; while :; do date +%s%N >>{mark}; sleep 0.05; done" &' &
"""
"""A daemon in its own session that ignores TERM and shows that it lives by writing to a file."""


def shell_job(script: str, **more: object) -> JobSpec:
    """A job of the agent's, under a fresh id."""
    spec = JobSpec(id=secrets.token_hex(16), argv=("sh", "-c", script), user="agent", cwd="/tmp", seconds=30)
    return replace(spec, **more)  # type: ignore[arg-type]


@pytest.mark.anyio
class JobContract:
    """The part about durable jobs alone. It needs a fixture `box`."""

    async def lives(self, box: Sandbox, mark: str) -> bool:
        """Whether a process that writes to the file `mark` still does."""
        before = (await box.exec(["cat", mark])).stdout
        await anyio.sleep(0.2)
        return (await box.exec(["cat", mark])).stdout != before

    # ------------------------------------------------------------------ jobs: how they end

    async def test_how_a_job_ended_is_a_value(self, box: Sandbox) -> None:
        for script, code, signal in [
            ("true", 0, None),
            ("exit 3", 3, None),
            ("set -e; false; exit 9", 1, None),
            ("exec sh -c 'exit 5'", 5, None),
            ("echo 'unbalanced", 2, None),
            ("kill -KILL $$", None, 9),
            ("echo ends with \\", 0, None),
        ]:
            result = await box.run(shell_job(script))
            assert (result.state, result.exit_code, result.signal) == ("exited", code, signal), script
            assert result.survivors == 0

    async def test_streams_are_apart_or_merged_in_order(self, box: Sandbox) -> None:
        script = "echo a; echo b >&2; echo c; echo d >&2"
        apart = await box.run(shell_job(script))
        assert (apart.stdout.data(), apart.stderr.data()) == (b"a\nc\n", b"b\nd\n")
        merged = await box.run(shell_job(script, merge_stderr=True))
        assert (merged.stdout.data(), merged.stderr.data()) == (b"a\nb\nc\nd\n", b"")

    async def test_environment_arguments_and_folder_are_exact(self, box: Sandbox) -> None:
        odd = "a b'\"$(id)`id`\\\n* ~ \té"
        spec = shell_job("", env={"ODD": odd, "EMPTY": ""}, cwd="/usr/bin")
        spec = replace(spec, argv=("sh", "-c", 'printf "%s|%s|%s|%s|%s" "$ODD" "$EMPTY" "$1" "$PWD" "$HOME"', "x", odd))
        assert (await box.run(spec)).stdout.data() == f"{odd}||{odd}|/usr/bin|/home/agent".encode()

    async def test_a_folder_that_is_not_there_has_its_own_code(self, box: Sandbox) -> None:
        result = await box.run(shell_job("touch /tmp/ran", cwd="/no/such"))
        assert result.exit_code == 125
        with pytest.raises(PathNotFound):
            await box.get("/tmp/ran")

    async def test_a_job_reads_its_stdin_or_the_end_of_it(self, box: Sandbox) -> None:
        data = bytes(range(256)) * 4000
        assert (await box.run(shell_job("cat", stdin=data))).stdout.data() == data
        assert (await box.run(shell_job("cat; echo end"))).stdout.data() == b"end\n"

    async def test_output_is_bytes_of_any_kind(self, box: Sandbox) -> None:
        result = await box.run(shell_job(r"printf 'a\000b\377\300\n'"))
        assert result.stdout.data() == b"a\0b\xff\xc0\n"

    async def test_long_output_keeps_head_tail_and_total(self, box: Sandbox) -> None:
        script = "seq 1 100000; seq 1 100000 >&2"
        everything = b"".join(b"%d\n" % n for n in range(1, 100001))
        result = await box.run(shell_job(script, head_bytes=1000, tail_bytes=500))
        for stream in (result.stdout, result.stderr):
            assert stream.total == len(everything)
            assert stream.head == everything[:1000]
            assert stream.tail == everything[-500:]
            assert stream.truncated
        whole = await box.run(shell_job(script))
        assert whole.stdout.data() == whole.stderr.data() == everything

    # ------------------------------------------------------------------ jobs: when they end

    async def test_a_deadline_ends_all_that_the_job_started(self, box: Sandbox) -> None:
        script = _ESCAPEE.format(mark="/tmp/mark") + "sleep 60"
        result = await box.run(shell_job(script, seconds=0.5, grace_seconds=0.2))
        assert result.state == "timeout"
        assert result.survivors == 0
        assert 0.5 <= result.seconds < 30
        assert not await self.lives(box, "/tmp/mark")

    async def test_a_job_may_clean_up_in_its_grace(self, box: Sandbox) -> None:
        script = "trap 'echo bye; exit 4' TERM; echo ready; sleep 60 & wait"
        for seconds in (0.3, 2, 15):  # a slow machine gets more
            result = await box.run(shell_job(script, seconds=seconds, grace_seconds=20))
            if b"ready" in result.stdout.data():
                break
        assert (result.state, result.exit_code, result.stdout.data()) == ("timeout", 4, b"ready\nbye\n")

    async def test_a_silent_job_ends_at_its_idle_limit(self, box: Sandbox) -> None:
        script = "for i in 1 2 3 4; do echo $i; sleep 0.25; done; sleep 60"
        result = await box.run(shell_job(script, idle_seconds=1.5, grace_seconds=0.1))
        assert result.state == "timeout"
        assert result.stdout.data() == b"1\n2\n3\n4\n"
        assert result.seconds < 30

    async def test_nothing_is_left_after_a_normal_end(self, box: Sandbox) -> None:
        result = await box.run(shell_job(_ESCAPEE.format(mark="/tmp/mark") + "sleep 0.2; exit 0"))
        assert (result.state, result.exit_code, result.survivors) == ("exited", 0, 0)
        assert not await self.lives(box, "/tmp/mark")

    async def test_background_processes_stay_when_that_was_asked_for(self, box: Sandbox) -> None:
        script = "(while :; do date +%s%N; sleep 0.05; done | tee /tmp/mark) & echo main"
        with anyio.fail_after(25):
            result = await box.run(shell_job(script, keep_background=True))
        assert (result.state, result.exit_code) == ("exited", 0)
        assert b"main\n" in result.stdout.data()
        with anyio.fail_after(25):
            while not await self.lives(box, "/tmp/mark"):
                pass

    async def test_cancel_ends_the_tree_and_says_so(self, box: Sandbox) -> None:
        job = await box.start(shell_job(_ESCAPEE.format(mark="/tmp/mark") + "sleep 60", grace_seconds=0.2))
        await box.exec(["sh", "-c", "until [ -s /tmp/mark ]; do sleep 0.02; done"])
        result = await job.cancel()
        assert (result.state, result.survivors) == ("cancelled", 0)
        assert (await job.wait()).state == "cancelled"
        assert not await self.lives(box, "/tmp/mark")

    async def test_cancel_after_the_end_changes_nothing(self, box: Sandbox) -> None:
        job = await box.start(shell_job("exit 6"))
        await job.wait()
        assert (await job.cancel()).exit_code == 6

    async def test_cancelling_run_cancels_the_job(self, box: Sandbox) -> None:
        spec = shell_job(_ESCAPEE.format(mark="/tmp/mark") + "sleep 60", grace_seconds=0.1)
        with anyio.move_on_after(0.4):
            await box.run(spec)
        assert (await (await box.start(spec)).wait()).state == "cancelled"
        assert not await self.lives(box, "/tmp/mark")

    async def test_cancelling_wait_leaves_the_job_alone(self, box: Sandbox) -> None:
        job = await box.start(shell_job("sleep 0.5; echo done"))
        with anyio.move_on_after(0.2):
            await job.wait()
        assert (await job.wait()).stdout.data() == b"done\n"

    async def test_a_job_that_writes_without_end_is_ended_when_that_was_asked_for(self, box: Sandbox) -> None:
        limit = 300_000
        for script in ("cat /dev/zero", "cat /dev/zero >&2", f"head -c {limit + 1} /dev/zero"):
            result = await box.run(shell_job(script, output_bytes=limit, head_bytes=1000, grace_seconds=0.1))
            assert (result.state, result.survivors) == ("output_limit", 0), script
            stream = result.stderr if ">&2" in script else result.stdout
            assert stream.total > limit
            assert stream.head == bytes(1000)
        for head in (0, 1000, 400_000):
            just = await box.run(shell_job(f"head -c {limit} /dev/zero", output_bytes=limit, head_bytes=head))
            assert (just.state, just.exit_code, just.stdout.total) == ("exited", 0, limit)
            assert just.stdout.data() == bytes(limit)
        small = await box.run(shell_job("cat /dev/zero", output_bytes=10, grace_seconds=0.1))
        assert (small.state, small.stdout.head) == ("output_limit", bytes(10))

    # ------------------------------------------------------------------ jobs: once

    async def test_a_job_runs_once_however_often_it_is_started(self, box: Sandbox) -> None:
        spec = shell_job("echo ran >>/tmp/ran; sleep 0.3; exit 4")
        results: list[JobResult] = []

        async def run() -> None:
            results.append(await box.run(spec))

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(run)
        results.append(await box.run(spec))
        assert [result.exit_code for result in results] == [4] * 7
        assert await box.get("/tmp/ran") == b"ran\n"

    async def test_many_jobs_at_once_keep_their_own_results(self, box: Sandbox) -> None:
        results: dict[int, JobResult] = {}

        async def run(n: int) -> None:
            results[n] = await box.run(shell_job(f"echo out {n}; sleep 0.0{n}; echo err {n} >&2; exit {n}"))

        async with anyio.create_task_group() as tasks:
            for n in range(8):
                tasks.start_soon(run, n)
        for n, result in results.items():
            assert (result.exit_code, result.stdout.data()) == (n, b"out %d\n" % n)

    async def test_an_id_follows_from_the_callers_key(self, box: Sandbox) -> None:
        assert job_id("run", "task", "1") == job_id("run", "task", "1")
        assert job_id("run", "task1") != job_id("run", "task", "1")
        spec = shell_job("echo once >>/tmp/once", id=job_id("run", "task", "1"))
        await box.run(spec)
        again = await box.start(replace(spec, id=job_id("run", "task", "1")))
        assert (await again.wait()).ok
        assert await box.get("/tmp/once") == b"once\n"

    async def test_what_is_forgotten_takes_no_room_and_never_runs_again(self, box: Sandbox) -> None:
        wait = "until [ -e /tmp/go ]; do sleep 0.05; done"
        spec = shell_job(f"echo once >>/tmp/once; {wait}; head -c 400000 /dev/zero", stdin=b"in")
        job = await box.start(spec)
        with pytest.raises(UsageError):
            await job.forget()
        await box.put("/tmp/go", b"")
        assert (await job.wait()).stdout.data() == bytes(400_000)
        for _ in range(2):
            await job.forget()
        with pytest.raises(JobLost):
            await box.run(spec)
        assert await box.get("/tmp/once") == b"once\n"
        await box.run(shell_job("true"))
        look = f"for d in /*/*/jobs /*/*/*/jobs /*/*/*/*/jobs; do ls -A $d/{spec.id}; done 2>/dev/null"
        assert (await box.exec(["sh", "-c", look])).stdout == b"record\n"

    async def test_what_no_shell_can_carry_is_refused(self, box: Sandbox) -> None:
        for wrong in ({"id": "short"}, {"argv": ()}, {"argv": ("a\0b",)}, {"env": {"A-B": ""}}, {"user": "bob"}):
            with pytest.raises(UsageError):
                await box.start(shell_job("true", **wrong))


class SandboxContract(JobContract):
    """Subclass it, name it `Test...`, give it a fixture `provider` that yields the opened provider."""

    spec: SandboxSpec = SandboxSpec(image="host", network="none", disk_mb=256)
    """The box of most tests. Its image needs a POSIX shell and coreutils, no Python."""
    public_host = "127.0.0.1"
    """Where the backend is one whose boxes are elsewhere: this machine's name or address for them."""

    def public_socket(self) -> socket.socket:
        """Listens where such boxes can reach it."""
        return socket.create_server(("", 0))

    @pytest.fixture
    async def box(self, provider: Provider) -> AsyncIterator[Sandbox]:
        box = await provider.create(self.spec, key=secrets.token_hex(8))
        yield box
        await box.close()

    # ------------------------------------------------------------------ provider

    async def test_it_says_what_it_can(self, provider: Provider) -> None:
        has = await provider.probe()
        assert has.name
        assert "none" in has.networks
        assert has.users or not has.tamper_evident, "with one uid nothing keeps the job from its own record"

    async def test_an_image_that_is_not_there_is_named_before_boot(self, provider: Provider) -> None:
        await provider.check_image(self.spec.image)
        with pytest.raises(ConfigError, match="no-such-image"):
            await provider.check_image("no-such-image")

    async def test_the_same_key_gives_the_same_box(self, provider: Provider) -> None:
        key = secrets.token_hex(8)
        first = await provider.create(self.spec, key=key)
        assert (await provider.create(self.spec, key=key)).id == first.id
        await first.close()

    async def test_two_boxes_share_nothing_but_the_image(self, provider: Provider, box: Sandbox) -> None:
        other = await provider.create(self.spec, key=secrets.token_hex(8))
        await box.put("/tmp/mine", b"x")
        with pytest.raises(PathNotFound):
            await other.get("/tmp/mine")
        await other.close()

    async def test_a_living_box_is_listed_with_its_labels_and_not_reaped(self, provider: Provider) -> None:
        box = await provider.create(replace(self.spec, labels={"run": "r1"}), key=secrets.token_hex(8))
        assert box.id not in await provider.reap()
        (info,) = [info for info in await provider.list() if info.id == box.id]
        assert info.alive
        assert info.owner_alive
        assert info.labels == {"run": "r1"}
        assert 0 < info.lease_seconds_left <= self.spec.lifetime_seconds + 1, "backends count whole seconds"
        await box.renew(5000)
        await box.close()
        assert box.id not in [info.id for info in await provider.list()]

    async def test_a_closed_box_is_gone_and_closing_again_is_harmless(self, provider: Provider) -> None:
        box = await provider.create(self.spec, key=secrets.token_hex(8))
        await box.close()
        await box.close()
        with pytest.raises(SandboxGone):
            await box.exec(["true"])

    async def test_a_box_gets_no_more_cpu_time_than_it_may(self, provider: Provider) -> None:
        if not (await provider.probe()).cpu_limit:
            pytest.skip("the backend cannot limit cpu time here")
        box = await provider.create(replace(self.spec, cpus=0.2), key=secrets.token_hex(8))
        # What is measured is cpu time over wall time, which a busy machine only makes smaller.
        spin = "timeout 1 sh -c 'while :; do :; done'"
        told = (
            await box.exec(["sh", "-c", f"s=$(date +%s%N); {spin}; e=$(date +%s%N); echo $((e - s)); times"])
        ).stdout
        wall, *times = told.split()
        minutes, seconds = times[2].rstrip(b"s").split(b"m")
        assert float(minutes) * 60 + float(seconds) < 0.3 * int(wall) / 1e9 + 0.1
        await box.close()

    # ------------------------------------------------------------------ network

    async def test_without_network_every_address_fails_at_once(self, box: Sandbox) -> None:
        started = time.monotonic()
        script = "for a in 1.1.1.1/53 127.0.0.1/80; do (exec 3<>/dev/tcp/$a) && echo reached; done; true"
        result = await box.exec(["bash", "-c", script])
        assert result.stdout == b""
        looked_up = await box.exec(["getent", "hosts", "example.com"])
        assert looked_up.exit_code != 0
        assert time.monotonic() - started < 20

    async def test_with_gateway_only_the_host_serves_the_one_port(self, provider: Provider) -> None:
        has = await provider.probe()
        if "gateway_only" not in has.networks or has.gateway != "socket":
            pytest.skip("the backend's boxes have no socket for the gateway")
        box = await provider.create(replace(self.spec, network="gateway_only"), key=secrets.token_hex(8))
        gateway = box.gateway_socket
        assert gateway is not None
        gateway.settimeout(20)

        def serve() -> None:
            client, _ = gateway.accept()
            with client:
                client.sendall(b"served: " + client.recv(100))

        script = "exec 3<>/dev/tcp/127.0.0.1/18001; echo hello >&3; cat <&3; (exec 4<>/dev/tcp/1.1.1.1/53) && echo leak"
        results: list[JobResult] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, serve)
            results.append(await box.run(replace(shell_job(""), argv=("bash", "-c", script))))
        assert results[0].stdout.head == b"served: hello\n"
        await box.close()
        with pytest.raises(OSError, match=r".*"):
            gateway.getsockname()

    async def test_with_gateway_only_a_box_elsewhere_reaches_the_one_address(self, provider: Provider) -> None:
        has = await provider.probe()
        if "gateway_only" not in has.networks or has.gateway != "url":
            pytest.skip("the backend's boxes have a socket for the gateway, or nothing")
        with self.public_socket() as gateway:
            host, port = self.public_host, gateway.getsockname()[1]
            spec = replace(self.spec, network="gateway_only", gateway_url=f"http://{host}:{port}")
            box = await provider.create(spec, key=secrets.token_hex(8))
            assert box.gateway_socket is None
            gateway.settimeout(20)

            def serve() -> None:
                client, _ = gateway.accept()
                with client:
                    client.sendall(b"served: " + client.recv(100))

            script = (
                f"exec 3<>/dev/tcp/{host}/{port}; echo hello >&3; cat <&3; (exec 4<>/dev/tcp/1.1.1.1/53) && echo leak"
            )
            results: list[JobResult] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, serve)
                results.append(await box.run(replace(shell_job(""), argv=("bash", "-c", script))))
            assert results[0].stdout.head == b"served: hello\n"
            await box.close()

    async def test_two_servers_do_not_share_the_loopback(self, box: Sandbox) -> None:
        with socket.socket() as host:
            host.bind(("127.0.0.1", 0))
            host.listen()
            port = host.getsockname()[1]
            script = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo reached"
            assert (await box.exec(["bash", "-c", script])).stdout == b""

    # ------------------------------------------------------------------ exec

    async def test_a_command_gives_code_and_both_streams_byte_for_byte(self, box: Sandbox) -> None:
        data = bytes(range(256)) * 700
        result = await box.exec(["sh", "-c", "cat; echo err >&2; exit 7"], input=data)
        assert (result.exit_code, result.stdout, result.stderr) == (7, data, b"err\n")

    async def test_a_command_that_is_not_there_fails_as_in_a_shell(self, box: Sandbox) -> None:
        assert (await box.exec(["no-such-command"])).exit_code == 127

    async def test_users_are_who_they_say(self, provider: Provider, box: Sandbox) -> None:
        assert (await box.exec(["id", "-u"])).stdout == b"0\n"
        assert (await box.exec(["id", "-un"], user="agent")).stdout == b"agent\n"
        await box.exec(["sh", "-c", "echo $HOME >$HOME/mine"], user="agent")
        assert (await box.get("/home/agent/mine")).startswith(b"/home/agent")
        with pytest.raises(UsageError):
            await box.exec(["true"], user="nobody-we-know")

    async def test_a_command_that_takes_too_long_is_given_up(self, box: Sandbox) -> None:
        with pytest.raises(Unreachable):
            await box.exec(["tail", "-f", "/dev/null"], seconds=0.3)
        gone = "while cat /proc/[0-9]*/comm | grep -qx tail; do sleep 0.02; done"
        assert (await box.exec(["sh", "-c", gone], seconds=25)).exit_code == 0

    async def test_a_background_process_does_not_hold_a_command_up(self, box: Sandbox) -> None:
        with anyio.fail_after(25):
            result = await box.exec(["sh", "-c", "sleep 300 & echo started"])
        assert result.stdout == b"started\n"

    # ------------------------------------------------------------------ files

    async def test_files_go_in_and_out_unchanged(self, box: Sandbox) -> None:
        data = os.urandom(3_000_000)
        await box.put("/srv/new/folders/file", data, mode=0o640)
        assert await box.get("/srv/new/folders/file") == data
        assert await box.get("/srv/new/folders/file", offset=1_000_000, limit=10) == data[1_000_000:1_000_010]
        assert await box.get("/srv/new/folders/file", offset=2_999_999) == data[-1:]
        assert (await box.exec(["stat", "-c", "%a", "/srv/new/folders/file"])).stdout == b"640\n"

    async def test_a_file_is_replaced_as_a_whole(self, box: Sandbox) -> None:
        await box.put("/srv/file", b"old and long")
        await box.put("/srv/file", b"new")
        assert await box.get("/srv/file") == b"new"
        await box.put("/srv/empty", b"")
        assert await box.get("/srv/empty") == b""
        assert (await box.exec(["ls", "-A", "/srv"])).stdout.split() == [b"empty", b"file"]

    async def test_a_file_is_its_users(self, provider: Provider, box: Sandbox) -> None:
        await box.put("/home/agent/file", b"", user="agent")
        if (await provider.probe()).users:
            assert (await box.exec(["stat", "-c", "%U", "/home/agent/file"])).stdout == b"agent\n"
            with pytest.raises(UsageError):
                await box.put("/usr/bin/ls", b"", user="agent")

    async def test_a_file_that_is_not_there_is_an_error_not_an_empty_one(self, box: Sandbox) -> None:
        with pytest.raises(PathNotFound):
            await box.get("/srv/none")
        with pytest.raises(UsageError):
            await box.get("/srv")
        await box.exec(["mkfifo", "/tmp/fifo"])
        with pytest.raises(UsageError), anyio.fail_after(25):
            await box.get("/tmp/fifo")

    async def test_a_file_that_does_not_fit_is_a_limit_error_and_leaves_nothing(self, provider: Provider) -> None:
        box = await provider.create(replace(self.spec, disk_mb=16), key=secrets.token_hex(8))
        with pytest.raises(LimitError):
            await box.put("/srv/big", bytes(40 << 20))
        assert (await box.exec(["ls", "-A", "/srv"])).stdout == b""
        await box.close()

    async def test_a_tree_keeps_links_and_modes(self, box: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "deep" / "er").mkdir(parents=True)
        (tmp_path / "deep" / "er" / "run").write_bytes(b"\0\n\xff")
        (tmp_path / "deep" / "er" / "run").chmod(0o755)
        (tmp_path / "deep").chmod(0o750)
        (tmp_path / "link").symlink_to("deep/er/run")
        (tmp_path / "new\nline").write_text("odd")
        await box.put_tree(tmp_path, "/opt/tree", user="root")
        assert await box.get("/opt/tree/link") == b"\0\n\xff"
        assert await box.get("/opt/tree/new\nline") == b"odd"
        listed = await box.exec(["stat", "-c", "%a %F", "deep", "deep/er/run", "link"], cwd="/opt/tree")
        assert listed.stdout.splitlines() == [b"750 directory", b"755 regular file", b"777 symbolic link"]
