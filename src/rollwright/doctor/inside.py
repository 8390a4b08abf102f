"""What only a real box can tell: whether the gateway is reached from inside, and whether the CLI runs there."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
from starlette.responses import Response

from rollwright import plugins
from rollwright.doctor import Check, Finding, found
from rollwright.doctor.subject import Blocked, Subject
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.errors import RollwrightError, Unsupported
from rollwright.gateway.connection import Front
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import SessionLimits
from rollwright.harnesses import Artifact, Wheels
from rollwright.harnesses.bundle import locate
from rollwright.rollout import box_spec
from rollwright.run.public_address import public_socket, public_url
from rollwright.sandboxes import Capabilities, ExecResult, Mount, Sandbox, SandboxSpec
from rollwright.sandboxes.knock import NO_CLIENT, knock

_PORT = 18001
_LIFETIME_SECONDS = 300.0


def checks(subject: Subject) -> list[Check]:
    boot = 30.0 if subject.config is None else 30.0 + subject.config.sandbox.boot_seconds
    return [
        Check(name="gateway", look=_gateway, fix="see docs/sandboxes.md on networks", seconds=boot),
        Check(name="harness", look=_harness, fix="rollwright harness bundle NAME", seconds=boot),
    ]


@asynccontextmanager
async def _box(subject: Subject, **more: Any) -> AsyncGenerator[Sandbox]:
    """A box as a run would boot it. `more`: fields of its spec."""
    provider, has = await subject.provider(subject.backend).get()
    image = await subject.image()
    try:
        await provider.check_image(image)
    except RollwrightError as error:
        raise Blocked(f"needs image {image}") from error
    if subject.config is None:
        spec = SandboxSpec(image=image, disk_mb=64, survives=False)
    else:
        spec = box_spec(subject.config, has, image=image, labels={"rollout": "doctor"})
    spec = replace(spec, lifetime_seconds=_LIFETIME_SECONDS, **more)
    box = await provider.create(spec, key=f"doctor-{secrets.token_hex(8)}")
    try:
        yield box
    finally:
        with anyio.CancelScope(shield=True):
            await box.close()


async def _gateway(subject: Subject) -> list[Finding]:
    """Knock at the gateway from inside a box, as the CLI will: with a session's key, and as the agent."""
    _, has = await subject.provider(subject.backend).get()
    if "gateway_only" not in has.networks:
        seen = f"{has.name} cannot give a box the gateway as its only network here"
        return found("gateway", "fail", seen, "run as root beside the docker daemon, or use sandbox.kind=namespaces")
    if subject.config is None:
        async with _box(subject, network="gateway_only", gateway_port=_PORT) as box, _answering(box, has):
            return _heard(await knock(box, f"http://127.0.0.1:{_PORT}", "doctor"), "host")
    config, renderer = subject.config, await subject.renderer.get()
    async with AsyncExitStack() as stack:
        public = public_socket(config.gateway, stack) if has.gateway == "url" else None
        engine = ScriptedEngine(renderer=renderer, script=Script(script=(Rule(replies=("Hello.",)),)))
        sampling = config.sampling.sampling(None)
        gateway = Gateway(engine=engine, renderer=renderer, sampling=sampling, model=config.policy.model)
        await stack.enter_async_context(engine)
        await stack.enter_async_context(gateway)
        session = gateway.open("doctor", log=None, limits=SessionLimits())
        url = None if public is None else public_url(config.gateway, public)
        network = {"network": "gateway_only", "gateway_port": config.gateway.port, "gateway_url": url}
        box = await stack.enter_async_context(_box(subject, **network))
        listener = public or box.gateway_socket
        if listener is None:
            raise Unsupported(f"sandbox {has.name} has no listening socket for the gateway in its boxes")
        await stack.enter_async_context(gateway.listening(listener, session))
        said = await knock(box, url or f"http://127.0.0.1:{config.gateway.port}", session.secret)
        return _heard(said, await subject.image())


