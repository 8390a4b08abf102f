"""`rollwright harness list` and `rollwright harness bundle`."""

from __future__ import annotations

from pathlib import Path

import anyio

from rollwright.cli.output import OK, Json, print_json


def harness_list(*, json: Json = False) -> int:
    """Harnesses and the pinned versions of what they ship.

    Examples
    --------
    rollwright harness list
    """
    from rollwright import plugins

    if json:
        pinned = {name: plugins.find("harnesses", name).artifacts for name in plugins.names("harnesses")}
        print_json({name: {a.package: a.version for a in artifacts} for name, artifacts in pinned.items()})
        return OK
    for name in plugins.names("harnesses"):
        artifacts = plugins.find("harnesses", name).artifacts
        print(f"{name}: {', '.join(f'{a.package}@{a.version}' for a in artifacts)}")
    return OK


def bundle(name: str, /, *, npm: str = "npm", json: Json = False) -> int:
    """Fetch a harness's bundle into the cache, so that later runs need no network.

    Parameters
    ----------
    name
        A harness, e.g. pi.
    npm
        The npm command.

    Examples
    --------
    rollwright harness bundle pi
    """
    from rollwright import plugins
    from rollwright.cli.places import places
    from rollwright.harnesses.bundle import ensure_bundle

    harness = plugins.make("harnesses", name, {}, table=f"harness.{name}", base=Path.cwd())

    async def go() -> Path:
        return (await ensure_bundle(harness, cache_dir=places().cache, npm=npm)).path

    path = anyio.run(go)
    if json:
        print_json({"harness": name, "path": str(path)})
    else:
        print(path)
    return OK
