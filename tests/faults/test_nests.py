"""Jobs in PID namespaces that the guest's own `unshare` makes, as in a virtual machine whose root may do anything."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest

from rollwright.errors import JobLost
from rollwright.sandboxes import ExecResult
from rollwright.sandboxes.jobs import Jobs
from rollwright.testing.sandbox_contract import shell_job

pytestmark = pytest.mark.anyio

_GUEST = """
mount --bind "$1/etc" /etc
mount -t tmpfs tmpfs /run && chmod 755 /run
echo ready
exec sleep infinity
"""


class Guest:
    """A machine of one's own: this one's files, other users, its own processes; root has all its powers."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--ipc", "--"]
        self.jobs = Jobs(self, folder="/run/rollwright", launch=self._launch)

    async def _launch(self, argv: Sequence[str], *, input: bytes, seconds: float) -> ExecResult:
        return await self.exec(["env", "ROLLWRIGHT_NEST=1", *argv], input=input, seconds=seconds)

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        with anyio.fail_after(seconds):
            done = await anyio.run_process([*self._enter, *argv], input=input, check=False)
        return ExecResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None:
        script = 'mkdir -p "${1%/*}" && cat >"$1"'
        assert (await self.exec(["sh", "-c", script, "sh", path], input=data)).exit_code == 0

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        return (await self.exec(["cat", path])).stdout

    async def sh(self, script: str) -> str:
        return (await self.exec(["sh", "-c", script])).stdout.decode()


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[Guest]:
    unshare = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    able = os.geteuid() == 0 and shutil.which("setpriv") is not None
    if not able or (await anyio.run_process([*unshare, *unshare, "true"], check=False)).returncode:
        pytest.skip("needs a root that may make PID namespaces within PID namespaces")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:10001:10001::/tmp:/bin/sh\n")
    async with await anyio.open_process([*unshare, "sh", "-c", _GUEST, "sh", str(tmp_path)], stderr=None) as process:
        assert process.stdout is not None
        assert (await process.stdout.receive()).startswith(b"ready")
        children = await anyio.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield Guest(int(children.split()[0]))
        process.kill()


@pytest.mark.parametrize(
    ("script", "code", "signal"), [("exit 3", 3, None), ("kill -KILL $$", None, 9), ("exec sh -c 'exit 5'", 5, None)]
)
async def test_how_a_job_ended_is_told(guest: Guest, script: str, code: int | None, signal: int | None) -> None:
    result = await guest.jobs.run(shell_job(script))
    assert (result.state, result.exit_code, result.signal, result.survivors) == ("exited", code, signal, 0)


async def test_a_job_sees_its_own_processes_and_reads_its_input(guest: Guest) -> None:
    result = await guest.jobs.run(
        shell_job(
            'cat; id -un; sleep 30 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done; echo "$ROLLWRIGHT_JOB"; '
            "ls -d /proc/[0-9]* | wc -l",
            stdin=b"in\n",
            id="ab" * 16,
        )
    )
    told = result.stdout.data().decode().split("\n")
    assert told[:3] == ["in", "agent", "ab" * 16]
    assert int(told[3]) < 10


@pytest.mark.parametrize("end", ["exit", "cancel", "timeout"])
async def test_a_daemon_that_scrubs_its_environment_ends_with_its_job(guest: Guest, end: str) -> None:
    script = """
        trap '' TERM
        env -i setsid setsid sh -c 'trap "" TERM; while :; do sleep 1.2345; done' </dev/null >/dev/null 2>&1 &
        until pidof sleep; do :; done
    """ + ("" if end == "exit" else "sleep 300")
    job = await guest.jobs.start(shell_job(script, grace_seconds=0.1, seconds=1.0 if end == "timeout" else 60.0))
    result = await (job.cancel() if end == "cancel" else job.wait())
    assert result.state == {"exit": "exited", "cancel": "cancelled", "timeout": "timeout"}[end]
    assert result.survivors == 0
    assert await guest.sh("pgrep -fx 'sleep 1.2345'; true") == ""


async def test_a_job_has_its_grace(guest: Guest) -> None:
    script = "trap 'echo bye; exit 4' TERM; echo ready; sleep 60 & wait"
    for seconds in (0.3, 2, 15):  # a slow machine gets more
        result = await guest.jobs.run(shell_job(script, seconds=seconds, grace_seconds=20))
        if b"ready" in result.stdout.data():
            break
    assert (result.state, result.exit_code, result.stdout.data()) == ("timeout", 4, b"ready\nbye\n")


async def test_what_is_to_stay_stays(guest: Guest) -> None:
    result = await guest.jobs.run(shell_job("sleep 543.21 & echo started", keep_background=True))
    assert result.stdout.data() == b"started\n"
    assert len((await guest.sh("pgrep -fx 'sleep 543.21'")).split()) == 1


async def test_what_a_killed_supervisor_left_is_ended_when_it_is_asked_for(guest: Guest) -> None:
    id = secrets.token_hex(16)
    job = await guest.jobs.start(shell_job("env -i sleep 345.67", id=id))
    await guest.sh(
        f"until pgrep -fx 'sleep 345.67'; do :; done; read pid _ </run/rollwright/jobs/{id}/supervisor; kill -9 $pid"
    )
    with pytest.raises(JobLost):
        await job.wait()
    assert await guest.sh("pgrep -fx 'sleep 345.67'; true") == ""
