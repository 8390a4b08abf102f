"""`rollwright e2b-server`."""

from __future__ import annotations

import os
from pathlib import Path

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import OK, say
from rollwright.errors import UsageError


def e2b_server(
    *,
    port: int = 3939,
    host: str = "127.0.0.1",
    api_key: str = "",
    images: Path | None = None,
    image_metadata_key: str | None = None,
    allowed_port: int = 18001,
) -> int:
    """Serve E2B's API over this machine's sandboxes.

    For the unchanged E2B SDK.

    Parameters
    ----------
    port
        Host port; 0 takes a free one.
    host
        Address to listen at.
    api_key
        What clients must send; default: E2B_API_KEY of the environment.
    images
        Folder of image descriptions, as for the namespaces backend.
    image_metadata_key
        Metadata key by which a client names its image, as E2B-compatible clusters do.
    allowed_port
        Of the one host that a client may allow to a box without internet access, the port that the box reaches.

    Examples
    --------
    E2B_API_KEY=e2b_local rollwright e2b-server --port 3939 --images images
    """
    from rollwright.cli.places import places
    from rollwright.e2b_server import serve

    key = api_key or os.environ.get("E2B_API_KEY", "")
    if not key:
        raise UsageError("e2b-server needs a key: --api-key, or E2B_API_KEY in the environment")

    async def go() -> None:
        await serve(
            host=host,
            port=port,
            api_key=key,
            state_dir=places().state / "e2b-server",
            images=images,
            image_metadata_key=image_metadata_key,
            allowed_port=allowed_port,
            ready=say,
        )

    until_interrupted(go)
    return OK
