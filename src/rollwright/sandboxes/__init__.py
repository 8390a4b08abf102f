"""Sandboxes: isolated machines and the durable jobs in them. One file a backend; this is the contract.

A non-zero exit, a timeout or an OOM of a job is a *value* in `JobResult`. Exceptions are for us failing:
`Transient`, `AmbiguousOutcome`, `SandboxGone`, `JobLost`, `ProvisionFailed`, `SandboxBroken`, `LimitError`,
`UsageError`.
A failed read raises; it is never `b""`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

__all__ = [
    "Attaches",
    "BoxInfo",
    "Capabilities",
    "Captured",
    "ExecResult",
    "Job",
    "JobResult",
    "JobSpec",
    "JobState",
    "Mount",
    "Network",
    "Provider",
    "Sandbox",
    "SandboxSpec",
    "Sweeps",
]

Network = Literal["gateway_only", "none", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this backend can do here, found by probing."""

    name: str
    pid_namespace: bool
    users: bool
    """A second uid exists, so the agent is not the supervisor's user."""
    tamper_evident: bool
    """Job records cannot be forged by the job."""
    networks: frozenset[Network]
    memory_limit: bool = False
    pids_limit: bool = False
    cpu_limit: bool = False
    disk_limit: bool = False
    """`disk_mb` bounds all that a box writes, not only single files."""
    attach: bool = False
    """Boxes outlive their process for a while, and the provider is one that `Attaches`."""
    mounts: bool = False
    """Host folders can be shown read-only."""
    gateway: Literal["socket", "url"] = "socket"
    """How a `gateway_only` box reaches the gateway: by a socket in it that the host serves, or, being on another
    machine, at the `gateway_url` of its spec."""
    tree_kill: Literal["pid_namespace", "cgroup", "subreaper", "environment"] = "pid_namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A host folder shown read-only inside."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What box is wanted."""

    image: str
    """Resolved by the provider; see `docs/configuration.md` for the namespaces backend."""
    network: Network = "none"
    gateway_port: int = 18001
    """With `gateway_only`: the port inside the box whose listening socket the host holds."""
    gateway_host: str = "127.0.0.1"
    """And its address there. Another one than loopback's is given to the box's loopback device (`namespaces` only)."""
    gateway_url: str | None = None
    """With `gateway_only`, for a backend whose boxes are on other machines: the one address they may reach."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    mounts: tuple[Mount, ...] = ()
    memory_mb: int | None = None
    pids: int | None = None
    cpus: float | None = None
    """Cpu time a second, in seconds: 1.5 is one and a half cpus."""
    disk_mb: int = 2048
    """Size of the writable layer."""
    lifetime_seconds: float = 7200
    boot_seconds: float = 120
    """Longest boot, without waiting for its turn. Kept by `PacedProvider`."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    survives: bool = True
    """Whether another process may want it when ours dies (see `Attaches`); else it ends with ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A short raw command's end."""

    exit_code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One durable command."""

    id: str
    """32 hex digits, chosen by the caller, one per logical invocation. Starting the same id again is harmless."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Exact: added to HOME, USER, LOGNAME and PATH of the user, and the image's environment. No login shell."""
    cwd: str = "/"
    user: str = "root"
    """`root` or `agent`."""
    stdin: bytes = b""
    seconds: float = 600
    """Deadline kept inside the box by a monotonic clock."""
    idle_seconds: float | None = None
    """Longest time without output."""
    grace_seconds: float = 2
    """Between TERM and KILL."""
    head_bytes: int = 1 << 20
    tail_bytes: int = 1 << 20
    """Of stdout and of stderr each; what lies between is counted and dropped."""
    output_bytes: int | None = None
    """More than so much on stdout, or on stderr, ends the job (`output_limit`). None: as much as it likes."""
    merge_stderr: bool = False
    """One ordered stream: stderr goes into stdout."""
    keep_background: bool = False
    """True: what the job left running stays. Otherwise the whole tree is killed, also after a normal exit."""


