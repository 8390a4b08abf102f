"""The processes of a box that clients started: their output to whoever listens, their end to whoever asks in time."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rollwright.e2b_server.connect import RpcError
from rollwright.errors import SandboxError, UsageError
from rollwright.sandboxes.namespaces.box import NamespacesSandbox, Spawned

__all__ = ["Command", "Event", "Process", "Processes"]

Event = Mapping[str, Any]

_CHUNK = 1 << 15
_BEHIND = 64
"""Events that a listener may be behind before the command has to wait for it."""
_KEPT_SECONDS = 30.0
"""How long the end of a process can still be asked for."""
_LONGEST_FIRST_LINE = 20
_SIGNALS = {"SIGNAL_SIGTERM": "TERM", "SIGNAL_SIGKILL": "KILL", 15: "TERM", 9: "KILL"}

# The box tells us the number that a process has inside: it is printed before the command takes its place.
_TELL_PID = 'echo $$; exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is to be started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    user: str
    stdin: bool
    """Input follows in later calls; otherwise it is empty."""
    tag: str | None
    seconds: float | None
    """After which the process itself, not what it started, is killed."""


class Process:
    """One started command. It goes on whether somebody listens or not; what it writes unheard is lost."""

    def __init__(self, box: NamespacesSandbox, command: Command) -> None:
        self.command = command
        self.pid = 0
        self.end: Event | None = None
        self.ended_at = 0.0
        self._box = box
        self._listeners: list[MemoryObjectSendStream[Event]] = []
        self._stdin = -1
        self._typing = anyio.Lock()

    # ------------------------------------------------------------------ from its start to its end

    async def open(self, group: TaskGroup) -> MemoryObjectReceiveStream[Event]:
        """Start it and let it run in `group`. Returns all its events; the caller closes them. Raises `RpcError`."""
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                out, out_write = _pipe(ours, theirs)
                err, err_write = _pipe(ours, theirs)
                stdin = self._open_stdin(ours, theirs)
                try:
                    spawned = await self._box.spawn(
                        ["/bin/sh", "-c", _TELL_PID, "sh", *self.command.argv],
                        user=self.command.user,
                        cwd=self.command.cwd,
                        env=self.command.env,
                        stdin=stdin,
                        stdout=out_write,
                        stderr=err_write,
                    )
                except UsageError as e:
                    raise RpcError("invalid_argument", e.message) from e
            ours.callback(spawned.close)
            self.pid = await _read_pid(out, err)
            events = self.listen()
            group.start_soon(self._run, spawned, out, err, ours.pop_all())
            return events

    def _open_stdin(self, ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> int:
        if not self.command.stdin:
            fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        else:
            fd, self._stdin = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._stdin, False)
            ours.callback(self._close_stdin)
        theirs.callback(os.close, fd)
        return fd

    async def _run(self, spawned: Spawned, out: int, err: int, resources: contextlib.ExitStack) -> None:
        with resources:
            resources.callback(self._hang_up)
            code: int | None = None
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._pump, out, "stdout")
                tasks.start_soon(self._pump, err, "stderr")
                tasks.start_soon(self._end_in_time)
                with contextlib.suppress(SandboxError):
                    code = await spawned.wait()
                tasks.cancel_scope.cancel()
            # Who holds the pipes beyond the command's own end is not waited for, what is in them is delivered.
            for fd, name in ((out, "stdout"), (err, "stderr")):
                while chunk := _read(fd):
                    await self._tell({"data": {name: base64.b64encode(chunk).decode()}})
            self.ended_at = anyio.current_time()
            self.end = {"end": _describe(code)}
            await self._tell(self.end)

    def _hang_up(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _pump(self, fd: int, name: str) -> None:
        while True:
            await anyio.wait_readable(fd)
            chunk = _read(fd)
            if chunk is None:
                continue
            if not chunk:
                return
            # Shielded, because the end of the command must not swallow what was read.
            with anyio.CancelScope(shield=True):
                await self._tell({"data": {name: base64.b64encode(chunk).decode()}})

    async def _end_in_time(self) -> None:
        if self.command.seconds is not None:
            await anyio.sleep(self.command.seconds)
            with contextlib.suppress(SandboxError):
                await self._box.exec(["kill", "-KILL", str(self.pid)])

    async def _tell(self, event: Event) -> None:
        for listener in list(self._listeners):
            try:
                await listener.send(event)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                # Of the two streams either may find out first that it left.
                listener.close()
                self._listeners = [other for other in self._listeners if other is not listener]

    # ------------------------------------------------------------------ what clients do with it

    def listen(self) -> MemoryObjectReceiveStream[Event]:
        """What happens from now on, opened by its `start`; ends after its `end`. The caller closes it."""
        send, receive = anyio.create_memory_object_stream[Event](_BEHIND)
        send.send_nowait({"start": {"pid": self.pid}})
        if self.end is None:
            self._listeners.append(send)
        else:
            send.send_nowait(self.end)
            send.close()
        return receive

    async def signal(self, number: object) -> None:
        """Signal the process itself. Raises `RpcError`."""
        name = _SIGNALS.get(number) if isinstance(number, (str, int)) else None
        if name is None:
            raise RpcError("invalid_argument", f"no such signal: {number!r}")
        if self.end is not None or (await self._box.exec(["kill", f"-{name}", str(self.pid)])).exit_code:
            raise RpcError("not_found", f"process {self.pid} has ended")

    async def type(self, data: bytes) -> None:
        """Write to its stdin. Raises `RpcError`."""
        async with self._typing:
            view = memoryview(data)
            while view:
                if self._stdin < 0:
                    raise RpcError("failed_precondition", f"process {self.pid} has no open stdin")
                try:
                    view = view[os.write(self._stdin, view) :]
                except BlockingIOError:
                    await anyio.wait_writable(self._stdin)
                except BrokenPipeError as e:
                    raise RpcError("failed_precondition", f"process {self.pid} reads no more") from e

    async def close_stdin(self) -> None:
        async with self._typing:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def info(self) -> dict[str, Any]:
        command = self.command
        cmd, *args = command.argv
        config = {"cmd": cmd, "args": args, "envs": dict(command.env), "cwd": command.cwd}
        return {"config": config, "pid": self.pid} | ({} if command.tag is None else {"tag": command.tag})


class Processes:
    """The process table of one box."""

    def __init__(self, box: NamespacesSandbox, group: TaskGroup) -> None:
        self._box = box
        self._group = group
        self._table: dict[int, Process] = {}

    async def start(self, command: Command) -> MemoryObjectReceiveStream[Event]:
        """Start a process. Returns its events; the caller closes them. Raises `RpcError`, `SandboxGone`."""
        process = Process(self._box, command)
        events = await process.open(self._group)
        self._forget_old()
        self._table[process.pid] = process
        return events

    def running(self) -> Sequence[Process]:
        return [process for process in self._table.values() if process.end is None]

    def find(self, selector: object) -> Process:
        """By `{"pid": N}` or `{"tag": TEXT}`; also one that ended a moment ago. Raises `RpcError`."""
        self._forget_old()
        if isinstance(selector, dict):
            for process in self._table.values():
                if selector in ({"pid": process.pid}, {"tag": process.command.tag}):
                    return process
        raise RpcError("not_found", f"no such process: {selector}")

    def _forget_old(self) -> None:
        old = anyio.current_time() - _KEPT_SECONDS
        self._table = {pid: p for pid, p in self._table.items() if p.end is None or p.ended_at > old}


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    ours.callback(os.close, read_end)
    theirs.callback(os.close, write_end)
    return read_end, write_end


def _read(fd: int, size: int = _CHUNK) -> bytes | None:
    """What is there; empty at the end, None when nothing is there now."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None


async def _read_pid(out: int, err: int) -> int:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_FIRST_LINE:
        await anyio.wait_readable(out)
        byte = _read(out, 1)
        if byte == b"":
            said = (_read(err) or b"").decode(errors="replace").strip()
            raise RpcError("invalid_argument", f"the command cannot be started in this folder as this user {said}")
        line += byte or b""
    return int(line)


def _describe(code: int | None) -> Event:
    """The end in envd's words. None: the box went away with it."""
    if code is not None and code >= 0:
        status = f"exit status {code}"
        return {"exitCode": code, "exited": True, "status": status} | ({"error": status} if code else {})
    number = signal.SIGKILL if code is None else -code
    # Of the real-time signals only the first and the last have a name.
    name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
    return {"exitCode": -1, "exited": False, "status": f"signal: {name}", "error": f"signal: {name}"}
