"""Fetches pinned wheels with the user's own pip, so that their index, proxy and token settings hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from rollwright.errors import AgentInstallFailed, ConfigError
from rollwright.harnesses import Wheels
from rollwright.harnesses.npm import BACKOFF

# newest first; pip takes a wheel for any of them
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")

# pip has no error codes; without a reachable index it also says that nothing matches, so this is looked for first
_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|Connection (?:refused|reset|aborted|broken)|ProxyError|SSLError"
    r"|name resolution|IncompleteRead|ProtocolError|HTTP error (?:408|429|5\d\d)|(?:429|5\d\d) (?:Client|Server) Error"
    r"|RetryError|Max retries exceeded|connection was broken|timed out",
    re.IGNORECASE,
)
_OTHER_FILE = re.compile(r"DO NOT MATCH THE HASHES", re.IGNORECASE)
_ABSENT = re.compile(r"No matching distribution found|HTTP error 40\d", re.IGNORECASE)


async def download(wheels: Wheels, python: str, into: Path, *, backoff: Sequence[float] = BACKOFF) -> list[Path]:
    """The wheels of `wheels.requirements` for CPython `python` (`3.11`) in the new folder `into`, verified by pip.

    Raises `ConfigError`: no pip, no such version, not the pinned file. `AgentInstallFailed`: the index could not be
    reached or broke off, also on the last attempt.
    """
    for pause in (*backoff, None):
        said = await _pip_download(wheels, python, into)
        if said is None:
            return sorted([Path(path) async for path in anyio.Path(into).glob("*.whl")])
        reason = _last_line(said)
        spec = f"{wheels.package}=={wheels.version}"
        if not _UNREACHABLE.search(said) and not _OTHER_FILE.search(said):
            if _ABSENT.search(said):
                raise ConfigError(f"the index has not all that {spec} needs for Python {python}: {reason}")
            raise AgentInstallFailed(f"pip could not fetch {spec}: {reason}", package=spec)
        if pause is None:
            # pip says the same of a download that was cut short, but not each time
            if _OTHER_FILE.search(said):
                raise ConfigError(f"what the index has for {spec} is not what is pinned: {_mismatch(said)}")
            raise AgentInstallFailed(f"pip could not reach the index for {spec}: {reason}", package=spec)
        await anyio.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


async def _pip_download(wheels: Wheels, python: str, into: Path) -> str | None:
    """One attempt: None, or what pip said."""
    options = [
        *("--no-deps", "--require-hashes", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar=off", "--quiet"),
        "--retries=1",  # with none at all pip keeps to itself why it failed
        *(f"--platform={name}" for name in _PLATFORMS),
        *("--implementation=cp", f"--python-version={python}"),
        *(f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")),
        f"--requirement={wheels.requirements.absolute()}",
        f"--dest={into}",
    ]
    for pip in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        try:
            done = await anyio.run_process([*pip, "download", *options], stdin=subprocess.DEVNULL, check=False)
        except (FileNotFoundError, PermissionError):
            continue
        if done.returncode == 0:
            return None
        said = done.stderr.decode("utf-8", errors="replace")
        if "No module named pip" not in said:
            return said
    raise ConfigError(
        "pip is needed to fetch the agent's CLI, but neither this Python nor the PATH has one: "
        f"install it ({sys.executable} -m ensurepip, or Debian: apt-get install python3-pip)"
    )


def _mismatch(said: str) -> str:
    """pip names the package, the expected and the found value on the lines that follow."""
    lines = [line.strip() for line in said[said.upper().index("DO NOT MATCH THE HASHES") :].splitlines()[1:]]
    return " ".join(line for line in lines if line)[:500]


def _last_line(said: str) -> str:
    lines = [line for line in said.strip().splitlines() if not line.startswith("WARNING")]
    return lines[-1][:500] if lines else "no message"
