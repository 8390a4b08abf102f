"""Where this machine keeps what outlives a run."""

from __future__ import annotations

import os
from pathlib import Path

from rollwright.run import Places

__all__ = ["user_places"]


def user_places() -> Places:
    """The cache and state folders of this user (XDG)."""
    home = Path.home()
    return Places(
        cache=Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "rollwright",
        state=Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "rollwright",
    )
