"""A trainer's own classes, imported when the first row is made of them."""

from __future__ import annotations

import importlib
from typing import Any

from rollwright.errors import UsageError

__all__ = ["module"]


def module(name: str) -> Any:
    """Raises `UsageError` naming the package that is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} cannot be imported: {error}; is {name.partition('.')[0]} installed here?") from error
