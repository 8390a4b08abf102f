"""A provider of boxes that do nothing and of failures that were asked for. Time is a number that only waiting moves."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel

from rollwright.errors import RollwrightError, SandboxGone
from rollwright.sandboxes import BoxInfo, Capabilities, ExecResult, Job, JobResult, JobSpec, Sandbox, SandboxSpec


class IdleBox:
    """A `Sandbox` that can be renewed, closed and killed."""

    def __init__(self, id: str, spec: SandboxSpec) -> None:
        self.id = id
        self.spec = spec
        self.lease = spec.lifetime_seconds
        self.dead = False
        self.closed = False

    @property
    def gateway_socket(self) -> socket.socket | None:
        return None

    async def start(self, spec: JobSpec) -> Job:
        raise NotImplementedError

    async def run(self, spec: JobSpec) -> JobResult:
        raise NotImplementedError

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        raise NotImplementedError

    async def put(self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644) -> None:
        raise NotImplementedError

    async def put_tree(self, source: Path, target: str, *, user: str = "root") -> None:
        raise NotImplementedError

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        raise NotImplementedError

    async def renew(self, seconds: float) -> None:
        await anyio.lowlevel.checkpoint()
        if self.dead:
            raise SandboxGone(f"box {self.id} is gone", box=self.id)
        self.lease = seconds

    async def close(self) -> None:
        self.closed = True


@dataclass
class Script:
    """A `Provider`. `failures`: what the next boots raise, None for a good one. `broken`: images that are not there."""

    failures: list[RollwrightError | None] = field(default_factory=list)
    broken: Mapping[str, RollwrightError] = field(default_factory=dict)
    boot_seconds: float = 0.0
    now: float = 1000.0
    boots: list[tuple[float, str]] = field(default_factory=list)
    """When each began, and its key."""
    booting: int = 0
    most_booting: int = 0
    checked: list[str] = field(default_factory=list)
    boxes: list[IdleBox] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Everybody who waits is woken in order of time."""
        assert seconds >= 0
        until = self.now + seconds
        await anyio.lowlevel.checkpoint()
        self.now = max(self.now, until)

    @property
    def open(self) -> list[IdleBox]:
        return [box for box in self.boxes if not box.closed]

    async def probe(self) -> Capabilities:
        return Capabilities(
            name="script", pid_namespace=True, users=True, tamper_evident=True, networks=frozenset({"none"})
        )

    async def check_image(self, image: str) -> None:
        self.checked.append(image)
        await anyio.lowlevel.checkpoint()
        if image in self.broken:
            raise self.broken[image]

    async def create(self, spec: SandboxSpec, *, key: str) -> Sandbox:
        self.boots.append((self.now, key))
        self.booting += 1
        self.most_booting = max(self.most_booting, self.booting)
        try:
            await anyio.sleep(self.boot_seconds)
        finally:
            self.booting -= 1
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        self.boxes.append(IdleBox(f"box{len(self.boxes)}", spec))
        return self.boxes[-1]

    async def list(self) -> list[BoxInfo]:
        return [
            BoxInfo(
                id=box.id,
                labels=box.spec.labels,
                alive=not box.dead,
                owner_alive=True,
                age_seconds=0,
                lease_seconds_left=box.lease,
            )
            for box in self.open
        ]

    async def reap(self, *, everything: bool = False) -> list[str]:
        return []

    async def close(self) -> None:
        for box in self.boxes:
            await box.close()
