"""Checks that the options of several harnesses share."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

from rollwright.errors import ConfigError
from rollwright.harnesses import Artifact

UNLIMITED_WINDOW = 1_000_000_000
"""Told to CLIs that may not compact. They guess the prompt's size; the gateway knows it."""

TOO_LONG = re.compile(r"prompt is too long|maximum context length|context_length_exceeded", re.IGNORECASE)
"""How the gateway's wires say that the context is full."""


def check_pin(harness: str, field: str, *, version_is_default: bool, checksum_is_default: bool) -> None:
    """Another version needs its checksum, in `field`. Raises `ConfigError`."""
    if version_is_default != checksum_is_default:
        name = f"harness.{harness}.version"
        raise ConfigError(f"{name} and harness.{harness}.{field} are set together or not at all", field=name)


def local_tarball(artifact: Artifact, file: Path, field: str) -> Artifact:
    """`artifact` from a tarball on this machine, which then is its pin. Raises `ConfigError`."""
    try:
        with file.open("rb") as tarball:
            digest = hashlib.file_digest(tarball, "sha512").digest()
    except OSError as error:
        raise ConfigError(f"{field}: {file} cannot be read: {error.strerror}", field=field) from error
    return replace(artifact, version="local", sha512=base64.b64encode(digest).decode(), file=file)


def check_not_empty(harness: str, system_prompt: str | None) -> None:
    """For CLIs that take an empty system prompt for none. Raises `ConfigError`."""
    if system_prompt == "":
        name = f"harness.{harness}.system_prompt"
        raise ConfigError(f"{name} is empty, which the CLI takes for its own prompt", field=name)


def check_max_turns(harness: str, max_turns: int | None) -> None:
    """Raises `ConfigError`."""
    if max_turns is not None and max_turns < 1:
        name = f"harness.{harness}.max_turns"
        raise ConfigError(f"{name} is {max_turns}, but must be at least 1", field=name)
