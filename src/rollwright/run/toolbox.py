"""Opening what the rollouts of a run share, checked for real before the first of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from rollwright.engines import Engine
from rollwright.errors import ConfigError
from rollwright.gateway.server import Gateway
from rollwright.harnesses.bundle import ensure_bundle
from rollwright.rollout import Toolbox
from rollwright.run.observer import Observer
from rollwright.run.parts import Parts, Places
from rollwright.sandboxes import Provider
from rollwright.tokens import Renderer

log = logging.getLogger(__name__)


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
        for setting, kept in (("memory_mb", capabilities.memory_limit), ("pids", capabilities.pids_limit)):
            if getattr(config.sandbox, setting) is not None and not kept:
                log.warning("sandbox.%s is not kept: the %s backend cannot limit it here", setting, capabilities.name)
        for image in images:
            await parts.provider.check_image(image)
        for box in await parts.provider.reap():
            log.info("removed sandbox %s, which a killed run had left", box)
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
        yield Toolbox(
            config=config,
            provider=parts.provider,
            capabilities=capabilities,
            gateway=gateway,
            max_context=engine.capabilities.max_context,
            harness=parts.harness,
            bundle=bundle,
            graders=parts.graders,
        )


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
