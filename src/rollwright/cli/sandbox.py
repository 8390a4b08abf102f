"""`rollwright sandbox ls` and `rollwright sandbox reap`."""

from __future__ import annotations

import sys
from typing import Annotated

import anyio
from cyclopts import Parameter

from rollwright.cli.output import OK, Json, print_json


def sandbox_ls(*, kind: str = "namespaces", json: Json = False) -> int:
    """List sandboxes of this user, also those a killed run left.

    Parameters
    ----------
    kind
        The backend.

    Examples
    --------
    rollwright sandbox ls
    rollwright sandbox ls --kind docker --json
    """
    from rollwright.cli.places import provider_of

    provider = provider_of(kind)
    boxes = anyio.run(provider.list)
    if json:
        print_json([{"id": b.id, "alive": b.alive, "owner_alive": b.owner_alive, "labels": b.labels} for b in boxes])
        return OK
    for box in boxes:
        state = "alive" if box.alive else "dead"
        owner = "" if box.owner_alive else "  owner gone"
        print(f"{box.id}  {state:5}  {box.age_seconds:7.0f} s  {box.labels.get('rollout', '')}{owner}")
    print(f"{len(boxes)} sandboxes", file=sys.stderr)
    return OK


def reap(
    *, kind: str = "namespaces", everything: Annotated[bool, Parameter(negative=())] = False, json: Json = False
) -> int:
    """Remove sandboxes whose owner is gone or whose lease ran out.

    Parameters
    ----------
    kind
        The backend.
    everything
        Remove all of them, also those of a run that still goes on.

    Examples
    --------
    rollwright sandbox reap
    rollwright sandbox reap --kind e2b --everything
    """
    from rollwright.cli.places import provider_of

    provider = provider_of(kind)

    async def go() -> list[str]:
        return await provider.reap(everything=everything)

    reaped = anyio.run(go)
    if json:
        print_json(reaped)
        return OK
    for box in reaped:
        print(box)
    print(f"{len(reaped)} sandboxes removed", file=sys.stderr)
    return OK
