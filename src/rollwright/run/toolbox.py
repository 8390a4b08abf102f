"""Opening what the rollouts of a run share, checked for real before the first of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio

from rollwright.engines import Engine
from rollwright.errors import ConfigError
from rollwright.gateway.server import Gateway
from rollwright.harnesses.bundle import ensure_bundle
from rollwright.lockfile import check_images
from rollwright.rollout import Toolbox, box_spec
from rollwright.run.observer import Observer
from rollwright.run.parts import Parts, Places
from rollwright.run.public_address import public_socket, public_url
from rollwright.sandboxes import Capabilities, Provider
from rollwright.sandboxes.prewarm import prewarm
from rollwright.sandboxes.warm import WarmProvider
from rollwright.tokens import Renderer

log = logging.getLogger(__name__)

_STEPS = 20
"""How often it is told how far a long preparation is."""


@asynccontextmanager
async def opened(
    parts: Parts, places: Places, observer: Observer, *, images: Sequence[str] = (), left: Path | None = None
) -> AsyncGenerator[Toolbox]:
    """Open what rollouts need and check it for real: sandboxes work here, images exist, the engine keeps its word.

    `left`: a folder with rollouts that an earlier process left in flight and that may be gone on with.
    """
    config = parts.config
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, parts.provider)
        capabilities = await parts.provider.probe()
        if "gateway_only" not in capabilities.networks:
            raise ConfigError(f"sandbox {capabilities.name} cannot give a box the gateway as its only network")
        public = public_socket(config.gateway, stack) if capabilities.gateway == "url" else None
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
            if left is not None and capabilities.attach:
                gateway.expect(left)
            await stack.enter_async_context(gateway.listening(public))
        provider = parts.provider
        if config.sandbox.warm:
            provider = await stack.enter_async_context(WarmProvider(provider, ahead=config.sandbox.warm))
        yield Toolbox(
            config=config,
            provider=provider,
            capabilities=capabilities,
            engine=engine,
            gateway=gateway,
            gateway_url=None if public is None else public_url(config.gateway, public),
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
