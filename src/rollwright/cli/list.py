"""`rollwright list`."""

from __future__ import annotations

import difflib

from rollwright.cli.output import OK, Json, print_json
from rollwright.errors import UsageError


def list_(kind: str = "", /, *, json: Json = False) -> int:
    """Show what can be chosen in a run file.

    Parameters
    ----------
    kind
        sandboxes, harnesses, graders, engines, tasks, exporters or telemetry; all, when left out.

    Examples
    --------
    rollwright list
    rollwright list graders
    """
    from rollwright import plugins

    if kind and kind not in plugins.KINDS:
        near = difflib.get_close_matches(kind, plugins.KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{kind!r} is none of {', '.join(plugins.KINDS)}{hint}")
    found = {each: plugins.names(each) for each in ([kind] if kind else plugins.KINDS)}
    if json:
        print_json(found)
        return OK
    for each, names in found.items():
        if names or kind:
            print(f"{each}: {', '.join(names) or 'none'}")
    return OK
