"""The provider: boots, lists and reaps boxes through the control API."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from rollwright.errors import (
    ConfigError,
    ProvisionFailed,
    SandboxBroken,
    SandboxError,
    StoreError,
    Unsupported,
    UsageError,
)
from rollwright.sandboxes import BoxInfo, Capabilities, SandboxSpec
from rollwright.sandboxes.e2b.archives import Archives
from rollwright.sandboxes.e2b.box import E2BSandbox
from rollwright.sandboxes.e2b.guest import Guest
from rollwright.sandboxes.e2b.sdk import classify, load
from rollwright.sandboxes.namespaces.registry import Process, boot_id
from rollwright.sandboxes.retry import Retries, Safety, Tally

if TYPE_CHECKING:
    from rollwright.sandboxes.e2b.sdk import AsyncSandbox, SandboxInfo

T = TypeVar("T")

log = logging.getLogger(__name__)

_SCOPE = "rollwright-scope"
_OWNER = "rollwright-owner"
_LABEL = "rollwright-label-"
_MAKER = "rollwright-maker"
_REQUEST = "rollwright-request"
_TAKE_BACK_SECONDS = 30.0


class E2BProvider:
    """A `Provider` of E2B boxes. The API key, domain and URLs that are not given are those of the SDK's environment.

    `image_metadata_key`: a box is made of `template` (or E2B's default), and the image's name goes into this metadata
    key, by which the cluster picks the image. Without it an image's name is the name of a template; with a `template`
    and no key every box is of that template. `size_metadata_key` and `size` go into the metadata as they are.
    `network_rules`: whether the cluster keeps E2B's rules for a box's network; without them every box has the network
    that the cluster gives, whatever its spec says.
    `max_lifetime_seconds`: the longest lease the cluster gives. `state_dir` holds the name under which this
    installation's boxes are listed and reaped. Raises `Unsupported` for a missing or older SDK.
    """

    def __init__(
        self,
        *,
        state_dir: Path | str,
        api_key: str | None = None,
        template: str | None = None,
        image_metadata_key: str | None = None,
        size_metadata_key: str | None = None,
        size: str | None = None,
        network_rules: bool = True,
        domain: str | None = None,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        http_version: Literal["1.1", "2"] | None = None,
        max_lifetime_seconds: int | None = None,
        patience_seconds: float = 60.0,
    ) -> None:
        if (size is None) != (size_metadata_key is None):
            raise ConfigError("sandbox.e2b: size and size_metadata_key go together", field="sandbox.e2b.size")
        sdk = load()
        options: dict[str, Any] = {
            "api_key": api_key,
            "domain": domain,
            "api_url": api_url,
            "sandbox_url": sandbox_url,
            "http_version": http_version,
        }
        client = sdk.E2B(**{name: value for name, value in options.items() if value is not None})
        self._sdk = sdk
        self._sandboxes = client.AsyncSandbox
        self._templates = client.AsyncTemplate
        self._state = Path(state_dir).absolute()
        self._template = template
        self._image_key = image_metadata_key
        self._size = {} if size_metadata_key is None or size is None else {size_metadata_key: size}
        self._network_rules = network_rules
        self._max_lifetime = max_lifetime_seconds
        self._nonce = secrets.token_hex(16)
        self._keys: dict[str, anyio.Lock] = {}
        self._open: dict[str, E2BSandbox] = {}
        self._archives = Archives()
        self._asked: dict[str, str] = {}
        """Key → the request of its boot whose end is not known."""
        self._boots = 0
        self._nests = False
        """Whether the last box could make PID namespaces."""
        self.retries = Retries("e2b", patience=patience_seconds)

    def tally(self) -> Tally:
        """What failed so far."""
        return self.retries.tally()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the boxes that this provider made. Raises the first error of one that could not be removed."""
        failed: list[SandboxError] = []

        async def remove(box: E2BSandbox) -> None:
            try:
                await box.close()
            except SandboxError as e:
                failed.append(e)

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for box in list(self._open.values()):
                    group.start_soon(remove, box)
            if self._boots and not failed:
                await self._remove_doubles()
        if failed:
            raise failed[0]

    async def _remove_doubles(self) -> None:
        """A cluster that does not know idempotency keys makes a second box where a request was repeated on the way."""
        try:
            for info in await self._infos({_MAKER: self._nonce}):
                log.warning("removing box %s, of which no answer told", info.sandbox_id)
                await self._control("remove a box", lambda id=info.sandbox_id: self._sandboxes.kill(id))
        except SandboxError as error:
            log.warning("whether boxes are left cannot be found out; their leases will end them: %s", error)

    async def probe(self) -> Capabilities:
        """Ask the cluster for our boxes. Raises `ConfigError` for a key it refuses.

        Until there was a box, `tree_kill` is the least that any has.
        """
        await self.list()
        if not self._network_rules:
            log.warning("sandbox.e2b.network_rules is off: agents and tests reach what the cluster lets them reach")
        return Capabilities(
            name="e2b",
            pid_namespace=False,
            users=True,
            tamper_evident=True,
            networks=frozenset({"gateway_only", "none", "open"}),
            gateway="url",
            tree_kill="pid_namespace" if self._nests else "environment",
        )

    async def check_image(self, image: str) -> None:
        """With `image_metadata_key` only the cluster knows its images, so there the template is checked alone."""
        name = self._template if self._image_key or self._template else image
        if name is None:
            return
        known = await self._control("look for a template", lambda: self._templates.exists(name))
        if not known:
            raise ConfigError(f"image {image!r}: the cluster has no template {name!r}", image=image, template=name)

    # ------------------------------------------------------------------ boxes

    async def create(self, spec: SandboxSpec, *, key: str) -> E2BSandbox:
        """Boot a box, or return the open one of this key. Raises `ProvisionFailed`, `ConfigError`, `Unsupported`.

        The disk's size is the template's.
        """
        if spec.mounts:
            raise Unsupported("an E2B box cannot be shown folders of this machine; copy them in")
        if spec.memory_mb is not None or spec.pids is not None or spec.cpus is not None:
            raise Unsupported("memory, pids and cpus of an E2B box are its template's; unset memory_mb, pids and cpus")
        if spec.network == "gateway_only" and urlsplit(spec.gateway_url or "").hostname is None:
            raise Unsupported(
                "an E2B box is on another machine and reaches our gateway by a public address only, not at "
                f"{spec.gateway_url!r}"
            )
        async with self._keys.setdefault(key, anyio.Lock()):
            if key not in self._open:
                self._open[key] = await self._boot(spec, key)
            return self._open[key]

    async def _boot(self, spec: SandboxSpec, key: str) -> E2BSandbox:
        fresh = key not in self._asked
        request = self._request(key)
        seconds = self._lease(spec.lifetime_seconds)
        metadata = {_LABEL + name: value for name, value in spec.labels.items()} | self._size
        metadata |= {_SCOPE: await self._scope(), _OWNER: _owner(), _MAKER: self._nonce, _REQUEST: request}
        if self._image_key:
            metadata[self._image_key] = spec.image
        template = self._template if self._image_key or self._template else spec.image

        asked = not fresh

        async def ask() -> AsyncSandbox:
            nonlocal asked
            # Where the cluster forgets the keys of requests, the labels of its boxes tell what came of one.
            for info in await self._infos({_REQUEST: request}) if asked else ():
                return await self._sandboxes.connect(info.sandbox_id, timeout=seconds)
            asked = True
            return await self._sandboxes.create(
                template=template,
                timeout=seconds,
                metadata=metadata,
                envs=dict(spec.env),
                **self._network(spec),
                idempotency_key=request,
            )

        begun = time.monotonic()
        try:
            handle = await self._control("create a box", ask)
        except anyio.get_cancelled_exc_class():
            # The request may be on its way or done. Asked for again by its key, the box is found and removed.
            with anyio.move_on_after(_TAKE_BACK_SECONDS, shield=True), contextlib.suppress(SandboxError):
                unwanted = await self._control("take a box back", ask)
                await self._control("take a box back", lambda: self._sandboxes.kill(unwanted.sandbox_id))
            del self._asked[key]
            raise
        except (SandboxBroken, UsageError) as e:
            del self._asked[key]
            if isinstance(e, ConfigError):
                raise
            raise ProvisionFailed(f"no box of image {spec.image!r}: {e.message}", image=spec.image) from e

        del self._asked[key]

        def release() -> None:
            self._open.pop(key, None)
            self._keys.pop(key, None)

        guest = Guest(handle, self._sdk, lifetime=spec.lifetime_seconds, lease=self._lease, asked=begun)
        box = E2BSandbox(guest, retries=self.retries, archives=self._archives, release=release)
        try:
            await self.retries.call("set a box up", guest.set_up, Safety.SAFE)
            self._nests = guest.nests
        except BaseException:
            # One that cannot be removed now is ended by its lease; what went wrong first is what matters.
            with anyio.CancelScope(shield=True), contextlib.suppress(SandboxError):
                await box.close()
            raise
        return box

    def _request(self, key: str) -> str:
        """Names this boot of this process: no other one may be given its box, and a boot that ended in the dark finds
        its box when it is tried again."""
        if key not in self._asked:
            self._boots += 1
            self._asked[key] = hashlib.sha256(f"{self._nonce} {self._boots} {key}".encode()).hexdigest()[:32]
        return self._asked[key]

    def _lease(self, seconds: float) -> int:
        whole = math.ceil(seconds)
        return whole if self._max_lifetime is None else min(whole, self._max_lifetime)

    def _network(self, spec: SandboxSpec) -> dict[str, Any]:
        if spec.network == "open" or not self._network_rules:
            return {}
        if spec.network == "none":
            return {"allow_internet_access": False}
        return {"network": {"allow_out": [urlsplit(spec.gateway_url).hostname], "deny_out": [self._sdk.ALL_TRAFFIC]}}

    # ------------------------------------------------------------------ what there is

    async def list(self) -> list[BoxInfo]:
        """This installation's boxes. One whose owner is on another machine counts as owned until its lease ends."""
        return [_box_info(info) for info in await self._infos()]

    async def reap(self, *, everything: bool = False) -> list[str]:
        removed: list[str] = []
        for box in await self.list():
            if everything or not box.owner_alive or box.lease_seconds_left <= 0:
                await self._control("remove a box", lambda id=box.id: self._sandboxes.kill(id))
                removed.append(box.id)
        return removed

    async def _infos(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """This installation's boxes, or those with other labels."""
        query = self._sdk.SandboxQuery(metadata=labels or {_SCOPE: await self._scope()})

        async def ask() -> list[SandboxInfo]:
            pages = self._sandboxes.list(query=query)
            found: list[SandboxInfo] = []
            while pages.has_next:
                found += await pages.next_items()
            return found

        return await self._control("list boxes", ask)

    async def _scope(self) -> str:
        """The name of this installation, made once."""
        path = self._state / "e2b-scope"
        try:
            return await anyio.to_thread.run_sync(_read_or_make, path)
        except OSError as e:
            raise StoreError(f"cannot keep this installation's name at {path}: {e}", path=str(path)) from e

    async def _control(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        """A call of the control API, all of which may be repeated. The SDK also repeats: it alone sees Retry-After."""

        async def attempt() -> T:
            try:
                return await call()
            except Exception as e:
                raise classify(e, operation) from e

        return await self.retries.call(operation, attempt, Safety.SAFE)


def _owner() -> str:
    process = Process.of(os.getpid())
    if process is None:
        raise Unsupported("/proc does not show this process; mount it")
    return f"{socket.gethostname()} {boot_id()} {process.pid} {process.started}"


def _owner_alive(owner: str) -> bool:
    """Of this machine we know it, of others we believe it."""
    with contextlib.suppress(ValueError):
        host, boot, pid, started = owner.split(" ")
        if host == socket.gethostname():
            return boot == boot_id() and Process(pid=int(pid), started=int(started)).alive
    return True


def _box_info(info: SandboxInfo) -> BoxInfo:
    now = time.time()
    return BoxInfo(
        id=info.sandbox_id,
        labels={k.removeprefix(_LABEL): v for k, v in info.metadata.items() if k.startswith(_LABEL)},
        alive=info.end_at.timestamp() > now,
        owner_alive=_owner_alive(info.metadata.get(_OWNER, "")),
        age_seconds=now - info.started_at.timestamp(),
        lease_seconds_left=info.end_at.timestamp() - now,
    )


def _read_or_make(path: Path) -> str:
    """A file's text; the first who asks makes it, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as fresh:
            fresh.write(secrets.token_hex(16))
            fresh.flush()
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(fresh.name)
    return path.read_text()
