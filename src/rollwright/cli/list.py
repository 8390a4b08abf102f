"""`rollwright list`."""

from __future__ import annotations

from rollwright.cli.output import OK
from rollwright.errors import UsageError


def list_(kind: str = "", /) -> int:
    """Show what can be chosen: sandboxes, harnesses, graders, engines."""
    from rollwright import plugins

    kinds = [kind] if kind else [k for k in plugins.KINDS if plugins.names(k)]
    for each in kinds:
        if each not in plugins.KINDS:
            raise UsageError(f"{each!r} is none of {', '.join(plugins.KINDS)}")
        print(f"{each}: {', '.join(plugins.names(each))}")
    return OK
