"""The boxes that clients of the control API made: created once for each key, found again by id, gone in time."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup

from rollwright.e2b_server.forward import forward
from rollwright.e2b_server.processes import Processes
from rollwright.errors import ConfigError, InfraError, RollwrightError, UsageError
from rollwright.sandboxes import Network, Provider, SandboxSpec
from rollwright.sandboxes.namespaces.box import NamespacesSandbox

__all__ = ["ENVD_VERSION", "ApiError", "Box", "Boxes", "Template"]

log = logging.getLogger(__name__)

ENVD_VERSION = "0.6.1"
"""What we answer as. This version takes files as plain bodies and has no extended attributes yet."""

_DEFAULT_SECONDS = 300
_LONGEST_SECONDS = 86_400
_REMEMBERED = 100_000
_EVERYWHERE = "0.0.0.0/0"
_LOOPBACK = "127.0.0.1"
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_NOT_HERE = ("mcp", "iam", "volumeMounts", "autoPause")


class ApiError(Exception):
    """A call of the control API that failed, as the client is to see it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What a template's name stands for."""

    image: str
    """An image of the namespaces backend."""
    memory_mb: int | None = None
    pids: int | None = None
    disk_mb: int = 2048


@dataclass(slots=True, kw_only=True)
class Box:
    """One living box."""

    id: str
    template: str
    metadata: Mapping[str, str]
    sandbox: NamespacesSandbox
    processes: Processes
    started: datetime.datetime
    ends: datetime.datetime
    deadline: float
    """`ends` by the monotonic clock."""
    size: Template
    network: Network
    way: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Ends what carries its connections to the host it may reach."""
    token: str = field(default_factory=lambda: secrets.token_hex(24))

    def created(self) -> dict[str, Any]:
        return {
            "templateID": self.template,
            "sandboxID": self.id,
            "clientID": "local",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
        }

    def described(self) -> dict[str, Any]:
        return {
            "templateID": self.template,
            "sandboxID": self.id,
            "clientID": "local",
            "startedAt": self.started.isoformat(),
            "endAt": self.ends.isoformat(),
            "cpuCount": 1,
            "memoryMB": self.size.memory_mb or 0,
            "diskSizeMB": self.size.disk_mb,
            "state": "running",
            "envdVersion": ENVD_VERSION,
            "metadata": dict(self.metadata),
        }


class Boxes:
    """All boxes of a server.

    The image is what the metadata key `image_key` holds, else what the template's name stands for, else the
    template's name itself.
    """

    def __init__(
        self,
        provider: Provider,
        group: TaskGroup,
        *,
        templates: Mapping[str, Template],
        image_key: str | None,
        allowed_port: int,
        forgetful: bool,
    ) -> None:
        self._provider = provider
        self._group = group
        self._templates = templates
        self._image_key = image_key
        self._allowed_port = allowed_port
        self._forgetful = forgetful
        self._living: dict[str, Box] = {}
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._locks: dict[str, anyio.Lock] = {}

    async def create(self, body: Mapping[str, Any], *, key: str | None) -> dict[str, Any]:
        """Boot a box, or give the answer again that this idempotency key was given. Raises `ApiError`."""
        if key is None or self._forgetful:
            key = secrets.token_hex(16)
        async with self._locks.setdefault(key, anyio.Lock()):
            if key not in self._answers:
                # Also when the box is long gone: a late duplicate of a request must not make another one.
                self._answers[key] = (await self._boot(body, key)).created()
                if len(self._answers) > _REMEMBERED:
                    forgotten, _ = self._answers.popitem(last=False)
                    self._locks.pop(forgotten, None)
            return self._answers[key]

    async def _boot(self, body: Mapping[str, Any], key: str) -> Box:
        for name in _NOT_HERE:
            if body.get(name):
                raise ApiError(400, f"{name} is not supported by this server")
        metadata = _texts(body, "metadata")
        name = body.get("templateID")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "templateID is missing")
        template = self._template(name)
        image = template.image
        if self._image_key and self._image_key in metadata:
            image = self._template(metadata[self._image_key]).image
        seconds = _seconds(body.get("timeout", _DEFAULT_SECONDS))
        network, host = _network(body)
        spec = SandboxSpec(
            image=image,
            network=network,
            gateway_host=host if _is_address(host) else _LOOPBACK,
            gateway_port=self._allowed_port,
            env=_texts(body, "envVars"),
            memory_mb=template.memory_mb,
            pids=template.pids,
            disk_mb=template.disk_mb,
            lifetime_seconds=seconds,
            labels=metadata,
        )
        try:
            sandbox = cast(NamespacesSandbox, await self._provider.create(spec, key=key))
        except ConfigError as e:
            raise ApiError(404, e.message) from e
        except UsageError as e:
            raise ApiError(400, e.message) from e
        except InfraError as e:
            raise ApiError(500, e.message) from e
        box = Box(
            id=sandbox.id,
            template=name,
            metadata=metadata,
            sandbox=sandbox,
            processes=Processes(sandbox, self._group),
            started=_now(),
            ends=_now() + datetime.timedelta(seconds=seconds),
            deadline=anyio.current_time() + seconds,
            size=template,
            network=network,
        )
        if network == "gateway_only":
            try:
                await self._open_way(box, host)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await sandbox.close()
                raise
        self._living[box.id] = box
        self._group.start_soon(self._end_in_time, box)
        return box

    async def _open_way(self, box: Box, host: str) -> None:
        """Let the box reach the one port of `host`: at its own loopback, where we listen for it."""
        sock = box.sandbox.gateway_socket
        assert sock is not None
        if not _is_address(host):
            known = await box.sandbox.get("/etc/hosts")
            await box.sandbox.put("/etc/hosts", b"%s\n%s %s\n" % (known.rstrip(), _LOOPBACK.encode(), host.encode()))

        async def carry() -> None:
            with box.way:
                await forward(sock, host, self._allowed_port)

        self._group.start_soon(carry)

    async def has_template(self, name: str) -> bool:
        try:
            await self._provider.check_image(self._template(name).image)
        except (RollwrightError, ApiError):
            return False
        return True

    def _template(self, name: str) -> Template:
        if name.startswith("/"):
            # To the namespaces backend that is a folder of this machine, which is not a client's to see.
            raise ApiError(404, f"template {name} was not found")
        return self._templates.get(name, Template(image=name))

    def find(self, id: str) -> Box | None:
        return self._living.get(id)

    def all(self) -> list[Box]:
        """Oldest first."""
        return list(self._living.values())

    async def set_timeout(self, box: Box, value: object, *, only_longer: bool = False) -> None:
        """The box's life ends that many seconds from now. Raises `ApiError`, `SandboxGone`."""
        seconds = _seconds(value)
        if only_longer and anyio.current_time() + seconds < box.deadline:
            return
        await box.sandbox.renew(seconds)
        box.ends = _now() + datetime.timedelta(seconds=seconds)
        box.deadline = anyio.current_time() + seconds

    async def kill(self, box: Box) -> None:
        self._living.pop(box.id, None)
        box.way.cancel()
        await box.sandbox.close()

    async def _end_in_time(self, box: Box) -> None:
        while box.id in self._living:
            if anyio.current_time() >= box.deadline:
                try:
                    await self.kill(box)
                except InfraError as error:  # nobody asked for it, and the other boxes must not end with it
                    log.warning("box %s could not be removed: %s", box.id, error)
            await anyio.sleep(min(1.0, max(0.0, box.deadline - anyio.current_time())))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _seconds(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LONGEST_SECONDS:
        raise ApiError(400, f"timeout must be a number of seconds up to {_LONGEST_SECONDS}")
    return value


def _texts(body: Mapping[str, Any], name: str) -> dict[str, str]:
    value: object = body.get(name) or {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must map names to text")
    items = cast("dict[object, object]", value)
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in items.items()):
        raise ApiError(400, f"{name} must map names to text")
    return cast("dict[str, str]", value)


def _network(body: Mapping[str, Any]) -> tuple[Network, str]:
    """What network the box gets, and with `gateway_only` the host it may reach."""
    network: Mapping[str, Any] = body.get("network") or {}
    allowed: list[Any] = network.get("allowOut") or []
    closed = body.get("allow_internet_access") is False or _EVERYWHERE in (network.get("denyOut") or [])
    if network.get("rules") or network.get("egressProxy") or (allowed and not closed) or len(allowed) > 1:
        raise ApiError(400, "this server can close a box's network but for one host, or leave it open, no more")
    if not allowed:
        return "none" if closed else "open", _LOOPBACK
    host: object = allowed[0]
    if not isinstance(host, str) or not (_is_address(host) or (_NAME.fullmatch(host) and not _looks_like_one(host))):
        raise ApiError(400, f"a box may reach one IPv4 address or the host of one name, not {host!r}")
    return "gateway_only", host


def _is_address(host: str) -> bool:
    try:
        return not ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        return False


def _looks_like_one(host: str) -> bool:
    """All digits and dots: resolvers read `127.1` or `0` as addresses."""
    return host.replace(".", "").isdigit()
