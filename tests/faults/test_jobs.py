"""Durable jobs under attack and under failure: each fault is really caused, and shown to have happened."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest

from rollwright.errors import AmbiguousOutcome, JobLost, PathNotFound, SandboxGone, Unreachable
from rollwright.sandboxes import ExecResult, JobResult, SandboxSpec
from rollwright.sandboxes import jobs as jobs_module
from rollwright.sandboxes.jobs import Jobs
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.sandboxes.namespaces.box import NamespacesSandbox
from rollwright.testing.sandbox_contract import shell_job

pytestmark = pytest.mark.anyio

FOLDER = "/run/rollwright"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
async def provider(state: Path) -> AsyncIterator[NamespacesProvider]:
    async with NamespacesProvider(state_dir=state) as provider:
        yield provider


@pytest.fixture
async def box(provider: NamespacesProvider) -> NamespacesSandbox:
    return await provider.create(SandboxSpec(image="host", disk_mb=64), key="box")


async def sh(box: NamespacesSandbox, script: str, user: str = "root") -> str:
    result = await box.exec(["bash", "-c", script], user=user)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().strip()


async def wait_until_alone(box: NamespacesSandbox) -> None:
    """Until nothing but init lives in the box. A supervisor may need a moment to end after it has reported."""
    others = "cat /proc/[0-9]*/comm 2>&- | grep -vx -e box-init -e bash -e cat -e grep"
    await sh(box, f"while {others}; do sleep 0.02; done")


async def test_a_killed_supervisor_is_a_lost_job_and_takes_the_job_along(box: NamespacesSandbox) -> None:
    spec = shell_job("setsid sh -c 'trap \"\" TERM; sleep 600' & sleep 600", seconds=600)
    job = await box.start(spec)
    await sh(box, "until pidof sleep; do sleep 0.02; done")
    await sh(box, f"read pid _ <{FOLDER}/jobs/{spec.id}/supervisor; kill -KILL $pid")
    with pytest.raises(JobLost):
        await job.wait()
    await sh(box, "while pidof sleep >/dev/null; do sleep 0.02; done")
    with pytest.raises(JobLost):
        await box.run(spec)


async def test_a_killed_cell_is_a_lost_job(box: NamespacesSandbox) -> None:
    job = await box.start(shell_job("sleep 300; sleep 300", seconds=600))
    await sh(
        box, "until pidof sleep; do sleep 0.02; done; kill -KILL $(grep -lx job-init /proc/[0-9]*/comm | cut -d/ -f3)"
    )
    with pytest.raises(JobLost):
        await job.wait()
    await wait_until_alone(box)


async def test_jobs_that_end_at_once_are_never_lost(box: NamespacesSandbox) -> None:
    codes: list[int | None] = []

    async def run() -> None:
        for _ in range(4):
            codes.append((await box.run(shell_job("exit 6"))).exit_code)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(run)
    assert codes == [6] * 80


@pytest.mark.parametrize("user", ["agent", "root"])
async def test_a_job_cannot_reach_its_supervisor_or_its_record(box: NamespacesSandbox, user: str) -> None:
    script = f"""
        trap '' TERM
        kill -KILL -1
        for p in /proc/[0-9]*; do [ $p = /proc/1 ] || [ $p = /proc/$$ ] || kill -KILL ${{p#/proc/}}; done
        for f in {FOLDER} {FOLDER}/jobs {FOLDER}/jobs/*; do ls -A $f; echo forged >$f/record; rm -rf $f; done
        mount -t tmpfs none /mnt; umount {FOLDER}; ls -A {FOLDER}
        for fd in /proc/$$/fd/*; do echo 'exit 0 0' >$fd; done
        cat /proc/1/environ /proc/1/mem; ls /proc/1/root /proc/1/fd; tr '\\0' ' ' </proc/1/comm
        echo $(ls -d /proc/[0-9]* | wc -l) processes in sight
        exit 7
    """
    spec = shell_job(script, user=user)
    result = await box.run(spec)
    assert (result.state, result.exit_code, result.survivors) == ("exited", 7, 0)
    said = result.stdout.text()
    assert "record" not in said
    assert "supervisor" not in said
    assert "processes in sight" in said
    assert spec.id.encode() in await box.get(f"{FOLDER}/jobs/{spec.id}/record")


async def test_a_full_disk_loses_neither_code_nor_output(box: NamespacesSandbox) -> None:
    script = "echo before; dd if=/dev/zero of=/tmp/full bs=1M 2>&1 | tail -1; (echo x >/tmp/more) && echo room; exit 5"
    result = await box.run(shell_job(script))
    assert result.exit_code == 5
    assert result.stdout.head.startswith(b"before\n")
    assert b"room" not in result.stdout.head
    assert int(await sh(box, "df --output=avail /tmp | tail -1")) == 0, "the disk was not full"
    assert (await box.run(shell_job("exit 6"))).exit_code == 6


async def test_a_full_disk_loses_no_code_where_records_lie_on_that_disk(box: NamespacesSandbox) -> None:
    jobs = Jobs(box, folder="/var/lib/rollwright")
    result = await jobs.run(shell_job("sleep 0.3; dd if=/dev/zero of=/tmp/full bs=4k; exit 5"))
    assert int(await sh(box, "df --output=avail /tmp | tail -1")) == 0, "the disk was not full"
    assert (result.state, result.exit_code) == ("exited", 5)


async def test_300_megabytes_of_output_are_bounded_everywhere(box: NamespacesSandbox) -> None:
    result = await box.run(shell_job("head -c 300000000 /dev/zero; echo end", head_bytes=1000, tail_bytes=1000))
    assert result.stdout.total == 300_000_004
    assert (len(result.stdout.head), result.stdout.tail[-4:]) == (1000, b"end\n")
    assert int(await sh(box, f"du -sk {FOLDER} | cut -f1")) < 200


async def test_a_daemon_that_scrubs_its_environment_and_a_thousand_children_die(box: NamespacesSandbox) -> None:
    script = """
        trap '' TERM HUP INT
        i=0; while [ $i -lt 1000 ]; do sleep 300 & i=$((i+1)); done
        env -i setsid setsid sh -c 'trap "" TERM; sleep 300 & sleep 300' </dev/null >/dev/null 2>&1 &
        echo up; sleep 300
    """
    job = await box.start(shell_job(script, grace_seconds=0.1))
    await sh(box, "until [ $(pidof sleep | wc -w) -gt 1001 ]; do sleep 0.05; done")
    result = await job.cancel()
    assert (result.state, result.survivors, result.stdout.data()) == ("cancelled", 0, b"up\n")
    await wait_until_alone(box)


@pytest.mark.parametrize("daemon", ["sleep 600", "yes"])
async def test_a_daemon_that_is_out_of_sight_and_holds_the_output_does_not_hold_the_result(
    box: NamespacesSandbox, daemon: str
) -> None:
    in_sight_only = Jobs(box, folder="/opt/jobs")
    hidden = f'until [ "$(cat /proc/$!/comm)" = {daemon.partition(" ")[0]} ]; do :; done'
    with anyio.fail_after(60):
        result = await in_sight_only.run(shell_job(f"echo done; env -i setsid {daemon} & {hidden}; exit 3"))
    assert (result.state, result.exit_code, result.survivors) == ("exited", 3, 1)
    assert b"done\n" in result.stdout.head


async def test_the_deadline_is_kept_when_nobody_watches(box: NamespacesSandbox) -> None:
    job = await box.start(shell_job("sleep 300", seconds=0.5, grace_seconds=0.1))
    await sh(box, "until pidof sleep; do :; done; while pidof sleep; do sleep 0.05; done")
    assert (await job.wait()).state == "timeout"


async def test_a_supervisor_that_was_given_up_before_it_began_begins_nothing(box: NamespacesSandbox) -> None:
    slow = '#!/bin/sh\nuntil [ -e /tmp/go ]; do sleep 0.05; done; touch /tmp/late; exec /usr/bin/mkfifo "$@"\n'
    await box.put("/opt/slow/mkfifo", slow.encode(), mode=0o755)
    spec = shell_job("touch /tmp/ran")

    async def launch(argv: Sequence[str], *, input: bytes, seconds: float) -> ExecResult:
        """The first request is cut once the job is claimed."""
        line = ["env", "PATH=/opt/slow:/usr/bin:/bin", *argv]
        async with anyio.create_task_group() as tasks:
            if not cut:
                tasks.start_soon(claimed, tasks.cancel_scope)
            return await box._exec(line, user="root", cwd="/", input=input, seconds=seconds, cell=True)
        raise AmbiguousOutcome("the stream was cut")

    async def claimed(scope: anyio.CancelScope) -> None:
        await sh(box, f"until [ -d {FOLDER}/jobs/{spec.id} ]; do sleep 0.02; done")
        cut.append(spec.id)
        scope.cancel()

    cut: list[str] = []
    with pytest.raises(JobLost):
        await Jobs(box, launch=launch).run(spec)
    await sh(box, "touch /tmp/go; until [ -e /tmp/late ]; do sleep 0.05; done")
    await wait_until_alone(box)
    with pytest.raises(PathNotFound):
        await box.get("/tmp/ran")


async def test_cancel_before_the_start_forbids_the_start(box: NamespacesSandbox) -> None:
    await box.run(shell_job("true"))
    spec = shell_job("touch /tmp/ran")
    await box.exec(["sh", f"{FOLDER}/supervisor.sh", "cancel", spec.id, "0"])
    assert (await box.run(spec)).state == "cancelled"
    assert (await box.exec(["test", "-e", "/tmp/ran"])).exit_code == 1


async def test_half_a_script_is_never_run(box: NamespacesSandbox) -> None:
    await box.run(shell_job("true"))
    spec = shell_job("true")
    numbers = ["0", "100", "1000", "0", "0", "9", "9", "0", "0", "root"]
    start = shlex.join(["sh", f"{FOLDER}/supervisor.sh", "start", spec.id, *numbers])
    answer = await box.exec(["bash", "-c", f"echo touch /tmp/ran | {start}"])
    assert b" torn " in answer.stdout
    assert (await box.exec(["test", "-e", "/tmp/ran"])).exit_code == 1
    assert (await box.run(spec)).ok, "the id must still be free"


async def test_a_job_over_the_memory_limit_says_oom(provider: NamespacesProvider) -> None:
    if not (await provider.probe()).memory_limit:
        pytest.skip("no memory cgroup here")
    box = await provider.create(SandboxSpec(image="host", memory_mb=64), key="small")
    result = await box.run(shell_job("head -c 300000000 /dev/zero | exec tail -c 300000000 >/dev/null"))
    assert result.state == "oom"
    assert (await box.run(shell_job("echo fine"))).ok


async def test_a_box_that_dies_in_the_middle_is_gone_not_a_result(box: NamespacesSandbox) -> None:
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            with pytest.raises(SandboxGone):
                await box.run(shell_job("sleep 60"))

        async def execute() -> None:
            with pytest.raises(SandboxGone):
                await box.exec(["sleep", "60"], seconds=60)

        tasks.start_soon(run)
        tasks.start_soon(execute)
        await sh(box, "until [ $(pidof sleep | wc -w) = 2 ]; do sleep 0.02; done")
        await box.close()


class Cutting:
    """A box behind a bad line: requests are lost, answers are lost, requests arrive twice or late."""

    def __init__(self, box: NamespacesSandbox, seed: int) -> None:
        self._box = box
        self._random = random.Random(seed)
        self.put, self.get = box.put, box.get
        self.faults = {"request lost": 0, "answer lost": 0, "doubled": 0, "cut": 0}
        self.late: list[Sequence[str]] = []

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        return await self.launch(argv, input=input, seconds=seconds, plain=True)

    async def launch(self, argv: Sequence[str], *, input: bytes, seconds: float, plain: bool = False) -> ExecResult:
        async def send() -> ExecResult:
            if plain:
                return await self._box.exec(argv, input=input, seconds=seconds)
            return await self._box._exec(argv, user="root", cwd="/", input=input, seconds=seconds, cell=True)

        fault = self._random.choice([*self.faults, "none", "none"])
        if fault == "request lost":
            self.faults[fault] += 1
            raise Unreachable("lost on the way")
        if fault == "doubled":
            self.faults[fault] += 1
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
        if fault == "cut":
            with anyio.move_on_after(self._random.uniform(0, 0.1)) as scope:
                return await send()
            self.faults[fault] += scope.cancelled_caught
            raise AmbiguousOutcome("the stream was cut")
        result = await send()
        if fault == "answer lost":
            self.faults[fault] += 1
            raise AmbiguousOutcome("the answer was lost")
        return result


@pytest.mark.parametrize(("seed", "cells"), [(1, True), (5, False)])
async def test_over_a_bad_line_each_job_runs_once_with_its_own_result(
    box: NamespacesSandbox, seed: int, cells: bool
) -> None:
    line = Cutting(box, seed)
    jobs = Jobs(line, folder="/opt/jobs") if not cells else Jobs(line, launch=line.launch)
    results: dict[int, JobResult] = {}

    async def run(n: int) -> None:
        script = f"echo {n} >>/tmp/ran; head -c {n * 100} /dev/zero; sleep 0.{n % 4}; exit {n % 100}"
        results[n] = await jobs.run(shell_job(script))

    while len(results) < 20 or (len(results) < 200 and min(line.faults.values()) == 0):
        async with anyio.create_task_group() as tasks:
            for n in range(len(results), len(results) + 20):
                tasks.start_soon(run, n)
    assert {n: (r.exit_code, r.stdout.total, r.stdout.data()) for n, r in results.items()} == {
        n: (n % 100, n * 100, bytes(n * 100)) for n in results
    }
    ran = (await box.get("/tmp/ran")).split()
    assert sorted(map(int, ran)) == sorted(results), "a job ran twice or never"
    assert min(line.faults.values()) > 0, f"a fault was never injected: {line.faults}"
    await wait_until_alone(box)


# --------------------------------------------------------------------------- what others get wrong


async def test_a_short_job_is_told_of_by_the_request_that_started_it(box: NamespacesSandbox) -> None:
    asked: list[str] = []

    class Counting(Cutting):
        async def launch(self, argv: Sequence[str], *, input: bytes, seconds: float, plain: bool = False) -> ExecResult:
            asked.append(argv[2])
            return await box._exec(argv, user="root", cwd="/", input=input, seconds=seconds, cell=not plain)

    line = Counting(box, 0)
    result = await Jobs(line, launch=line.launch).run(shell_job("exit 3"))
    assert result.exit_code == 3
    assert asked == ["start"]


async def test_what_root_ran_the_agent_may_run_after_it(box: NamespacesSandbox) -> None:
    for user in ("root", "agent", "root"):
        result = await box.run(shell_job("id -un; tee $HOME/seen </dev/null", user=user, cwd="/"))
        assert (result.exit_code, result.stdout.data()) == (0, f"{user}\n".encode())


@pytest.mark.parametrize("script", ["supervisor.sh", "e2b/exec.sh"])
def test_no_clock_that_somebody_could_set_is_read(script: str) -> None:
    source = (Path(jobs_module.__file__).parent / script).read_text()
    assert "/proc/uptime" in source
    assert not re.search(r"\bdate\b|EPOCH|strftime", source)
