"""What Python test runners read of files that hold other things too: a fix may change those, not these."""

from __future__ import annotations

import configparser
import tomllib
from typing import Any, cast

__all__ = ["FILES", "same_settings"]

FILES = ("pyproject.toml", "setup.cfg")
"""Their names, in any folder."""

_TOML = ("pytest", "tox")
"""Below `tool`."""
_INI = ("pytest", "tox")
"""Words in the names of sections: `tool:pytest`, `pytest`, `tox:tox`."""


def same_settings(name: str, base: bytes, now: bytes) -> bool:
    """Whether a file of `FILES` steers the runners as it did. A missing file is empty; one that cannot be read steers
    them in ways we do not know."""
    try:
        return _settings(name, base) == _settings(name, now)
    except (ValueError, RecursionError, configparser.Error):
        return False


def _settings(name: str, data: bytes) -> Any:
    text = data.decode("utf-8")
    if name.endswith(".toml"):
        tool: Any = tomllib.loads(text).get("tool", {})
        tools = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
        return {key: tools[key] for key in _TOML if key in tools}
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    found = {key: dict(parser.items(key)) for key in parser.sections() if any(word in key for word in _INI)}
    return found, dict(parser.defaults())
