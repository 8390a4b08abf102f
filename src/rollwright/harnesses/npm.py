"""Fetches one pinned tarball with the user's own npm, so that their registry, proxy and token settings hold."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import anyio

from rollwright.errors import AgentInstallFailed, ConfigError
from rollwright.harnesses import Artifact

BACKOFF = (1.0, 2.0, 4.0)
"""Seconds before the second, third and fourth attempt."""

_TRANSIENT = frozenset(
    {
        *("EAI_AGAIN", "ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "ETIMEDOUT", "EPIPE"),
        *("ERR_SOCKET_TIMEOUT", "EHOSTUNREACH", "ENETUNREACH", "EIDLETIMEOUT", "ERR_STREAM_PREMATURE_CLOSE"),
        *("E408", "E429", "E500", "E502", "E503", "E504"),
        # what npm says of a download that was cut short
        *("EINTEGRITY", "TAR_BAD_ARCHIVE", "Z_BUF_ERROR", "EBADSIZE"),
    }
)
_ABSENT = frozenset({"E404", "ETARGET", "ENOVERSIONS"})
_REFUSED = frozenset({"E401", "E403", "ENEEDAUTH"})


async def pack(artifact: Artifact, into: Path, *, npm: str = "npm", backoff: Sequence[float] = BACKOFF) -> Path:
    """Put the tarball of `artifact` into the empty folder `into` and return its path, not yet verified.

    Raises `ConfigError`: no npm, no such package or version, access refused. `AgentInstallFailed`: the registry
    could not be reached or broke off, also on the last attempt.
    """
    spec = f"{artifact.package}@{artifact.version}"
    for pause in (*backoff, None):
        code, reason = await _npm_pack(spec, into, npm=npm)
        if code is None:
            return await _only_tarball(into, spec)
        if code in _ABSENT:
            raise ConfigError(f"the npm registry has no {spec}: {reason}", package=spec, code=code)
        if code in _REFUSED:
            raise ConfigError(f"the npm registry refuses {spec}: {reason}; check your .npmrc", package=spec, code=code)
        if code not in _TRANSIENT or pause is None:
            raise AgentInstallFailed(f"npm could not fetch {spec}: {reason}", package=spec, code=code)
        await anyio.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


async def _npm_pack(spec: str, into: Path, *, npm: str) -> tuple[str | None, str]:
    """One attempt: (None, "") or npm's error code and summary."""
    argv = [npm, "pack", spec, "--json", "--ignore-scripts", "--loglevel=silent", "--fetch-retries=0"]
    try:
        done = await anyio.run_process(
            [*argv, f"--pack-destination={into}"],
            stdin=subprocess.DEVNULL,
            check=False,
            cwd=into,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(_no_npm(npm, str(error)), field="harness.npm") from error
    if done.returncode == 0:
        return None, ""
    if done.returncode == 127:  # `env` in npm's first line did not find node
        raise ConfigError(_no_npm(npm, _last_line(done.stderr)), field="harness.npm")
    said = _npm_error(done.stdout) or _npm_error(done.stderr)  # npm 8 and older put it on stderr
    return said or (f"exit {done.returncode}", _last_line(done.stderr) or "no message")


def _no_npm(npm: str, reason: str) -> str:
    return (
        f"npm is needed to fetch the agent's CLI, but {npm!r} does not run ({reason}): install Node.js with npm "
        "(Debian: apt-get install npm), or set harness.npm to its path"
    )


def _npm_error(output: bytes) -> tuple[str, str] | None:
    try:
        said: Any = json.loads(output)
    except ValueError:
        return None
    error = cast("dict[str, Any]", said).get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict):
        return None
    fields = cast("dict[str, Any]", error)
    return str(fields.get("code") or "unknown"), str(fields.get("summary") or "no message")[:500]


async def _only_tarball(into: Path, spec: str) -> Path:
    found = [Path(path) async for path in anyio.Path(into).glob("*.tgz")]
    if len(found) != 1:
        raise AgentInstallFailed(f"npm said it packed {spec}, but left {len(found)} tarballs", package=spec)
    return found[0]


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else ""
