"""What only a real box can tell: whether the gateway is reached from inside, and whether the CLI runs there."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
from starlette.responses import Response

from rollwright import plugins
from rollwright.doctor import Check, Finding, found
from rollwright.doctor.subject import Subject
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.errors import Unsupported
from rollwright.gateway.connection import Front
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import SessionLimits
from rollwright.harnesses import Artifact, Wheels
from rollwright.harnesses.bundle import locate
from rollwright.rollout import box_spec
from rollwright.sandboxes import ExecResult, Mount, Sandbox, SandboxSpec

_PORT = 18001
_LIFETIME_SECONDS = 300.0
_KNOCK = Path(__file__).with_name("knock.sh")
_NO_CLIENT = 3


def checks(subject: Subject) -> list[Check]:
    boot = 30.0 if subject.config is None else 30.0 + subject.config.sandbox.boot_seconds
    return [
        Check(name="gateway", look=_gateway, fix="see docs/sandboxes.md on networks", seconds=boot),
        Check(name="harness", look=_harness, fix="rollwright harness bundle NAME", seconds=boot),
    ]


@asynccontextmanager
async def _box(subject: Subject, *, mounts: tuple[Mount, ...] = (), network: bool = False) -> AsyncGenerator[Sandbox]:
    """A box as a run would boot it."""
    provider, has = await subject.provider(subject.backend).get()
    image = await subject.image()
    if subject.config is None:
        spec = SandboxSpec(image=image, disk_mb=64)
    else:
        spec = box_spec(subject.config, has, image=image, labels={"rollout": "doctor"})
    port = _PORT if subject.config is None else subject.config.gateway.port
    spec = replace(
        spec,
        network="gateway_only" if network else "none",
        gateway_port=port,
        mounts=mounts if has.mounts else (),
        lifetime_seconds=_LIFETIME_SECONDS,
    )
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
        fix = "run as root beside the docker daemon, or set sandbox.e2b.gateway_url, or use sandbox.kind=namespaces"
        return found("gateway", "fail", seen, fix)
    async with _box(subject, network=True) as box:
        listener = box.gateway_socket
        if listener is None:
            raise Unsupported(f"sandbox {has.name} has no listening socket for the gateway in its boxes")
        if subject.config is None:
            async with Front(Response("here")).serving(listener, {}):
                return _heard(await _knock(box, _PORT, "doctor"), "host")
        renderer = await subject.renderer.get()
        engine = ScriptedEngine(renderer=renderer, script=Script(script=(Rule(replies=("Hello.",)),)))
        async with (
            engine,
            Gateway(
                engine=engine,
                renderer=renderer,
                sampling=subject.config.sampling.sampling(None),
                model=subject.config.policy.model,
            ) as gateway,
        ):
            session = gateway.open("doctor", log=None, limits=SessionLimits())
            async with gateway.listening(listener, session):
                return _heard(await _knock(box, subject.config.gateway.port, session.secret), await subject.image())


async def _knock(box: Sandbox, port: int, key: str) -> ExecResult:
    script = await anyio.Path(_KNOCK).read_bytes()
    argv = ("sh", "-s", "--", str(port), "/v1/models", key)
    return await box.exec(argv, user="agent", input=script, seconds=20)


def _heard(result: ExecResult, image: str) -> list[Finding]:
    said = result.stdout.decode(errors="replace").strip()[:100]
    if result.exit_code == 0 and said == "200":
        return found("gateway", "ok", f"answers inside a box of image {image}")
    if result.exit_code == _NO_CLIENT:
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
    async with _box(subject, mounts=(Mount(source=bundle.path, target=target),)) as box:
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
