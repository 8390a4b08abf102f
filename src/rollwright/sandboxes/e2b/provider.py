"""The provider: boots, takes over, lists and reaps boxes through the control API."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
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
    SandboxGone,
    StoreError,
    Unsupported,
    UsageError,
)
from rollwright.sandboxes import BoxInfo, Capabilities, SandboxSpec
from rollwright.sandboxes.e2b.archives import Archives
from rollwright.sandboxes.e2b.box import E2BSandbox
from rollwright.sandboxes.e2b.guest import Guest
from rollwright.sandboxes.e2b.sdk import classify, load
from rollwright.sandboxes.lease import Lease, checked_survive
from rollwright.sandboxes.owners import Holders, Owner
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
_KEY = "rollwright-key"
_LIFETIME = "rollwright-lifetime"
_SURVIVES = "rollwright-survives"
"""It waits for another process when its maker has died; without it such a box is reaped."""
_TAKE_BACK_SECONDS = 30.0


class E2BProvider:
    """A `Provider` of E2B boxes. The API key, domain and URLs that are not given are those of the SDK's environment.

    `image_metadata_key`: a box is made of `template` (or E2B's default), and the image's name goes into this metadata
    key, by which the cluster picks the image. Without it an image's name is the name of a template; with a `template`
    and no key every box is of that template. `size_metadata_key` and `size` go into the metadata as they are.
    `network_rules`: whether the cluster keeps E2B's rules for a box's network; without them every box has the network
    that the cluster gives, whatever its spec says.
    `max_lifetime_seconds`: the longest lease the cluster gives. `survive`: seconds that boxes live on when this process
    dies without closing them, in which another one of this machine may `attach` to them; then a box's lease is little
    longer than that, and one that is not used for so long ends. `state_dir` holds the name under which this
    installation's boxes are listed and reaped, and who has taken them over. Raises `Unsupported` for a missing or older
    SDK.
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
        survive: float = 0,
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
        self._survive = checked_survive(survive, field="sandbox.e2b.survive")
        if max_lifetime_seconds is not None and 2 * self._survive > max_lifetime_seconds:
            raise ConfigError(
                f"sandbox.e2b.survive = {survive:g} needs leases of twice that, and max_lifetime_seconds is "
                f"{max_lifetime_seconds}",
                field="sandbox.e2b.survive",
            )
        self._holders = Holders(self._state / "e2b-holders")
        self._looking = anyio.Lock()
        self._waiting: dict[str, list[str]] | None = None
        """Hashed key → boxes that wait under it. None: not looked yet."""
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
            for box in await self.sweep(self.maker):
                log.warning("removed box %s, of which no answer told", box)
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
            attach=self._survive > 0,
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
            box = await self._living(key)
            if box is None:
                if self._survive:
                    await self._end_waiting(key)
                box = self._open[key] = await self._boot(spec, key)
            return box

    async def _living(self, key: str) -> E2BSandbox | None:
        """The open box of this key, if it is still there."""
        box = self._open.get(key)
        if box is not None:
            try:
                await self._control("look for a box", lambda: self._sandboxes.get_info(box.id))
            except SandboxGone:
                await box.close()
                return None
        return box

    async def _boot(self, spec: SandboxSpec, key: str) -> E2BSandbox:
        fresh = key not in self._asked
        request = self._request(key)
        metadata = {_LABEL + name: value for name, value in spec.labels.items()} | self._size
        metadata |= {_SCOPE: await self._scope(), _OWNER: str(Owner.myself()), _MAKER: self._nonce, _REQUEST: request}
        metadata |= {_KEY: _hashed(key), _LIFETIME: str(spec.lifetime_seconds)}
        survive = self._survive if spec.survives else 0.0
        if survive:
            metadata[_SURVIVES] = str(survive)
        if self._image_key:
            metadata[self._image_key] = spec.image
        template = self._template if self._image_key or self._template else spec.image

        begun = time.monotonic()
        lease = self._lease(spec.lifetime_seconds, now=begun, survive=survive)
        seconds = math.ceil(lease.amount(begun))
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
        box, _ = await self._made_ready(handle, lease, key)
        return box

    async def _made_ready(self, handle: AsyncSandbox, lease: Lease, key: str) -> tuple[E2BSandbox, bool]:
        """The box, and whether it had been made ready before. One that cannot be is removed."""

        def release() -> None:
            self._open.pop(key, None)
            if not self._keys[key].locked():
                del self._keys[key]
            self._holders.drop(handle.sandbox_id)

        guest = Guest(handle, self._sdk, lease=lease)
        box = E2BSandbox(guest, retries=self.retries, archives=self._archives, release=release)
        try:
            await self.retries.call("set a box up", guest.set_up, Safety.SAFE)
            self._nests = guest.nests
        except BaseException:
            # One that cannot be removed now is ended by its lease; what went wrong first is what matters.
            with anyio.CancelScope(shield=True), contextlib.suppress(SandboxError):
                await box.close()
            raise
        return box, guest.known

    def _request(self, key: str) -> str:
        """Names this boot of this process: no other one may be given its box, and a boot that ended in the dark finds
        its box when it is tried again."""
        if key not in self._asked:
            self._boots += 1
            self._asked[key] = hashlib.sha256(f"{self._nonce} {self._boots} {key}".encode()).hexdigest()[:32]
        return self._asked[key]

    def _lease(self, lifetime: float, *, now: float, survive: float) -> Lease:
        return Lease(lifetime, now=now, survive=survive, longest=self._max_lifetime)

    def _network(self, spec: SandboxSpec) -> dict[str, Any]:
        if spec.network == "open" or not self._network_rules:
            return {}
        if spec.network == "none":
            return {"allow_internet_access": False}
        return {"network": {"allow_out": [urlsplit(spec.gateway_url).hostname], "deny_out": [self._sdk.ALL_TRAFFIC]}}

    # ------------------------------------------------------------------ boxes of a process that is dead

    async def attach(self, key: str) -> E2BSandbox:
        """Take over the box that a dead process of this machine left under this key. Its jobs run on, and are found by
        their ids; its life begins anew.

        Raises `SandboxGone` when there is no such box any more, `UsageError` when it is in use, or was made on another
        machine, of which nothing is known here.
        """
        async with self._keys.setdefault(key, anyio.Lock()):
            box = await self._living(key)
            if box is not None:
                return box
            found = await self._infos({_SCOPE: await self._scope(), _KEY: _hashed(key)})
            waiting = [info for info in found if _SURVIVES in info.metadata]
            for info in sorted(waiting, key=lambda info: info.started_at, reverse=True):
                box = await self._take_over(info, key)
                if box is not None:
                    self._open[key] = box
                    return box
            raise SandboxGone(f"no box of {key!r} is left", reason="unknown", key=key)

    def known_as(self, key: str) -> str:
        return key

    async def _take_over(self, info: SandboxInfo, key: str) -> E2BSandbox | None:
        """None: its maker never had it, a cluster without idempotency keys made it by mistake."""
        try:
            lifetime = float(info.metadata[_LIFETIME])
        except (KeyError, ValueError) as e:
            raise SandboxBroken(
                f"box {info.sandbox_id} does not say how long it is to live", box=info.sandbox_id
            ) from e
        await self._take(info)
        try:
            now = time.monotonic()
            lease = self._lease(lifetime, now=now, survive=self._survive)
            seconds = math.ceil(lease.amount(now))
            handle = await self._control(
                "connect to a box", lambda: self._sandboxes.connect(info.sandbox_id, timeout=seconds)
            )
            box, known = await self._made_ready(handle, lease, key)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._holders.drop, info.sandbox_id)
            raise
        if known:
            return box
        await box.close()
        return None

    async def _take(self, info: SandboxInfo) -> None:
        maker = Owner.parse(info.metadata.get(_OWNER, ""))
        await anyio.to_thread.run_sync(partial(self._holders.take, info.sandbox_id, maker=maker))

    async def _end_waiting(self, key: str) -> None:
        """A new box takes the place of one that waits. What waits was made before us, so it is looked for once."""
        async with self._looking:
            if self._waiting is None:
                holders = await anyio.to_thread.run_sync(self._holders.all)
                self._waiting = {}
                for info in await self._infos():
                    if _KEY in info.metadata and not _owner_alive(info, holders):
                        self._waiting.setdefault(info.metadata[_KEY], []).append(info.sandbox_id)
            left = self._waiting.pop(_hashed(key), ())
        for box in left:
            await self._control("remove a box", lambda box=box: self._sandboxes.kill(box))
            await anyio.to_thread.run_sync(self._holders.drop, box)

    # ------------------------------------------------------------------ what there is

    async def list(self) -> list[BoxInfo]:
        """This installation's boxes. One whose owner is on another machine counts as owned until its lease ends."""
        holders = await anyio.to_thread.run_sync(self._holders.all)
        return [_box_info(info, holders) for info in await self._infos()]

    async def reap(self, *, everything: bool = False) -> list[str]:
        """Remove boxes whose owner is dead or whose lease ran out (or all of them). One that waits for another process
        keeps until its lease is over."""
        holders = await anyio.to_thread.run_sync(self._holders.all)
        infos = await self._infos()
        removed: list[str] = []
        for info in infos:
            box = _box_info(info, holders)
            wanted = (box.owner_alive or _SURVIVES in info.metadata) and box.lease_seconds_left > 0
            if everything or not wanted:
                await self._control("remove a box", lambda id=box.id: self._sandboxes.kill(id))
                removed.append(box.id)
        living = {info.sandbox_id for info in infos} - set(removed)
        await anyio.to_thread.run_sync(self._holders.drop_dead, living)
        return removed

    @property
    def maker(self) -> str:
        return self._nonce

    async def sweep(self, maker: str) -> list[str]:
        """Remove the boxes that a provider made which is gone, on whatever machine. See `Sweeps`."""
        removed: list[str] = []
        for info in await self._infos({_MAKER: maker}):
            await self._control("remove a box", lambda id=info.sandbox_id: self._sandboxes.kill(id))
            removed.append(info.sandbox_id)
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


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _owner_alive(info: SandboxInfo, holders: Mapping[str, Owner]) -> bool:
    owner = holders.get(info.sandbox_id) or Owner.parse(info.metadata.get(_OWNER, ""))
    return owner is None or owner.alive


def _box_info(info: SandboxInfo, holders: Mapping[str, Owner]) -> BoxInfo:
    now = time.time()
    return BoxInfo(
        id=info.sandbox_id,
        labels={k.removeprefix(_LABEL): v for k, v in info.metadata.items() if k.startswith(_LABEL)},
        alive=info.end_at.timestamp() > now,
        owner_alive=_owner_alive(info, holders),
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
