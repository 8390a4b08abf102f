"""The provider: probes, boots, lists and reaps boxes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from rollwright.errors import ConfigError, ProvisionFailed, SandboxError, SandboxGone, Unsupported, UsageError
from rollwright.sandboxes import BoxInfo, Capabilities, Mount, SandboxSpec
from rollwright.sandboxes.namespaces import cgroups, idmap
from rollwright.sandboxes.namespaces.box import Inside, NamespacesSandbox
from rollwright.sandboxes.namespaces.client import Connection, ServerClient, Visitor, receive, remove_dead_doors
from rollwright.sandboxes.namespaces.images import Image, Images
from rollwright.sandboxes.namespaces.layers import Layers
from rollwright.sandboxes.namespaces.registry import Process, Record, Registry, boot_id, now
from rollwright.sandboxes.retry import Retries, Tally

_BOOT_SECONDS = 60.0
_JOBS_MB = 512
"""Bound of what the records and captured output of all jobs of a box may take."""
_NOT_ALLOWED = {errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL, errno.ENOSYS, errno.EUSERS}
_HOW_TO_ALLOW = (
    "this system does not let us make user namespaces; enable them with `sysctl -w user.max_user_namespaces=15000`, "
    "on Debian also `kernel.unprivileged_userns_clone=1`, on Ubuntu also "
    "`kernel.apparmor_restrict_unprivileged_userns=0`, in a container run it with `--privileged`"
)
_EARLY_STEPS = {
    "make a user namespace",
    "map the user",
    "map the users",
    "become root of the box",
    "make the namespaces",
    "detach from the host's mounts",
    "mount the writable layer",
    "mount /proc",
}


class NamespacesProvider:
    """A `Provider` of boxes made of Linux namespaces on this machine. Works as root and as an ordinary user.

    `images` is the folder of image descriptions and image files, `archives` image files by the name that rows use,
    `rootfs` the absolute folders that may be named as images (a name comes from a row, so nothing else of this machine
    can be), `state_dir` the registry's place, `cache_dir` that of unpacked image files, `boot_concurrency` how many
    boxes boot at the same time. `survive`: seconds that boxes live on when this process dies without closing them, in
    which another one may `attach` to them.
    """

    def __init__(
        self,
        *,
        state_dir: Path | str,
        cache_dir: Path | str | None = None,
        images: Path | str | None = None,
        archives: Mapping[str, Path] | None = None,
        rootfs: tuple[str, ...] = (),
        survive: float = 0,
        boot_concurrency: int = 4,
    ) -> None:
        if boot_concurrency < 1:
            field = "sandbox.namespaces.boot_concurrency"
            raise ConfigError(f"{field} must be at least 1", field=field)
        self._state = Path(state_dir).absolute()
        folder = None if images is None else Path(images).absolute()
        self._images = Images(
            folder,
            skeletons=self._state / "skeletons",
            layers=Layers(
                self._state / "layers" if cache_dir is None else Path(cache_dir).absolute(), maps=self._look_around
            ),
            rootfs=rootfs,
            archives=archives,
        )
        self._registry = Registry(self._state / "boxes")
        if survive < 0:
            raise ConfigError("sandbox.namespaces.survive cannot be negative", field="sandbox.namespaces.survive")
        self._survive = survive
        self._server = ServerClient(doors=self._state / "servers", survives=survive) if survive else ServerClient()
        self._visits: dict[str, Visitor] = {}
        self._failed: Counter[tuple[str, str]] = Counter()
        self._boot_slots = anyio.Semaphore(boot_concurrency)
        self._open: dict[str, NamespacesSandbox] = {}
        self._keys: dict[str, anyio.Lock] = {}
        self._limits: cgroups.Hierarchy | None = None
        self._maps: idmap.Maps | None = None
        self._capabilities: Capabilities | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def tally(self) -> Tally:
        """What failed so far."""
        return Tally(failures=dict(self._failed))

    async def close(self) -> None:
        """Remove the boxes that are still open, and the server process. Raises the first error of one that stays."""
        failed: list[SandboxError] = []
        with anyio.CancelScope(shield=True):
            for box in list(self._open.values()):
                try:
                    await box.close()
                except SandboxError as e:
                    failed.append(e)
            for visitor in self._visits.values():
                visitor.close()
            self._server.close()
        if failed:
            raise failed[0]

    def _look_around(self) -> idmap.Maps:
        """What this machine gives us; asked once."""
        if self._maps is None:
            self._maps = idmap.find()
            self._limits = cgroups.find()
        return self._maps

    async def probe(self) -> Capabilities:
        """Boot a box and run a command in it. Raises `Unsupported`."""
        if self._capabilities is None:
            try:
                box = await self.create(
                    SandboxSpec(image="host", disk_mb=64, survives=False), key=f"probe-{secrets.token_hex(8)}"
                )
            except ProvisionFailed as e:
                raise Unsupported(f"no namespaces sandbox here: {e.message}", **e.details) from e
            try:
                # An overlay that cannot hide a folder of the image breaks `rm -r` and `git checkout` in odd ways.
                result = await box.exec(["sh", "-c", "rmdir /srv && mkdir /srv"])
            finally:
                await box.close()
            if result.exit_code:
                said = result.stderr.decode(errors="replace").strip()
                raise Unsupported(f"no namespaces sandbox here: overlay on tmpfs needs Linux 6.6 or newer ({said})")
            maps, limits = self._look_around(), self._limits
            self._capabilities = Capabilities(
                name="namespaces",
                pid_namespace=True,
                users=not maps.single,
                tamper_evident=not maps.single,
                networks=frozenset({"gateway_only", "none", "open"}),
                memory_limit=limits is not None and limits.memory is not None,
                pids_limit=limits is not None and limits.pids is not None,
                cpu_limit=limits is not None and limits.cpu is not None,
                disk_limit=True,
                mounts=True,
                attach=self._survive > 0,
                tree_kill="pid_namespace",
            )
        return self._capabilities

    async def check_image(self, image: str) -> None:
        """Also unpacks an image file, which its first box would have to wait for. Raises `StoreError` too."""
        await self._resolve(image)

    async def _resolve(self, name: str) -> Image:
        if not await anyio.to_thread.run_sync(self._images.ready, name):
            # Layers are unpacked for the ids that boxes have, which only a box that came up tells.
            await self.probe()
        return await anyio.to_thread.run_sync(self._images.resolve, name)

    async def image_digest(self, image: str) -> str:
        """Changes when the image's description does."""
        return await anyio.to_thread.run_sync(self._images.digest, image)

    async def create(self, spec: SandboxSpec, *, key: str) -> NamespacesSandbox:
        """Boot a box, or return the open one of this key. Raises `ProvisionFailed`, `ConfigError`, `Unsupported`."""
        async with self._keys.setdefault(key, anyio.Lock()):
            if key in self._open and self._open[key].dead:
                await self._open[key].close()
            if key not in self._open:
                if self._survive:
                    await self._end_waiting(key)
                image = await self._resolve(spec.image)
                async with self._boot_slots:
                    self._open[key] = await self._boot_with_best_maps(spec, image, key)
            return self._open[key]

    async def _boot_with_best_maps(self, spec: SandboxSpec, image: Image, key: str) -> NamespacesSandbox:
        """A range of ids is better than one, but the tool that grants it may refuse for reasons of its own."""
        try:
            return await self._boot(spec, image, key)
        except ProvisionFailed as e:
            if e.details.get("step") != "map the users" or self._look_around().single:
                raise
            self._maps = idmap.own_id_alone()
            return await self._boot(spec, image, key)

    async def _boot(self, spec: SandboxSpec, image: Image, key: str) -> NamespacesSandbox:
        maps = self._look_around()
        limits = self._limits
        if spec.memory_mb is not None and (limits is None or limits.memory is None):
            raise Unsupported("memory_mb: no memory cgroup is writable here")
        if spec.pids is not None and (limits is None or limits.pids is None):
            raise Unsupported("pids: no pids cgroup is writable here")
        if spec.cpus is not None and (limits is None or limits.cpu is None):
            raise Unsupported("cpus: no cpu cgroup is writable here")
        box = secrets.token_hex(8)
        groups = [] if limits is None else limits.groups(box, cpu=spec.cpus is not None)
        inside = Inside(
            users=image.users,
            env=dict(image.env) | dict(spec.env),
            network=spec.network,
            single=maps.single,
            cgroups=groups,
        )
        record = Record(
            id=box,
            key=key,
            labels=dict(spec.labels),
            boot=boot_id(),
            owner=_myself(),
            init=None,
            created=now(),
            lease_until=now() + spec.lifetime_seconds,
            cgroups=tuple(str(group) for group in groups),
            survives=self._survive if spec.survives else 0,
            inside=inside.dump() if self._survive and spec.survives else None,
        )
        # Before anything is made, so that whatever a kill leaves behind can be found.
        self._registry.write(record)
        try:
            if limits is not None:
                try:
                    limits.create(box, memory_mb=spec.memory_mb, pids=spec.pids, cpus=spec.cpus)
                except OSError as e:
                    raise ProvisionFailed(f"box {box}: cannot make its cgroup: {e}", box=box) from e
            plan = self._plan(spec, image, maps, groups, record)
            pid, fds = await self._ask_for_boot(plan)
            door = None if self._server.door is None else str(self._server.door)
            self._registry.write(replace(record, init=Process.of(pid), door=door))
        except BaseException:
            with anyio.CancelScope(shield=True):
                # It may have come up although nobody waits for it any more.
                with await self._server.request({"op": "end", "box": box}) as reply:
                    await receive(reply)
                await self._release(record)
            raise
        return self._held(record, inside, fds, self._server)

    def _held(self, record: Record, inside: Inside, fds: list[int], server: Connection) -> NamespacesSandbox:
        """The box that a server gave us the descriptors of."""
        return NamespacesSandbox(
            id=record.id,
            server=server,
            pidfd=fds[0],
            gateway=socket.socket(fileno=fds[1]) if len(fds) > 1 else None,
            inside=inside,
            store=self._registry,
            lease_until=record.lease_until,
            release=lambda: self._release(record),
            # Each box its own: one that does not answer says nothing of the others.
            retries=Retries("namespaces", counts=self._failed),
        )

    async def _release(self, record: Record) -> None:
        self._open.pop(record.key, None)
        await cgroups.remove([Path(group) for group in record.cgroups])
        self._registry.remove(record.id)

    def _plan(
        self, spec: SandboxSpec, image: Image, maps: idmap.Maps, groups: list[Path], record: Record
    ) -> dict[str, Any]:
        stage = self._state / "stage"
        stage.mkdir(parents=True, exist_ok=True)
        mounts = [*image.mounts, *spec.mounts]
        if spec.network == "open":
            mounts.append(Mount(source=Path("/etc/resolv.conf").resolve(), target="/etc/resolv.conf"))
        oom = None if self._limits is None else self._limits.oom_file(record.id)
        if oom is not None and oom.exists():
            mounts.append(Mount(source=oom, target="/run/rollwright/oom"))
        for mount in mounts:
            if not mount.source.exists() or not mount.target.startswith("/"):
                raise ConfigError(
                    f"cannot show {mount.source} at {mount.target}: no such source, or target not absolute"
                )
        agent = image.users["agent"]
        return {
            "op": "create",
            "id": record.id,
            "record": str(self._registry.path(record.id)),
            "expires": record.lease_until,
            "survives": record.survives > 0,
            "stage": str(stage),
            "disk_mb": spec.disk_mb,
            "jobs_mb": _JOBS_MB,
            "overlays": [{"target": o.target, "lowers": list(o.lowers)} for o in image.overlays],
            "binds": [{"source": str(m.source), "target": m.target} for m in mounts],
            "network": spec.network,
            "gateway_host": spec.gateway_host,
            "gateway_port": spec.gateway_port,
            "agent": {"uid": agent.uid, "gid": agent.gid, "home": agent.home},
            "cgroups": [str(group / "cgroup.procs") for group in groups],
            "single": maps.single,
            "outside": os.geteuid() == 0 and not maps.single,
            "uid_map": maps.uid,
            "gid_map": maps.gid,
        }

    async def _ask_for_boot(self, plan: dict[str, Any]) -> tuple[int, list[int]]:
        box = plan["id"]
        try:
            with anyio.fail_after(_BOOT_SECONDS), await self._server.request(plan) as reply:
                answer = await receive(reply)
        except TimeoutError as e:
            raise ProvisionFailed(f"box {box} did not boot in {_BOOT_SECONDS:.0f} s", box=box) from e
        if answer is None:
            raise ProvisionFailed(f"box {box} died while booting", box=box)
        message, fds = answer
        if "error" in message:
            step, number, text = message["error"], message.get("errno", 0), message["text"]
            if step in _EARLY_STEPS and number in _NOT_ALLOWED:
                text = f"{_HOW_TO_ALLOW} ({text})"
            raise ProvisionFailed(text, box=box, step=step, errno=number)
        return message["pid"], fds

    # ------------------------------------------------------------------ boxes of a process that is dead

    async def attach(self, key: str) -> NamespacesSandbox:
        """Take over the box that a dead process left under this key. Its jobs run on, and are found by their ids.

        Connections made to its gateway's port in the meantime wait in the socket. Raises `SandboxGone` when there is no
        such box any more, `UsageError` when it is in use.
        """
        async with self._keys.setdefault(key, anyio.Lock()):
            if key in self._open and not self._open[key].dead:
                return self._open[key]
            found = [r for r in self._registry.records() if r.key == key and r.door and r.inside and r.running]
            if not found or found[-1].boot != boot_id():
                raise SandboxGone(f"no box of {key!r} is left", reason="unknown", key=key)
            self._open[key] = await self._visit(found[-1])
            return self._open[key]

    def known_as(self, key: str) -> str:
        return key

    async def _visit(self, record: Record) -> NamespacesSandbox:
        door = record.door or ""
        visitor = self._visits.setdefault(door, Visitor(Path(door)))
        with await visitor.request({"op": "attach", "box": record.id}) as reply:
            answer = await receive(reply)
        if answer is None or "gone" in answer[0]:
            raise SandboxGone(f"box {record.id} is gone", box=record.id, reason="unknown")
        message, fds = answer
        if "taken" in message:
            raise UsageError(f"box {record.id} is in use by process {record.owner.pid}", box=record.id)
        ours = replace(record, owner=_myself(), lease_until=message["expires"])
        self._registry.write(ours)
        return self._held(ours, Inside.load(record.inside or {}), fds, visitor)

    async def _end_waiting(self, key: str) -> None:
        """A new box takes the place of one that waits."""
        for record in self._registry.records():
            if record.key == key and record.boot == boot_id() and record.waits and record.init is not None:
                await _kill(record.init)
                await self._release(record)

    # ------------------------------------------------------------------ registry

    async def list(self) -> list[BoxInfo]:
        boot, at = boot_id(), now()
        return [
            BoxInfo(
                id=record.id,
                labels=record.labels,
                alive=record.boot == boot and record.running,
                owner_alive=record.boot == boot and record.owner.alive,
                age_seconds=at - record.created,
                lease_seconds_left=record.lease_until - at,
            )
            for record in self._registry.records()
        ]

    async def reap(self, *, everything: bool = False) -> list[str]:
        """Remove boxes whose owner is dead or whose lease ran out (or all of them), with their cgroups.

        One that waits for another process keeps until its lease is over.
        """
        boot = boot_id()
        removed: list[str] = []
        for record in self._registry.records():
            same_boot = record.boot == boot
            wanted = (record.owner.alive and record.lease_until > now()) or record.waits
            if same_boot and wanted and not everything:
                continue
            if same_boot:
                if record.init is not None:
                    await _kill(record.init)
                await cgroups.remove([Path(group) for group in record.cgroups])
            self._registry.remove(record.id)
            removed.append(record.id)
        remove_dead_doors(self._state / "servers")
        return removed


def _myself() -> Process:
    process = Process.of(os.getpid())
    if process is None:
        raise Unsupported("/proc does not show this process; mount it")
    return process


async def _kill(process: Process) -> None:
    """Kill exactly this process and wait for its end."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            await anyio.wait_readable(fd)
    finally:
        os.close(fd)
