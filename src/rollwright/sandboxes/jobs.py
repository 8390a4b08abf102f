"""The client side of durable jobs, over nothing but a sandbox's `exec`, `put` and `get`. Any backend can use it.

The other half is `supervisor.sh`, which runs inside. Every request here may be repeated: the job's id is claimed once,
by the supervisor itself.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import anyio

from rollwright.errors import AmbiguousOutcome, JobLost, PathNotFound, SandboxBroken, Transient, UsageError
from rollwright.sandboxes import Captured, ExecResult, JobResult, JobSpec, JobState
from rollwright.sandboxes.retry import Retries, Safety

log = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ANSWER = re.compile(rb"^rollwright-job 1 ([0-9a-f]{32}) ([a-z_]+)((?: -?[0-9]{1,18}){7}) ([01])\n", re.MULTILINE)
_MAX_WINDOW = 20
"""Seconds of one long poll: shorter than what gateways tolerate."""
_GROW_AFTER = 4
"""Requests that were not cut, until the window of long polls grows by a second."""
_PAUSE = 0.5
"""Seconds between two polls that may not wait in the box."""
_MARGIN = 30.0
"""Seconds that the supervisor may be late with a deadline before we call the box broken."""
_UNANSWERED = "unanswered"
"""The state of a job whose box had no room to look at it."""
_DASH_ERROR = 2
"""Exit code of a dash that could not fork; bash says so."""
_NO_SUCH_FOLDER = 125
"""Exit code of a job whose `cwd` cannot be entered."""

_ENDED: dict[str, JobState] = {
    "exited": "exited",
    "timeout": "timeout",
    "cancelled": "cancelled",
    "output_limit": "output_limit",
    "oom": "oom",
}


class Plumbing(Protocol):
    """What a backend must have for jobs. The errors are those of `Sandbox`."""

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult: ...

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None: ...

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes: ...


class Launcher(Protocol):
    """`exec` for the call that starts a supervisor, where a backend does more for it than for any other command."""

    async def __call__(self, argv: Sequence[str], *, input: bytes, seconds: float) -> ExecResult: ...


def job_id(*parts: str) -> str:
    """The id of a logical invocation named by the caller, so that a restarted orchestrator finds its job again."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(b"%d:" % len(raw) + raw)
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """One line of the supervisor, and the captured bytes that may follow it."""

    state: str
    code: int
    signal: int
    started: int
    ended: int
    survivors: int
    out: int
    err: int
    inline: bytes | None


