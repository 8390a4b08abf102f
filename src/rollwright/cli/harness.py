"""`rollwright harness list` and `rollwright harness bundle`."""

from __future__ import annotations

from pathlib import Path

import anyio
from cyclopts import App

from rollwright.cli.output import OK

harness_app = App(name="harness", help="Coding-agent CLIs and their bundles.")


@harness_app.command(name="list")
def harness_list() -> int:
    """Harnesses and the pinned versions of what they ship."""
    from rollwright import plugins

    for name in plugins.names("harnesses"):
        artifacts = plugins.find("harnesses", name).artifacts
        print(f"{name}: {', '.join(f'{a.package}@{a.version}' for a in artifacts)}")
    return OK


@harness_app.command
def bundle(name: str, /, *, npm: str = "npm") -> int:
    """Fetch a harness's bundle into the cache, so that later runs need no network.

    Parameters
    ----------
    name
        A harness, e.g. pi.
    npm
        The npm command.
    """
    from rollwright import plugins
    from rollwright.cli.places import places
    from rollwright.harnesses.bundle import ensure_bundle

    harness = plugins.make("harnesses", name, {}, table=f"harness.{name}", base=Path.cwd())

    async def go() -> Path:
        return (await ensure_bundle(harness, cache_dir=places().cache, npm=npm)).path

    print(anyio.run(go))
    return OK