@asynccontextmanager
async def _answering(box: Sandbox, has: Capabilities) -> AsyncGenerator[None]:
    """Something that answers in the gateway's place: without a run file there is no policy to serve."""
    listener = box.gateway_socket
    if listener is None:
        raise Unsupported(f"sandbox {has.name} has no listening socket for the gateway in its boxes")
    async with Front(Response("here")).serving(listener, {}):
        yield


def _heard(result: ExecResult, image: str) -> list[Finding]:
    said = result.stdout.decode(errors="replace").strip()[:100]
    if result.exit_code == 0 and said == "200":
        return found("gateway", "ok", f"answers inside a box of image {image}")
    if result.exit_code == NO_CLIENT:
        seen = f"image {image} has no python3, curl, bash or wget to knock with"
        return found("gateway", "warn", seen, "nothing, if its CLI brings its own HTTP client, as all shipped ones do")
    error = said or result.stderr.decode(errors="replace").strip()[-300:] or "no answer"
    fix = "look for a proxy or firewall in the image (http_proxy), and see docs/sandboxes.md on networks"
    return found("gateway", "fail", f"not reached from inside a box of image {image}: {error}", fix)


async def _harness(subject: Subject) -> list[Finding]:
    if subject.config is None:
        return await _bundles(subject)
    harness = await subject.harness.own()
    bundle = locate(harness, subject.places.cache)
    name = f"{harness.name} {bundle.version}"
    if not bundle.path.is_dir():
        missing = await _missing(harness.artifacts, npm=subject.config.harness.npm)
        if missing is not None:
            return found("harness", "fail", f"{name} is not in the cache, and {missing[0]}", missing[1])
        fix = f"rollwright harness bundle {harness.name}"
        return found("harness", "warn", f"{name} is not in the cache, the first run fetches it", fix)
    _, has = await subject.provider(subject.backend).get()
    target = f"/opt/rollwright/{harness.name}"
    mounts = (Mount(source=bundle.path, target=target),) if has.mounts else ()
    async with _box(subject, mounts=mounts) as box:
        if not has.mounts:
            await box.put_tree(bundle.path, target)
        result = await box.exec(harness.version_argv(target), user="agent")
    said = (result.stdout or result.stderr).decode(errors="replace").strip().splitlines() or ["nothing"]
    if result.exit_code == 0:
        return found("harness", "ok", f"{name} runs in a box: {said[0][:100]}")
    seen = f"{name} does not start in image {await subject.image()}: {said[-1][:300]}"
    fix = f"use an image with the C library it needs, or remove {bundle.path} if it is damaged"
    return found("harness", "fail", seen, fix)


async def _bundles(subject: Subject) -> list[Finding]:
    """Without a run file: which CLIs a run would find, and whether others could be fetched."""
    cached: list[str] = []
    artifacts: list[Artifact | Wheels] = []
    for name in plugins.names("harnesses"):
        harness = plugins.make("harnesses", name, {}, table=f"harness.{name}", base=Path.cwd())
        if locate(harness, subject.places.cache).path.is_dir():
            cached.append(name)
        else:
            artifacts += harness.artifacts
    seen = f"in the cache: {', '.join(cached) or 'none'}"
    missing = await _missing(artifacts, npm="npm")
    if missing is not None:
        return found("harness", "warn", f"{seen}; {missing[0]}, so no other can be fetched", missing[1])
    return found("harness", "ok", seen + ("; others are fetched by the first run" if artifacts else ""))


async def _missing(artifacts: Sequence[Artifact | Wheels], *, npm: str) -> tuple[str, str] | None:
    """What is needed to fetch these and is not here: (what, fix)."""
    if any(isinstance(artifact, Artifact) for artifact in artifacts):
        fix = "install Node.js with npm (Debian: apt-get install npm), or set harness.npm to its path"
        if shutil.which(npm) is None:
            return f"there is no {npm} in PATH", fix
        done = await anyio.run_process([npm, "--version"], stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            return f"{npm} does not run ({said[-1][:200]})", fix
    pips = importlib.util.find_spec("pip") or shutil.which("pip3") or shutil.which("pip")
    if any(isinstance(artifact, Wheels) for artifact in artifacts) and not pips:
        return "there is no pip", "install pip (Debian: apt-get install python3-pip)"
    return None