class Jobs:
    """The durable jobs of one box."""

    def __init__(
        self,
        box: Plumbing,
        *,
        folder: str = "/run/rollwright",
        launch: Launcher | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._box = box
        self._folder = folder
        self._launch = launch
        self._retries = retries or Retries("sandbox")
        self._install = anyio.Lock()
        self._installed = False
        self._window = _MAX_WINDOW
        self._uncut = 0

    async def start(self, spec: JobSpec, *, window: int = 0) -> DurableJob:
        """Start a job, or find the one that has this id already. Raises as `Sandbox.start`.

        With a `window` the same request also waits up to that many seconds for the end.
        """
        script = _script(spec)
        await self._ensure_installed()
        if spec.stdin:
            path = f"{self._folder}/stdin/{spec.id}"
            await self._retries.call(
                "put a job's stdin", lambda: self._box.put(path, spec.stdin, mode=0o644), Safety.SAFE
            )
        return DurableJob(self, spec, last=await self._start(spec, script, window))

    async def run(self, spec: JobSpec) -> JobResult:
        """Start and wait. When cancelled, the job is ended before the cancellation goes on."""
        try:
            job = await self.start(spec, window=_MAX_WINDOW)
            return await job.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(30 + spec.grace_seconds, shield=True):
                await self._ensure_installed()
                await self.ask(spec, "cancel")
            raise

    async def ask(self, spec: JobSpec, operation: Literal["wait", "cancel", "forget"]) -> _Answer:
        """One long poll."""

        async def once() -> _Answer:
            if self._window == 0 and operation == "wait":
                await anyio.sleep(_PAUSE)
            answer = await self._polled(_MAX_WINDOW, lambda window: self._request(spec.id, operation, window))
            if answer.state == _UNANSWERED and operation != "wait":
                raise AmbiguousOutcome(f"the box could not say what became of a {operation}", job=spec.id)
            return answer

        return await self._retries.call(f"{operation} for a job", once, Safety.SAFE)

    async def _polled(self, most: int, request: Callable[[int], Awaitable[_Answer]]) -> _Answer:
        """A request that may wait in the box. How long shrinks when such requests are cut, and slowly grows again."""
        window = min(most, self._window)
        try:
            answer = await request(window)
        except (Transient, AmbiguousOutcome):
            if window > 0:
                self._window = min(self._window, window // 2)
            self._uncut = 0
            raise
        self._uncut += 1
        if self._uncut % _GROW_AFTER == 0:
            self._window = min(_MAX_WINDOW, self._window + 1)
        return answer

    async def read(self, job: str, name: str) -> bytes:
        """A captured file. One that was never made has nothing in it."""
        try:
            path = f"{self._folder}/jobs/{job}/{name}"
            return await self._retries.call("get a job's output", lambda: self._box.get(path), Safety.SAFE)
        except PathNotFound:
            return b""

    async def _ensure_installed(self) -> None:
        async with self._install:
            if not self._installed:
                source = await anyio.Path(Path(__file__).with_name("supervisor.sh")).read_bytes()
                path = f"{self._folder}/supervisor.sh"
                await self._retries.call("put the supervisor", lambda: self._box.put(path, source), Safety.SAFE)
                self._installed = True

    async def _start(self, spec: JobSpec, script: bytes, window: int) -> _Answer:
        limits = [_hundredths(spec.seconds), _hundredths(spec.idle_seconds or 0), _hundredths(spec.grace_seconds)]
        limits += [spec.head_bytes, spec.tail_bytes, int(spec.merge_stderr), int(spec.keep_background)]
        most = str(spec.output_bytes or 0)

        async def once() -> _Answer:
            more = [*map(str, [len(script), *limits]), spec.user, most]
            answer = await self._polled(
                window, lambda window: self._request(spec.id, "start", window, *more, script=script)
            )
            if answer.state in ("absent", "torn", _UNANSWERED):
                raise AmbiguousOutcome(f"the box did not take job {spec.id}: {answer.state}", job=spec.id)
            return answer

        return await self._retries.call("start a job", once, Safety.SAFE)

    async def _request(self, job: str, operation: str, window: int, *more: str, script: bytes | None = None) -> _Answer:
        argv = ["sh", f"{self._folder}/supervisor.sh", operation, job, str(window), *more]
        seconds = window + 15.0
        if script is not None and self._launch is not None:
            result = await self._launch(argv, input=script, seconds=seconds)
        else:
            result = await self._box.exec(argv, input=script or b"", seconds=seconds)
        return _parse(job, result)


class DurableJob:
    """Handle of a started job. Dropping it does not stop the job."""

    def __init__(self, jobs: Jobs, spec: JobSpec, *, last: _Answer) -> None:
        self._jobs = jobs
        self._spec = spec
        self._last = last

    @property
    def id(self) -> str:
        return self._spec.id

    async def wait(self) -> JobResult:
        """Long-poll until it ended. Raises `JobLost`, `SandboxGone`, and `SandboxBroken` for a deadline not kept."""
        spec = self._spec
        backstop = anyio.current_time() + spec.seconds + spec.grace_seconds + _MARGIN
        while self._last.state in ("running", _UNANSWERED):
            if self._last.state == _UNANSWERED:
                await anyio.sleep(_PAUSE)
            self._last = await self._jobs.ask(spec, "wait")
            if self._last.state in ("running", _UNANSWERED) and anyio.current_time() > backstop:
                raise SandboxBroken(f"job {spec.id} outlived its deadline of {spec.seconds} s", job=spec.id)
        return await self._result(self._last)

    async def cancel(self) -> JobResult:
        """End it and its whole tree now. What had ended before keeps its own record. Raises as `wait`."""
        self._last = await self._jobs.ask(self._spec, "cancel")
        return await self.wait()

    async def forget(self) -> None:
        """Drop what the box still has of it. Raises `UsageError` while it runs."""
        self._last = await self._jobs.ask(self._spec, "forget")
        if self._last.state == "running":
            raise UsageError(f"job {self.id} runs, so there is nothing to forget", job=self.id)

    async def _result(self, answer: _Answer) -> JobResult:
        spec = self._spec
        state = _ENDED.get(answer.state)
        if state is None:
            raise JobLost(f"job {spec.id} has no record ({answer.state})", job=spec.id, state=answer.state)
        if answer.survivors:
            log.warning("job %s ended, and %d of its processes could not be killed", spec.id, answer.survivors)
        out, err = await self._captured(answer)
        return JobResult(
            id=spec.id,
            state=state,
            exit_code=None if answer.signal else answer.code,
            signal=answer.signal or None,
            seconds=(answer.ended - answer.started) / 100,
            stdout=out,
            stderr=err,
            survivors=answer.survivors,
        )

    async def _captured(self, answer: _Answer) -> tuple[Captured, Captured]:
        sizes: list[int] = []
        for total in (answer.out, answer.err):
            head = min(total, self._spec.head_bytes)
            sizes += [head, min(total - head, self._spec.tail_bytes)]
        if answer.inline is not None and len(answer.inline) == sum(sizes):
            parts: list[bytes] = []
            start = 0
            for size in sizes:
                parts.append(answer.inline[start : start + size])
                start += size
        else:
            names = ("out.head", "out.tail", "err.head", "err.tail")
            parts = [
                await self._jobs.read(self.id, name) if size else b"" for name, size in zip(names, sizes, strict=True)
            ]
        out = Captured(head=parts[0], tail=parts[1], total=answer.out)
        return out, Captured(head=parts[2], tail=parts[3], total=answer.err)


def _hundredths(seconds: float) -> int:
    return math.ceil(seconds * 100)


def _script(spec: JobSpec) -> bytes:
    """The file that becomes the job. Raises `UsageError` for what no shell can carry."""
    if not _ID.fullmatch(spec.id):
        raise UsageError(f"a job id is 32 hex digits, not {spec.id!r}")
    if spec.user not in ("root", "agent"):
        raise UsageError(f"a job's user is root or agent, not {spec.user!r}")
    if not spec.argv or not spec.argv[0]:
        raise UsageError("a job needs an argv")
    for name in spec.env:
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of an environment variable")
    if any("\0" in text for text in (*spec.argv, *spec.env.values(), spec.cwd)):
        raise UsageError("a job's argv, env and cwd cannot hold a NUL byte")
    cwd = shlex.quote(spec.cwd if spec.cwd.startswith("/") else f"./{spec.cwd}")
    lines = ["exec 7<&-", f"cd {cwd} || exit {_NO_SUCH_FOLDER}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    lines.append(f"exec {shlex.join(spec.argv)}")
    return "\n".join([*lines, ""]).encode(errors="surrogateescape")


def _parse(job: str, result: ExecResult) -> _Answer:
    """Find our line. What a login shell printed before it does not matter. Raises `SandboxBroken`.

    A shell that ended without a word could not fork: a job has left no room for processes, and its supervisor is about
    to end it.
    """
    for found in _ANSWER.finditer(result.stdout):
        identity, state, numbers, inline = found.groups()
        if identity.decode() == job:
            code, signal, started, ended, survivors, out, err = map(int, numbers.split())
            return _Answer(
                state=state.decode(),
                code=code,
                signal=signal,
                started=started,
                ended=ended,
                survivors=survivors,
                out=out,
                err=err,
                inline=result.stdout[found.end() :] if inline == b"1" else None,
            )
    if not result.stdout and (result.exit_code == _DASH_ERROR or b"fork" in result.stderr):
        return _Answer(state=_UNANSWERED, code=0, signal=0, started=0, ended=0, survivors=0, out=0, err=0, inline=None)
    said = (result.stderr or result.stdout)[:300].decode(errors="replace")
    raise SandboxBroken(f"the supervisor's answer is unreadable (exit {result.exit_code}): {said}", job=job)
