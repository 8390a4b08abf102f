"""Host bundles: a harness's pinned packages, fetched once, verified, unpacked and kept in the cache folder."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from anyio import from_thread, to_thread

from rollwright.errors import AgentInstallFailed, ConfigError
from rollwright.harnesses import Artifact, Harness, Wheels
from rollwright.harnesses.npm import BACKOFF, pack
from rollwright.harnesses.pypi import download
from rollwright.harnesses.unpack import unpack, unpack_wheel

_LOCK_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A complete bundle on the host. Read-only from now on; shown in the sandbox by a mount or copied into it."""

    path: Path
    """One folder for each artifact, called `Artifact.folder`."""
    harness: str
    version: str
    """Of the first artifact, the CLI itself."""
    digest: str
    """12 hex digits over all pins."""


async def ensure_bundle(
    harness: Harness,
    *,
    cache_dir: Path,
    npm: str = "npm",
    seconds: float = 900,
    backoff: Sequence[float] = BACKOFF,
) -> Bundle:
    """The harness's bundle in `cache_dir`/bundles, made if it is not there; a bundle that is there needs no network.

    Runs on one cache wait for each other, and only the first fetches. Cancelled or failed, it leaves nothing behind
    that counts as a bundle. Raises `ConfigError` (npm or pip missing, unknown package, checksum or content not as
    pinned) or `AgentInstallFailed` (registry or disk trouble, out of `seconds`).
    """
    bundle = locate(harness, cache_dir)
    if await anyio.Path(bundle.path).is_dir():
        return bundle
    try:
        with anyio.fail_after(seconds):
            async with _alone(bundle.path):
                if not await anyio.Path(bundle.path).is_dir():
                    await _make(bundle, harness.artifacts, npm=npm, backoff=backoff)
    except TimeoutError as error:
        raise AgentInstallFailed(f"fetching {harness.name} {bundle.version} took more than {seconds:g} s") from error
    except OSError as error:
        raise AgentInstallFailed(f"the cache folder {cache_dir} cannot be written: {error}") from error
    return bundle


def locate(harness: Harness, cache_dir: Path) -> Bundle:
    """Where the bundle is, or would be."""
    pins = [_pin(artifact) for artifact in harness.artifacts]
    digest = hashlib.sha256(json.dumps(pins).encode()).hexdigest()[:12]
    version = harness.artifacts[0].version
    path = cache_dir / "bundles" / f"{harness.name}-{version}-{digest}"
    return Bundle(path=path, harness=harness.name, version=version, digest=digest)


def _pin(artifact: Artifact | Wheels) -> list[str]:
    """All that decides what its folder holds."""
    if isinstance(artifact, Artifact):
        where = [f"at={artifact.at}"] if artifact.at else []
        return [artifact.package, artifact.version, artifact.sha512, *artifact.keep, *where]
    return [artifact.package, artifact.version, _read(artifact.requirements), *artifact.pythons]


def _read(requirements: Path) -> str:
    try:
        return requirements.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the requirements file {requirements} cannot be read: {error}") from error


async def _make(bundle: Bundle, artifacts: Sequence[Artifact | Wheels], *, npm: str, backoff: Sequence[float]) -> None:
    # one name, used only under the lock: what a killed run left is removed by the next
    work = bundle.path.with_name(f".{bundle.path.name}.part")
    try:
        await _remove(work)
        for artifact in artifacts:
            downloads = work / "downloads" / artifact.folder
            await anyio.Path(downloads).mkdir(parents=True)
            target = work / "tree" / artifact.folder
            if isinstance(artifact, Artifact):
                await _make_from_npm(artifact, downloads, target, npm=npm, backoff=backoff)
            else:
                await _make_from_pypi(artifact, downloads, target, backoff=backoff)
            await _remove(downloads)
        await anyio.Path(work / "tree").chmod(0o755)
        await anyio.Path(work / "tree").rename(bundle.path)
    finally:
        with anyio.CancelScope(shield=True):
            await _remove(work)


async def _make_from_npm(
    artifact: Artifact, downloads: Path, target: Path, *, npm: str, backoff: Sequence[float]
) -> None:
    tarball = artifact.file or await pack(artifact, downloads, npm=npm, backoff=backoff)
    await to_thread.run_sync(_verify, tarball, artifact)
    await to_thread.run_sync(partial(unpack, tarball, target, keep=artifact.keep, check=from_thread.check_cancelled))


async def _make_from_pypi(artifact: Wheels, downloads: Path, target: Path, *, backoff: Sequence[float]) -> None:
    """pip has verified what it downloads."""
    found = {
        python: await download(artifact, python, downloads / python, backoff=backoff) for python in artifact.pythons
    }
    names = [{wheel.name for wheel in wheels} for wheels in found.values()]
    shared = set[str]().union(*names).intersection(*names)
    unpacked = set[str]()
    for python, wheels in found.items():
        for wheel in wheels:
            folder = "site" if wheel.name in shared else f"cp{python.replace('.', '')}"
            if folder != "site" or wheel.name not in unpacked:
                await to_thread.run_sync(
                    partial(unpack_wheel, wheel, target / folder, check=from_thread.check_cancelled)
                )
            unpacked.add(wheel.name)


def _verify(tarball: Path, artifact: Artifact) -> None:
    with tarball.open("rb") as file:
        found = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if found != artifact.sha512:
        raise ConfigError(
            f"{artifact.package}@{artifact.version} from the npm registry is not the pinned file: its sha512 is "
            f"{found}, expected {artifact.sha512}; check `npm config get registry`, or pin the new value",
            package=artifact.package,
        )


@asynccontextmanager
async def _alone(path: Path) -> AsyncGenerator[None]:
    """Hold the bundle's lock file, against other processes and other tasks of this one."""
    try:
        await anyio.Path(path.parent).mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"the cache folder {path.parent} cannot be written: {error}") from error
    try:
        while not _try_lock(lock):  # noqa: ASYNC110 - the holder may be another process
            await anyio.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _remove(folder: Path) -> None:
    if await anyio.Path(folder).exists():
        await to_thread.run_sync(shutil.rmtree, folder)
