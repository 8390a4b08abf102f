"""Where this machine keeps what outlives a run, and the sandboxes there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollwright import plugins
from rollwright.integrations.places import user_places
from rollwright.run import Places


def places() -> Places:
    """The cache and state folders of this user."""
    return user_places()


def provider_of(kind: str) -> Any:
    """The sandboxes of one backend, with default options."""
    return plugins.make(
        "sandboxes", kind, {}, table=f"sandbox.{kind}", base=Path.cwd(), state_dir=places().state / "boxes"
    )
