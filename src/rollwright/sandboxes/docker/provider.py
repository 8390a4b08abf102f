"""The provider: claims, boots, takes over, lists and reaps containers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import resource
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread

from rollwright.concurrency import plain_errors
from rollwright.errors import (
    AmbiguousOutcome,
    ConfigError,
    ProvisionFailed,
    SandboxBroken,
    SandboxError,
    SandboxGone,
    StoreError,
    Transient,
    Unsupported,
)
from rollwright.sandboxes import BoxInfo, Capabilities, Network, SandboxSpec
from rollwright.sandboxes.docker.box import DockerSandbox
from rollwright.sandboxes.docker.command import guest_script
from rollwright.sandboxes.docker.container import ROOT, Container, User
from rollwright.sandboxes.docker.daemon import Conflict, Daemon
from rollwright.sandboxes.docker.loopback import listen_inside
from rollwright.sandboxes.lease import Lease, checked_survive
from rollwright.sandboxes.namespaces.registry import Record, Registry, boot_id, now
from rollwright.sandboxes.owners import Holders, Owner
from rollwright.sandboxes.retry import Tally

log = logging.getLogger(__name__)

_DEFAULT_URL = "unix:///var/run/docker.sock"
_AGENT_ID = 10001
_JOBS_MB = 512
"""Bound of what the records and captured output of all jobs of a box may take."""
_OPEN_FILES = 65536
_PROCESSES = 32768
"""Of one uid on the whole machine; Podman lowers its own limit to this."""
_CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
)
_SHARE_OUR_KERNEL = (None, "runc", "crun")
"""Runtimes whose containers use the host's network stack, so that the host can listen inside."""
_SCOPE = "rollwright.scope"
_CLAIM = "rollwright.claim"
"""One attempt to boot: what it finds under its name with this on it, it made itself."""
_USER_LABEL = "rollwright.label."
_SURVIVES = "rollwright.survives"
"""It waits for another process when its owner has died; without it such a box is reaped."""
_USERS_OWN = ("HOME", "USER", "LOGNAME")
_PREPARE_SECONDS = 30.0
_CLAIMS = 5
"""How often a name that others hold and let go is tried for."""


