"""The client side of durable jobs: what it sends and how it reads answers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import PathNotFound, RateLimited, SandboxBroken, Unreachable
from rollwright.sandboxes import ExecResult
from rollwright.sandboxes.jobs import Jobs, job_id
from rollwright.testing.sandbox_contract import shell_job

text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))


@given(st.lists(text, max_size=4), st.lists(text, max_size=4))
def test_different_keys_give_different_ids(a: list[str], b: list[str]) -> None:
    assert (job_id(*a) == job_id(*b)) == (a == b)
    assert len(job_id(*a)) == 32


class Scripted:
    """A guest that answers from a list; it keeps what it was sent."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.sent: list[tuple[Sequence[str], bytes]] = []

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        self.sent.append((argv, input))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return ExecResult(exit_code=answer, stdout=b"", stderr=b"")
        assert isinstance(answer, str | bytes)
        out = answer.replace("ID", argv[3]).encode() if isinstance(answer, str) else answer
        return ExecResult(exit_code=0, stdout=out, stderr=b"noise")

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None: ...

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        raise PathNotFound(path)


@pytest.mark.anyio
async def test_noise_of_a_login_shell_around_the_answer_does_not_matter() -> None:
    other = "rollwright-job 1 " + "0" * 32 + " exited 9 0 1 1 0 0 0 1\n"
    guest = Scripted(f"Welcome!\n{other}rollwright-job 1 ID exited 3 0 100 350 0 2 1 1\nabclogout\n")
    spec = shell_job("true")
    result = await Jobs(guest).run(spec)
    assert (result.exit_code, result.seconds) == (3, 2.5)


@pytest.mark.anyio
async def test_an_answer_that_is_none_is_a_broken_box() -> None:
    with pytest.raises(SandboxBroken, match="noise"):
        await Jobs(Scripted("sh: not found")).run(shell_job("true"))


@pytest.mark.anyio
async def test_a_box_without_room_to_answer_is_asked_again() -> None:
    ended = "rollwright-job 1 ID timeout 0 9 1 2 0 0 0 1\n"
    guest = Scripted(2, "rollwright-job 1 ID running 0 0 0 0 0 0 0 0\n", 2, 2, ended)
    assert (await Jobs(guest).run(shell_job("true"))).state == "timeout"
    assert [argv[2] for argv, _ in guest.sent] == ["start", "start", "wait", "wait", "wait"]


@pytest.mark.anyio
async def test_processes_that_outlive_their_job_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for survivors in (0, 2):
        spec = shell_job("true")
        await Jobs(Scripted(f"rollwright-job 1 ID exited 0 0 1 2 {survivors} 0 0 1\n")).run(spec)
    assert [record.getMessage() for record in caplog.records] == [
        f"job {spec.id} ended, and 2 of its processes could not be killed"
    ]


@pytest.mark.anyio
async def test_passing_failures_are_tried_again_and_polls_get_shorter_then_longer() -> None:
    running = "rollwright-job 1 ID running 0 0 0 0 0 0 0 0\n"
    ended = "rollwright-job 1 ID exited 0 0 1 2 0 0 0 1\n"
    cut = (Unreachable("x"), running, Unreachable("x"), RateLimited("x", retry_after=0.01))
    guest = Scripted(*cut, *(running,) * 4, ended)
    with anyio.fail_after(20):
        assert (await Jobs(guest).run(shell_job("true"))).ok
    windows = [int(argv[4]) for argv, _ in guest.sent if argv[2] == "wait"]
    assert windows == [10, 5, 2, 2, 2, 2, 3]


names = st.from_regex(r"RW_[A-Z]{1,8}", fullmatch=True)


@settings(deadline=None, max_examples=50)
@given(st.lists(text, min_size=1, max_size=4), st.dictionaries(names, text, max_size=3))
def test_a_script_gives_its_program_the_very_arguments_and_variables(argv: list[str], env: dict[str, str]) -> None:
    guest = Scripted("rollwright-job 1 ID exited 0 0 1 2 0 0 0 1\n")
    show = 'printf "%s\\0" "$@"; for n in $NAMES; do printenv -0 $n; done'
    spec = shell_job("", argv=("sh", "-c", show, "sh", *argv), env={**env, "NAMES": " ".join(env)})
    anyio.run(Jobs(guest).run, spec)
    script = guest.sent[0][1]
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [*argv, *env.values()]