JobState = Literal["exited", "timeout", "cancelled", "output_limit", "oom", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One output stream, binary."""

    head: bytes
    tail: bytes
    """What came after `head`; empty when everything fits in the head."""
    total: int
    """Bytes the job wrote."""

    @property
    def truncated(self) -> bool:
        return self.total > len(self.head) + len(self.tail)

    def data(self) -> bytes:
        """Head and tail, with a marked gap between when something was dropped."""
        if not self.truncated:
            return self.head + self.tail
        gap = self.total - len(self.head) - len(self.tail)
        return self.head + b"\n[... %d bytes dropped ...]\n" % gap + self.tail

    def text(self) -> str:
        """For people: decoded once, at the end."""
        return self.data().decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """A job's end."""

    id: str
    state: JobState
    exit_code: int | None
    """None when a signal ended it or it is lost."""
    signal: int | None
    seconds: float
    """By the box's monotonic clock."""
    stdout: Captured
    stderr: Captured
    survivors: int = 0
    """Processes still alive after the kill; anything but 0 is a bug to report, and is logged."""

    @property
    def ok(self) -> bool:
        return self.state == "exited" and self.exit_code == 0


class Job(Protocol):
    """A started job. Dropping the handle does not stop the job."""

    @property
    def id(self) -> str: ...

    async def wait(self) -> JobResult:
        """Long-poll until it ended. Cancelling the wait does not cancel the job. Raises `SandboxGone`, `JobLost`."""
        ...

    async def cancel(self) -> JobResult:
        """End it and its whole tree now; the record's state is `cancelled` unless it had already ended."""
        ...

    async def forget(self) -> None:
        """Say that its result is stored elsewhere, so that the box may drop what it captured.

        Its id stays taken: whoever asks for the job again gets `JobLost`. Raises `UsageError` while it runs.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxInfo:
    """One box as the backend's registry has it."""

    id: str
    labels: Mapping[str, str]
    alive: bool
    owner_alive: bool
    """Whether the process that made it still runs."""
    age_seconds: float
    lease_seconds_left: float


class Sandbox(Protocol):
    """One isolated machine. `agent` and `root` are its users."""

    @property
    def id(self) -> str: ...

    @property
    def gateway_socket(self) -> socket.socket | None:
        """With `gateway_only`: the listening socket inside the box, held by the host. The box's `close` closes it.

        None where the capability `gateway` is `url`.
        """
        ...

    async def start(self, spec: JobSpec) -> Job:
        """Start a durable job. Replay-safe by `spec.id`: it runs at most once."""
        ...

    async def run(self, spec: JobSpec) -> JobResult:
        """Start and wait. Cancelling it cancels the job (shielded). How it ended is a value; only `JobLost` raises."""
        ...

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        """A short command, at most once, no record. For probes and plumbing. A timeout raises `Unreachable`."""
        ...

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None:
        """Write a file atomically, making parent folders."""
        ...

    async def put_tree(self, source: Path, target: str, *, user: str = "root") -> None:
        """Copy a host folder in, links and modes kept."""
        ...

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Read a file (or a range). Raises `PathNotFound`; `LimitError` above 256 MiB."""
        ...

    async def renew(self, seconds: float) -> None:
        """Push the lease out."""
        ...

    async def close(self) -> None:
        """Remove the box and everything in it. Idempotent, shielded."""
        ...


@runtime_checkable
class Attaches(Protocol):
    """A provider that can take over boxes whose process has died (where it has the capability `attach`)."""

    async def attach(self, key: str) -> Sandbox:
        """The box made under this key. Raises `SandboxGone` when it is no more, `UsageError` when it is in use."""
        ...

    def known_as(self, key: str) -> str:
        """What another process has to `attach` to, for the box that `create` gave for this key: the key itself, but
        for one that was made ahead under a key of its own."""
        ...


@runtime_checkable
class Sweeps(Protocol):
    """A provider whose boxes outlive the machine that made them, and can be removed from another one."""

    @property
    def maker(self) -> str:
        """Names this provider as the maker of its boxes, and no other one. Empty: its boxes end with this machine."""
        ...

    async def sweep(self, maker: str) -> list[str]:
        """Remove what a provider that is gone, here or elsewhere, has left. Returns the boxes' ids.

        Raises `SandboxError`.
        """
        ...


class Provider(Protocol):
    """Makes sandboxes. `options` of the run file's `[sandbox]` table reach the constructor as keywords."""

    async def probe(self) -> Capabilities:
        """Find out what works here. Raises `Unsupported` with the one sentence that says what to enable."""
        ...

    async def check_image(self, image: str) -> None:
        """Before step 0. Raises `ConfigError` naming the image and where it was looked for."""
        ...

    async def create(self, spec: SandboxSpec, *, key: str) -> Sandbox:
        """Boot a box. Replay-safe by `key`. Raises `ProvisionFailed`."""
        ...

    async def list(self) -> list[BoxInfo]:
        """Boxes in this backend's registry, alive or not."""
        ...

    async def reap(self, *, everything: bool = False) -> list[str]:
        """Remove boxes whose owner is dead or whose lease ran out (or all of them). Returns their ids."""
        ...

    async def close(self) -> None:
        """Remove the boxes that this provider made and that are still open, and let go of its own resources."""
        ...
