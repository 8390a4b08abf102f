"""Rollwright turns coding tasks into RL training data a trainer can trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollwright.integrations.source import rollouts as rollouts
    from rollwright.run.source import Group as Group
    from rollwright.run.source import Pace as Pace
    from rollwright.types import Sample as Sample

__version__ = "0.1.0"

_HOMES = {
    "rollouts": "rollwright.integrations.source",
    "Group": "rollwright.run.source",
    "Pace": "rollwright.run.source",
    "Sample": "rollwright.types",
}
"""Public name → module. They are imported when they are asked for: `import rollwright` stays fast."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollwright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