class DockerProvider:
    """A `Provider` of containers, through a Docker or Podman socket.

    `state_dir` is the place of the registry, `url` the daemon's socket (`unix://` or `tcp://`; Podman's is
    `unix:///run/podman/podman.sock`), `runtime` an OCI runtime the daemon knows, `cpus` a limit for each box, `pull`
    whether an image that is not there may be fetched, `boot_concurrency` how many boxes boot at the same time.
    `survive`: seconds that boxes live on when this process dies without closing them, in which another one may `attach`
    to them; then a box's lease is little longer than that, and one that is not used for so long ends.
    """

    def __init__(
        self,
        *,
        state_dir: Path | str,
        url: str | None = None,
        runtime: str | None = None,
        cpus: float | None = None,
        pull: bool = False,
        boot_concurrency: int = 8,
        survive: float = 0,
    ) -> None:
        if boot_concurrency < 1:
            field = "sandbox.docker.boot_concurrency"
            raise ConfigError(f"{field} must be at least 1", field=field)
        if url is not None and not url.startswith(("unix:///", "tcp://")):
            field = "sandbox.docker.url"
            raise ConfigError(
                f"{field} must begin with unix:/// or tcp://, not {url!r}; bring a daemon behind ssh here with "
                "`ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST`",
                field=field,
            )
        self._state = Path(state_dir).absolute() / "docker"
        self._runtime = runtime
        self._cpus = cpus
        self._pull = pull
        self._daemon = Daemon(url or _DEFAULT_URL)
        self._registry = Registry(self._state / "boxes")
        self._holders = Holders(self._state / "holders")
        self._survive = checked_survive(survive, field="sandbox.docker.survive")
        self._boot_slots = anyio.Semaphore(boot_concurrency)
        self._open: dict[str, DockerSandbox] = {}
        self._keys: dict[str, anyio.Lock] = {}
        self._capabilities: Capabilities | None = None
        self._disk_limit = True
        """Whether the daemon's storage may be able to bound a container's writable layer."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def tally(self) -> Tally:
        """What failed so far."""
        return self._daemon.retries.tally() + self._daemon.job_retries.tally()

    async def close(self) -> None:
        """Remove the boxes that are still open, and the connections to the daemon."""
        with anyio.CancelScope(shield=True):
            try:
                with plain_errors():
                    async with anyio.create_task_group() as tasks:
                        for box in list(self._open.values()):
                            tasks.start_soon(box.close)
            finally:
                await self._daemon.close()

    @property
    def _local(self) -> bool:
        return self._daemon.url.startswith("unix:")

    # ------------------------------------------------------------------ before step 0

    async def probe(self) -> Capabilities:
        """Ask the daemon. Raises `Unsupported`."""
        if self._capabilities is None:
            try:
                await self._daemon.connect()
            except (Transient, AmbiguousOutcome) as e:
                raise Unsupported(
                    f"{e.message}; start the daemon, or name another one's socket with sandbox.docker.url"
                ) from e
            info = await self._daemon.call("info", lambda api: api.info())
            networks = await self._daemon.call("networks", lambda api: api.networks())
            if self._runtime is not None and self._runtime not in info.get("Runtimes", {self._runtime: None}):
                known = ", ".join(sorted(info["Runtimes"]))
                raise Unsupported(f"the daemon has no runtime {self._runtime!r}; it has {known}")
            allowed: set[Network] = {"none"}
            if any(network["Driver"] == "bridge" for network in networks):
                allowed.add("open")
            if self._local and os.geteuid() == 0 and self._runtime in _SHARE_OUR_KERNEL:
                allowed.add("gateway_only")
            self._disk_limit = _can_limit_disk(info)
            self._capabilities = Capabilities(
                name="docker",
                pid_namespace=True,
                users=True,
                tamper_evident=True,
                networks=frozenset(allowed),
                memory_limit=bool(info.get("MemoryLimit")),
                pids_limit=bool(info.get("PidsLimit")),
                cpu_limit=bool(info.get("CpuCfsQuota")),
                disk_limit=self._disk_limit,
                mounts=self._local,
                attach=self._survive > 0,
                tree_kill="subreaper" if info.get("InitBinary") else "environment",
            )
        return self._capabilities

    async def check_image(self, image: str) -> None:
        """Raises `ConfigError` when the daemon has no such image and may not or cannot fetch it."""
        try:
            await self._daemon.call("inspect image", lambda api: api.inspect_image(image))
            return
        except SandboxGone:
            if not self._pull:
                raise ConfigError(
                    f"image {image!r} is not on the daemon at {self._daemon.url}; pull it, or set "
                    "sandbox.docker.pull = true",
                    field="image",
                ) from None
        except SandboxBroken as e:
            raise ConfigError(f"image {image!r}: {e.message}", field="image") from e
        try:
            said = await self._daemon.call("pull", lambda api: _pull(api, image))
            await self._daemon.call("inspect image", lambda api: api.inspect_image(image))
        except (SandboxGone, SandboxBroken) as e:
            raise ConfigError(f"image {image!r} cannot be pulled: {e.message}", field="image") from e
        if said:
            raise ConfigError(f"image {image!r} cannot be pulled: {said}", field="image")

    async def image_digest(self, image: str) -> str:
        """The id of the image's configuration, which covers its layers. Raises what the daemon raises."""
        found: Any = await self._daemon.call("inspect image", lambda api: api.inspect_image(image))
        return str(found["Id"])

    # ------------------------------------------------------------------ boot

    async def create(self, spec: SandboxSpec, *, key: str) -> DockerSandbox:
        """Boot a box, or return the open one of this key. What a dead process left under this key is removed first.

        Raises `ProvisionFailed`, `Unsupported`.
        """
        async with self._keys.setdefault(key, anyio.Lock()):
            box = await self._living(key)
            if box is None:
                await self._check(spec)
                async with self._boot_slots:
                    box = self._open[key] = await self._boot(spec, key)
            return box

    async def _living(self, key: str) -> DockerSandbox | None:
        """The open box of this key, if it still runs."""
        box = self._open.get(key)
        if box is not None:
            try:
                await box.check_alive()
            except SandboxGone:
                await box.close()
                return None
        return box

    async def _check(self, spec: SandboxSpec) -> None:
        has = await self.probe()
        if spec.network not in has.networks:
            raise Unsupported(f"network {spec.network}: {_why_not(spec.network, local=self._local)}")
        if spec.mounts and not has.mounts:
            raise Unsupported("mounts: the daemon is remote, so it cannot show folders of this machine")
        if spec.memory_mb is not None and not has.memory_limit:
            raise Unsupported("memory_mb: the daemon's cgroups have no memory limit")
        if spec.pids is not None and not has.pids_limit:
            raise Unsupported("pids: the daemon's cgroups have no limit on processes")
        if spec.cpus is not None and not has.cpu_limit:
            raise Unsupported("cpus: the daemon's cgroups have no limit on cpu time")

    async def _boot(self, spec: SandboxSpec, key: str) -> DockerSandbox:
        scope = await anyio.to_thread.run_sync(self._scope)
        name = _name(scope, key)
        claim = secrets.token_hex(16)
        created = now()
        survive = self._survive if spec.survives else 0.0
        lease = Lease(spec.lifetime_seconds, now=created, survive=survive)
        record = Record(
            id=name,
            key=key,
            labels=dict(spec.labels),
            boot=boot_id(),
            owner=Owner.myself().process,
            init=None,
            created=created,
            lease_until=lease.until,
            cgroups=(),
            survives=survive,
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._remove_own, name, claim)
            try:
                labels = _labels(record, scope) | _Needs.of_spec(spec).labels() | {_CLAIM: claim}
                id = await self._claim(spec, name, labels, record)
                await self._daemon.call("start", lambda api: api.start(id))
                gateway = None
                if spec.network == "gateway_only":
                    gateway = undo.enter_context(await self._listen(id, name, spec.gateway_port))
                container = Container(id, self._daemon, lease=lease)
                users, reaper = await _prepare(container, spec.env)
            except (SandboxGone, SandboxBroken, Conflict) as e:
                raise ProvisionFailed(f"box of image {spec.image!r}: {e.message}", image=spec.image) from e
            self._registry.write(replace(record, id=id))
            undo.pop_all()
        return self._held(container, key, users=users, reaper=reaper, gateway=gateway, disk_mb=spec.disk_mb)

    def _held(
        self,
        container: Container,
        key: str,
        *,
        users: Mapping[str, User],
        reaper: str | None,
        gateway: socket.socket | None,
        disk_mb: int,
    ) -> DockerSandbox:
        async def release() -> None:
            self._open.pop(key, None)
            if not self._keys[key].locked():
                del self._keys[key]
            self._registry.remove(container.id)
            self._holders.drop(container.id)

        return DockerSandbox(
            container,
            users=users,
            reaper=reaper,
            gateway=gateway,
            registry=self._registry,
            disk_mb=disk_mb,
            release=release,
        )

    async def _remove_own(self, name: str, claim: str) -> None:
        """Undo a boot, however far it came."""
        with anyio.CancelScope(shield=True):
            try:
                found = await self._daemon.inspect(name)
            except SandboxGone:
                return
            if _labels_of(found).get(_CLAIM) == claim:
                await self._daemon.remove(found["Id"])

    async def _claim(self, spec: SandboxSpec, name: str, labels: Mapping[str, str], record: Record) -> str:
        """Create the container, or find it made: its name is had once, so a lost answer makes no second one."""
        for _ in range(_CLAIMS):
            try:
                return await self._create(spec, name, labels, record)
            except Conflict:
                try:
                    found = await self._daemon.inspect(name)
                except SandboxGone:
                    continue
            if _labels_of(found).get(_CLAIM) == labels[_CLAIM]:
                return found["Id"]
            holders = await anyio.to_thread.run_sync(self._holders.all)
            theirs = holders.get(found["Id"]) or _maker(_labels_of(found))
            if theirs is not None and theirs.alive:
                pid = theirs.process.pid
                raise ProvisionFailed(f"the box of {record.key!r} is in use by process {pid}", key=record.key)
            await self._daemon.remove(found["Id"])
        raise ProvisionFailed(f"the container name {name} stays taken", key=record.key)

    async def _create(self, spec: SandboxSpec, name: str, labels: Mapping[str, str], record: Record) -> str:
        def request(api: Any, *, disk: bool) -> str:
            answer = api.create_container(
                spec.image,
                name=name,
                hostname="box",
                user="0:0",
                working_dir="/",
                environment=dict(spec.env),
                labels=dict(labels),
                healthcheck={"test": ["NONE"]},
                entrypoint=["sh", "-c"],
                command=[guest_script("life"), name, str(math.ceil(record.lease_until - record.created))],
                host_config=api.create_host_config(**self._limits(spec, disk=disk)),
            )
            return answer["Id"]

        if self._disk_limit:
            try:
                return await self._daemon.call("create with a disk limit", lambda api: request(api, disk=True))
            except SandboxBroken as e:
                # If it works without, it was the limit: the driver has one, but the file system was not mounted for it.
                container = await self._daemon.call("create", lambda api: request(api, disk=False))
                self._disk_limit = False
                if self._capabilities is not None:
                    self._capabilities = replace(self._capabilities, disk_limit=False)
                log.warning("disk_mb is not kept: the daemon's storage does not bound a container (%s)", e.message)
                return container
        return await self._daemon.call("create", lambda api: request(api, disk=False))

    def _limits(self, spec: SandboxSpec, *, disk: bool) -> dict[str, Any]:
        limits: dict[str, Any] = {
            "init": True,
            "runtime": self._runtime,
            "network_mode": "bridge" if spec.network == "open" else "none",
            "cap_drop": ["ALL"],
            "cap_add": list(_CAPABILITIES),
            "security_opt": ["no-new-privileges"],
            "log_config": {"Type": "none"},
            "tmpfs": {"/run/rollwright": f"rw,nosuid,nodev,noexec,mode=700,size={_JOBS_MB}m"},
            "binds": {str(m.source): {"bind": m.target, "mode": "ro"} for m in spec.mounts},
            "pids_limit": spec.pids,
        }
        if self._local:
            limits["ulimits"] = _ulimits()
        if spec.memory_mb is not None:
            limits |= {"mem_limit": spec.memory_mb << 20, "memswap_limit": spec.memory_mb << 20}
        cpus = self._cpus if spec.cpus is None else spec.cpus
        if cpus is not None:
            limits["nano_cpus"] = round(cpus * 1e9)
        if disk:
            limits["storage_opt"] = {"size": f"{spec.disk_mb}m"}
        return limits

    async def _listen(self, container: str, name: str, port: int) -> socket.socket:
        state = (await self._daemon.inspect(container))["State"]
        return await anyio.to_thread.run_sync(listen_inside, int(state["Pid"]), name, port)

    # ------------------------------------------------------------------ boxes of a process that is dead

    async def attach(self, key: str) -> DockerSandbox:
        """Take over the box that a dead process left under this key. Its jobs run on, and are found by their ids; its
        life begins anew, and the gateway's port is listened on again.

        Raises `SandboxGone` when there is no such box any more, `UsageError` when it is in use.
        """
        async with self._keys.setdefault(key, anyio.Lock()):
            box = await self._living(key)
            if box is None:
                name = _name(await anyio.to_thread.run_sync(self._scope), key)
                try:
                    found = await self._daemon.inspect(name)
                except SandboxGone as e:
                    raise SandboxGone(f"no box of {key!r} is left", reason="unknown", key=key) from e
                if _SURVIVES not in _labels_of(found):
                    raise SandboxGone(f"the box of {key!r} is not to survive its owner", reason="unknown", key=key)
                box = self._open[key] = await self._take_over(found, name, key)
            return box

    def known_as(self, key: str) -> str:
        return key

    async def _take_over(self, found: Mapping[str, Any], name: str, key: str) -> DockerSandbox:
        id, labels = found["Id"], _labels_of(found)
        if not found["State"]["Running"]:
            raise SandboxGone(f"box {id} has ended", box=id, reason="unknown")
        await anyio.to_thread.run_sync(partial(self._holders.take, id, maker=_maker(labels)))
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._give_up, id)
            needs = _Needs.of(labels)
            gateway = None
            if needs.gateway_port is not None:
                gateway = undo.enter_context(await self._listen(id, name, needs.gateway_port))
            container = Container(id, self._daemon, lease=Lease(needs.lifetime, now=now(), survive=self._survive))
            try:
                users, reaper = await _prepare(container, dict.fromkeys(needs.own, ""))
            except Conflict as e:
                await container.check_alive()
                raise SandboxBroken(f"box {id} cannot be taken over: {e.message}", box=id) from e
            box = self._held(container, key, users=users, reaper=reaper, gateway=gateway, disk_mb=needs.disk_mb)
            await box.renew(needs.lifetime)
            undo.pop_all()
        return box

    async def _give_up(self, id: str) -> None:
        """A box that is ours now and of no use. One that cannot be removed is ended by its lease."""
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(SandboxError):
                await self._daemon.remove(id)
            self._registry.remove(id)
            self._holders.drop(id)

    # ------------------------------------------------------------------ registry

    def _scope(self) -> str:
        """What tells our boxes from those of other registries on the same daemon: made once for each `state_dir`."""
        path = self._state / "scope"
        try:
            if not path.exists():
                self._state.mkdir(parents=True, exist_ok=True)
                ours = path.with_suffix(f".{secrets.token_hex(4)}")
                ours.write_text(secrets.token_hex(16))
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(ours)
                ours.unlink()
            return path.read_text()
        except OSError as e:
            raise StoreError(f"cannot keep the box registry {self._state}: {e}", path=str(self._state)) from e

    async def _containers(self) -> Sequence[Mapping[str, Any]]:
        scope = await anyio.to_thread.run_sync(self._scope)
        ours = {"label": f"{_SCOPE}={scope}"}
        return await self._daemon.call("list", lambda api: api.containers(all=True, filters=ours))

    async def list(self) -> list[BoxInfo]:
        leases = {record.id: record.lease_until for record in self._registry.records()}
        holders = await anyio.to_thread.run_sync(self._holders.all)
        containers = await self._containers()
        return [_info(found, leases.get(found["Id"]), holders.get(found["Id"])) for found in containers]

    async def reap(self, *, everything: bool = False) -> list[str]:
        """Remove boxes whose owner is dead or whose lease ran out (or all of them). One that waits for another process
        keeps until its lease is over."""
        boxes = await self.list()
        survivors = {found["Id"] for found in await self._containers() if _SURVIVES in found["Labels"]}
        removed: list[str] = []
        for box in boxes:
            waits = box.id in survivors and box.alive
            if everything or not (box.owner_alive or waits) or box.lease_seconds_left <= 0:
                await self._daemon.remove(box.id)
                removed.append(box.id)
        await anyio.to_thread.run_sync(self._holders.drop_dead, {box.id for box in boxes} - set(removed))
        for record in self._registry.records():
            if record.id in removed or (record.id not in {box.id for box in boxes} and not record.owner.alive):
                self._registry.remove(record.id)
        return removed


