"""A container that commands are run in: at most once, killed when given up, and it is told when the container died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import anyio

from rollwright.errors import (
    AmbiguousOutcome,
    LimitError,
    RollwrightError,
    SandboxBroken,
    SandboxGone,
    Unreachable,
    UsageError,
)
from rollwright.sandboxes import ExecResult
from rollwright.sandboxes.docker.command import Command, waiting
from rollwright.sandboxes.docker.daemon import Conflict, Daemon
from rollwright.sandboxes.lease import Lease
from rollwright.sandboxes.namespaces.registry import now

_OUTPUT_LIMIT = 64 << 20
"""Bytes of stdout, and of stderr, of one command."""
_KILL_SECONDS = 10.0
_DYING_LOOKS = 10
"""At a container whose processes may be ending, until the daemon says that it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user inside the box, and the environment of its commands on top of the container's."""

    name: str
    uid: int
    gid: int
    env: Mapping[str, str] = field(default_factory=dict[str, str])


ROOT = User(name="root", uid=0, gid=0)
"""For our own commands, which need no environment."""


class Container:
    """A started container. Its lease is in CLOCK_BOOTTIME seconds."""

    def __init__(self, id: str, daemon: Daemon, *, lease: Lease) -> None:
        self.id = id
        self.daemon = daemon
        self.lease = lease
        self.removed = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        user: User,
        cwd: str = "/",
        input: bytes = b"",
        seconds: float,
        env: Mapping[str, str] | None = None,
        most: int = _OUTPUT_LIMIT,
    ) -> ExecResult:
        """As `Sandbox.exec`, with more environment and another limit for each stream of output."""
        if self.removed:
            raise self._gone("killed")
        if not argv or not argv[0] or any("\0" in text for text in (*argv, cwd)):
            raise UsageError("exec needs an argv without NUL bytes")
        try:
            with anyio.fail_after(seconds):
                command = await self._attach(argv, user, cwd, env or {}, most)
                try:
                    ended = await command.run(input)
                finally:
                    with anyio.CancelScope(shield=True):
                        if command.given_up:
                            await self._kill(command)
                        command.close()
        except TimeoutError as e:
            raise Unreachable(f"{argv[0]} in box {self.id} took longer than {seconds} s", box=self.id) from e
        if command.too_long:
            raise LimitError(f"{argv[0]} wrote more than {most} bytes", box=self.id)
        if ended is None:
            await self._untold(command, argv[0])
        return ExecResult(exit_code=ended.exit_code, stdout=ended.stdout, stderr=ended.stderr)

    async def _attach(self, argv: Sequence[str], user: User, cwd: str, env: Mapping[str, str], most: int) -> Command:
        try:
            exec_id, connection = await self.daemon.attach(
                self.id, waiting(argv, cwd=cwd), user=f"{user.uid}:{user.gid}", env={**user.env, **env}
            )
        except (Conflict, SandboxBroken) as e:
            await self.check_alive()
            raise Unreachable(f"box {self.id} takes no command: {e.message}", box=self.id, sent=False) from e
        return Command(exec_id, connection, most=most)

    async def _kill(self, command: Command) -> None:
        """End a command that was given up. The daemon would let it run on."""
        with anyio.move_on_after(_KILL_SECONDS):
            pid = await command.hear_pid()
            if pid is not None:
                argv = ["sh", "-c", 'kill -KILL "-$1"', "sh", str(pid)]
                try:
                    await self.run(argv, user=ROOT, seconds=_KILL_SECONDS)
                except RollwrightError:
                    # What the caller hears of is the command; a box that is beyond this is beyond the next call too.
                    return

    async def _untold(self, command: Command, name: str) -> NoReturn:
        """The connection ended, but the command did not say how it did. Raises what is known of it.

        That a daemon calls it ended says little: some do so as soon as the connection is cut.
        """
        for _ in range(_DYING_LOOKS):
            if await self._runs(command):
                break
            # Was it killed by the box's own end, then that shows in a moment.
            await anyio.sleep(0.1)
        raise AmbiguousOutcome(f"lost sight of {name} in box {self.id}", box=self.id)

    async def _runs(self, command: Command) -> bool:
        await self.check_alive()
        try:
            state = await self.daemon.call("inspect exec", lambda api: api.exec_inspect(command.exec_id))
        except SandboxGone:
            # A daemon that was restarted knows its containers, but not their commands.
            return False
        return bool(state["Running"])

    # ------------------------------------------------------------------ life

    async def remove(self) -> None:
        """Kill it and all in it. Afterwards it is not there."""
        await self.daemon.remove(self.id)
        self.removed = True

    async def check_alive(self) -> None:
        """Raises `SandboxGone` with the reason, as far as the daemon knows it."""
        try:
            state = (await self.daemon.inspect(self.id))["State"]
        except SandboxGone as e:
            raise self._gone("killed") from e
        if state["Running"]:
            return
        if state.get("OOMKilled"):
            raise self._gone("oom")
        raise self._gone("expired" if now() >= self.lease.until else "killed")

    def _gone(self, reason: str) -> SandboxGone:
        return SandboxGone(f"box {self.id} is gone ({reason})", box=self.id, reason=reason)
