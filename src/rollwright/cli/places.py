"""Where this machine keeps what outlives a run, and the sandboxes there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollwright import plugins
from rollwright.run import Places


def places() -> Places:
    """The cache and state folders of this user (XDG)."""
    home = Path.home()
    return Places(
        cache=Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "rollwright",
        state=Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "rollwright",
    )


def provider_of(kind: str) -> Any:
    """The sandboxes of one backend, with default options."""
    return plugins.make(
        "sandboxes", kind, {}, table=f"sandbox.{kind}", base=Path.cwd(), state_dir=places().state / "boxes"
    )