async def _prepare(container: Container, env: Mapping[str, str]) -> tuple[dict[str, User], str | None]:
    """Make the image a box: users and folders. Returns the users, and the program that can hold a job's orphans."""
    argv = ["sh", "-c", guest_script("prepare"), "rollwright", str(_AGENT_ID)]
    result = await container.run(argv, user=ROOT, seconds=_PREPARE_SECONDS)
    try:
        uid, gid, reaper, home = result.stdout.decode().rstrip("\n").split(" ", 3)
        agent = _user("agent", int(uid), int(gid), home, env)
    except ValueError as e:
        said = (result.stderr or result.stdout)[:300].decode(errors="replace")
        raise SandboxBroken(f"cannot be made a box: exit {result.exit_code}: {said}", box=container.id) from e
    users = {"root": _user("root", 0, 0, "/root", env), "agent": agent}
    return users, None if reaper == "-" else reaper


def _user(name: str, uid: int, gid: int, home: str, env: Mapping[str, str]) -> User:
    own = dict(zip(_USERS_OWN, (home, name, name), strict=True))
    return User(name=name, uid=uid, gid=gid, env={k: v for k, v in own.items() if k not in env})


def _name(scope: str, key: str) -> str:
    """The container's: had once, so that there is one box of a key."""
    return f"rollwright-{hashlib.sha256(f'{scope} {key}'.encode()).hexdigest()[:32]}"


