"""Harnesses: drivers of real coding-agent CLIs. One file a CLI; this is the contract.

A harness is pure description: it says what to ship, what to write and what to run; `rollout` does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from rollwright.sandboxes import JobResult

__all__ = ["AgentReport", "Artifact", "DialectName", "Endpoint", "Harness", "Launch", "Wheels"]

DialectName = Literal["anthropic", "openai_chat", "openai_responses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One npm tarball to fetch, verify and unpack on the host, then show read-only in the sandbox."""

    package: str
    """npm package name, e.g. `@earendil-works/pi-coding-agent`."""
    version: str
    """Exact."""
    sha512: str
    """The registry's integrity value of the tarball (base64, without the `sha512-` prefix)."""
    keep: tuple[str, ...] = ()
    """Files or folders inside the tarball to keep; all when empty."""
    at: str = ""
    """Its folder inside the bundle; empty: the package's name without its scope."""
    file: Path | None = None
    """The tarball itself, on this machine; None: from the registry."""

    @property
    def folder(self) -> str:
        return self.at or self.package.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheels:
    """A CLI from PyPI with what it needs at run time: wheels to fetch, verify and unpack for several Pythons.

    Its folder holds `site` (what serves every Python) and `cp310`, `cp311`, ... (what serves one).
    """

    package: str
    """PyPI name of the CLI."""
    version: str
    """Exact."""
    requirements: Path
    """A file of pip requirements: every package as `name==version`, each with the sha256 of its wheels."""
    pythons: tuple[str, ...] = ("3.10", "3.11", "3.12", "3.13", "3.14")
    """The Pythons of an image that can run it."""

    @property
    def folder(self) -> str:
        return self.package


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the CLI finds the policy."""

    base_url: str
    """Scheme, host and port, no path: `http://127.0.0.1:18001`."""
    api_key: str
    """The session's secret."""
    model: str
    context_window: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of the CLI as the agent user."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdin: bytes = b""
    """The prompt goes here or into a file, never into argv (128 KiB limit)."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Absolute path → content, written before the start, owned by the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """What the CLI's own result says. Exit codes lie; the gateway's record is compared with this."""

    ok: bool
    """The CLI and the endpoint did their part, so what the policy left may be judged. A full context, a reply cut at
    its limit and a turn limit are the policy's doing: ok."""
    reason: str
    """ok: `completed`, `length`, `max_turns`, `prompt_too_long`, `format_errors`, `loop`. Not ok:
    `api_error: ...`, `exit 1: ...`, `signal 9`, `aborted`, `no_result`, or the job's state (`timeout`, `oom`, ...)."""


class Harness(Protocol):
    """One coding-agent CLI. `options` of the run file's `[harness]` table reach the constructor as keywords.

    Constructor errors are `ConfigError`.
    """

    name: str
    dialect: DialectName

    @property
    def artifacts(self) -> tuple[Artifact | Wheels, ...]:
        """The CLI itself first, its version is the bundle's. The class has the default pins, so they can be listed."""
        ...

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        """Prints the version; run in the sandbox before the first launch. `bundle` is the folder there."""
        ...

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        """How to run the CLI on `prompt` in `workdir`."""
        ...

    def report(self, result: JobResult) -> AgentReport:
        """Read the CLI's result event from its output. Never raises on any bytes."""
        ...
