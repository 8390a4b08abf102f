"""Opening what the rollouts of a run share, checked for real before the first of them."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import anyio

from rollwright.config import GatewayTable
from rollwright.engines import Engine
from rollwright.errors import ConfigError
from rollwright.gateway.server import Gateway
from rollwright.harnesses.bundle import ensure_bundle
from rollwright.lockfile import check_images
from rollwright.rollout import Toolbox, box_spec
from rollwright.run.observer import Observer
from rollwright.run.parts import Parts, Places
from rollwright.sandboxes import Capabilities, Provider
from rollwright.sandboxes.prewarm import prewarm
from rollwright.sandboxes.warm import WarmProvider
from rollwright.tokens import Renderer

log = logging.getLogger(__name__)

_STEPS = 20
"""How often it is told how far a long preparation is."""


@asynccontextmanager
async def opened(
    parts: Parts, places: Places, observer: Observer, *, images: Sequence[str] = ()
) -> AsyncGenerator[Toolbox]:
    """Open what rollouts need and check it for real: sandboxes work here, images exist, the engine keeps its word."""
    config = parts.config
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, parts.provider)
        capabilities = await parts.provider.probe()
        if "gateway_only" not in capabilities.networks:
            raise ConfigError(f"sandbox {capabilities.name} cannot give a box the gateway as its only network")
        public = _public_socket(config.gateway, stack) if capabilities.gateway == "url" else None
        for setting, kept in (
            ("memory_mb", capabilities.memory_limit),
            ("pids", capabilities.pids_limit),
            ("cpus", capabilities.cpu_limit),
            ("disk_mb", capabilities.disk_limit),
        ):
            asked = setting in config.sandbox.model_fields_set and getattr(config.sandbox, setting) is not None
            if asked and not kept:
                log.warning("sandbox.%s is not kept: the %s backend cannot limit it here", setting, capabilities.name)
        for box in await parts.provider.reap():
            log.info("removed sandbox %s, which a killed run had left", box)
        await _make_ready(parts, capabilities, images, observer)
        if config.tasks.require_lock:
            await check_images(config.tasks.path, images, parts.provider)
        observer.preparing(f"harness {parts.harness.name}")
        bundle = await ensure_bundle(parts.harness, cache_dir=places.cache, npm=config.harness.npm)
        observer.preparing(f"engine {config.engine.kind}")
        engine = await stack.enter_async_context(parts.engine)
        await engine.check()
        same_tokens(parts.renderer, engine)
        gateway = await stack.enter_async_context(
            Gateway(
                engine=engine,
                renderer=parts.renderer,
                sampling=config.sampling.sampling(None),
                model=config.policy.model,
                keepalive_seconds=config.gateway.keepalive_seconds,
            )
        )
        if public is not None:
            await stack.enter_async_context(gateway.listening(public))
        provider = parts.provider
        if config.sandbox.warm:
            provider = await stack.enter_async_context(WarmProvider(provider, ahead=config.sandbox.warm))
        yield Toolbox(
            config=config,
            provider=provider,
            capabilities=capabilities,
            gateway=gateway,
            gateway_url=None if public is None else _public_url(config.gateway, public),
            max_context=engine.capabilities.max_context,
            harness=parts.harness,
            bundle=bundle,
            graders=parts.graders,
        )


async def _make_ready(parts: Parts, has: Capabilities, images: Sequence[str], observer: Observer) -> None:
    """Every image is there, or the run does not begin."""
    said = 0

    def tell(ready: int, of: int) -> None:
        nonlocal said
        if ready == of or ready * _STEPS // of > said:
            said = ready * _STEPS // of
            observer.preparing(f"images {ready}/{of}")

    config = parts.config
    boot = box_spec(config, has, image="", labels={"prewarm": "1"}) if config.sandbox.prewarm else None
    await prewarm(parts.provider, images, boot=boot, at_once=config.sandbox.boot_concurrency, done=tell)


def _public_socket(settings: GatewayTable, stack: AsyncExitStack) -> socket.socket:
    """Listens for boxes on other machines. Raises `ConfigError` before anything slow is begun."""
    if settings.public_url is None and settings.public_host is None:
        raise ConfigError(
            "the boxes of this backend are on other machines and reach the gateway by a public address only: set "
            "gateway.public_host to a name or address of this one (or gateway.public_url, behind a tunnel or proxy)",
            field="gateway.public_host",
        )
    if settings.public_url is not None and not _is_url(settings.public_url):
        raise ConfigError(
            f"gateway.public_url must be like https://name:port, not {settings.public_url!r}",
            field="gateway.public_url",
        )
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    try:
        return stack.enter_context(
            socket.create_server((settings.bind, settings.public_port), family=family, backlog=1024)
        )
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror or error}"
        raise ConfigError(
            f"port {settings.public_port} of {settings.bind}, for the gateway, {why}", field="gateway.public_port"
        ) from error


def _is_url(text: str) -> bool:
    """Scheme and host, and no path: CLIs append their own."""
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and parts.hostname is not None and not parts.path.strip("/")


def _public_url(settings: GatewayTable, sock: socket.socket) -> str:
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    host = settings.public_host or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


async def _close(provider: Provider) -> None:
    with anyio.CancelScope(shield=True):
        await provider.close()


def same_tokens(renderer: Renderer, engine: Engine) -> None:
    """A policy folder that is not the engine's would train on nonsense."""
    has = engine.capabilities
    if has.fingerprint is not None and has.fingerprint != renderer.fingerprint:
        raise ConfigError(
            f"engine {has.name} uses another tokenizer or chat template ({has.fingerprint}) than policy.path "
            f"({renderer.fingerprint})",
            field="policy.path",
        )
    if has.vocab_size is not None and has.vocab_size < renderer.vocab_size:
        raise ConfigError(
            f"policy.path has a vocabulary of {renderer.vocab_size} tokens, engine {has.name} only {has.vocab_size}",
            field="policy.path",
        )