def _labels(record: Record, scope: str) -> dict[str, str]:
    """What a container tells about itself, so that it is found by whoever comes after us. The lease may be renewed
    since; then the registry has it."""
    return {
        _SCOPE: scope,
        "rollwright.key": record.key,
        "rollwright.boot": record.boot,
        "rollwright.owner": f"{record.owner.pid} {record.owner.started}",
        "rollwright.created": str(record.created),
        "rollwright.lease": str(record.lease_until),
        **({_SURVIVES: str(record.survives)} if record.survives else {}),
        **{f"{_USER_LABEL}{name}": value for name, value in record.labels.items()},
    }


def _labels_of(found: Mapping[str, Any]) -> Mapping[str, str]:
    """Of an inspected container."""
    labels: Mapping[str, str] | None = found["Config"]["Labels"]
    return labels or {}


def _maker(labels: Mapping[str, str]) -> Owner | None:
    """The process that made a container. None: it is not one of ours."""
    if not {_SCOPE, "rollwright.owner", "rollwright.boot"} <= labels.keys():
        return None
    return Owner.parse(f"{socket.gethostname()} {labels['rollwright.boot']} {labels['rollwright.owner']}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """What a process needs to know to use a box that it did not make, as the container's labels tell it."""

    lifetime: float
    disk_mb: int
    gateway_port: int | None
    own: tuple[str, ...]
    """Variables of a user's that the box's spec sets itself."""

    @staticmethod
    def of_spec(spec: SandboxSpec) -> _Needs:
        return _Needs(
            lifetime=spec.lifetime_seconds,
            disk_mb=spec.disk_mb,
            gateway_port=spec.gateway_port if spec.network == "gateway_only" else None,
            own=tuple(name for name in _USERS_OWN if name in spec.env),
        )

    def labels(self) -> dict[str, str]:
        return {
            "rollwright.lifetime": str(self.lifetime),
            "rollwright.disk_mb": str(self.disk_mb),
            "rollwright.gateway_port": "" if self.gateway_port is None else str(self.gateway_port),
            "rollwright.own": " ".join(self.own),
        }

    @staticmethod
    def of(labels: Mapping[str, str]) -> _Needs:
        """Raises `SandboxBroken`."""
        try:
            port = labels["rollwright.gateway_port"]
            return _Needs(
                lifetime=float(labels["rollwright.lifetime"]),
                disk_mb=int(labels["rollwright.disk_mb"]),
                gateway_port=int(port) if port else None,
                own=tuple(labels["rollwright.own"].split()),
            )
        except (KeyError, ValueError) as e:
            raise SandboxBroken(f"a container's labels do not tell how it is used: {e}") from e


def _info(found: Mapping[str, Any], lease: float | None, holder: Owner | None) -> BoxInfo:
    labels, at = found["Labels"], now()
    maker = _maker(labels)
    same_boot = maker is not None and maker.boot == boot_id()
    owner = holder or maker
    return BoxInfo(
        id=found["Id"],
        labels={k.removeprefix(_USER_LABEL): v for k, v in labels.items() if k.startswith(_USER_LABEL)},
        alive=found["State"] == "running",
        owner_alive=owner is not None and owner.alive,
        age_seconds=at - float(labels["rollwright.created"]) if same_boot else math.inf,
        lease_seconds_left=(float(labels["rollwright.lease"]) if lease is None else lease) - at if same_boot else 0.0,
    )


def _can_limit_disk(info: Mapping[str, Any]) -> bool:
    """Whether the daemon's storage may bound a container's writable layer. On xfs only an attempt tells."""
    status: list[list[str]] = info.get("DriverStatus") or []
    on_xfs = ["Backing Filesystem", "xfs"] in status
    return info.get("Driver") in ("btrfs", "zfs") or (info.get("Driver") == "overlay2" and on_xfs)


def _why_not(network: Network, *, local: bool) -> str:
    if network == "open":
        return "the daemon has no bridge network"
    if not local:
        return (
            "the daemon is remote, so the gateway's socket cannot be put into its containers; use a local daemon "
            "or the namespaces backend"
        )
    return "it needs root on this machine, and a runtime that uses its network stack (runc, crun)"


def _ulimits() -> list[dict[str, Any]]:
    """Never above our own: without CAP_SYS_RESOURCE a runtime cannot raise what the daemon inherited."""
    wanted = (("nofile", resource.RLIMIT_NOFILE, _OPEN_FILES), ("nproc", resource.RLIMIT_NPROC, _PROCESSES))
    limits: list[dict[str, Any]] = []
    for name, number, most in wanted:
        hard = resource.getrlimit(number)[1]
        value = most if hard == resource.RLIM_INFINITY else min(hard, most)
        limits.append({"Name": name, "Soft": value, "Hard": value})
    return limits


def _pull(api: Any, image: str) -> str | None:
    """Fetch an image. Returns what the registry said against it, if it did."""
    for line in api.pull(image, stream=True, decode=True):
        if "error" in line:
            return str(line["error"])
    return None
