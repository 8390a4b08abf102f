"""Whether the gateway is reached from inside a box, with whatever its image has to make a request."""

from __future__ import annotations

from pathlib import Path

import anyio

from rollwright.sandboxes import ExecResult, Sandbox

__all__ = ["NOBODY_ANSWERS", "NO_CLIENT", "knock"]

NO_CLIENT = 3
"""Exit code where the image has nothing that can make a request."""
NOBODY_ANSWERS = 4
_SECONDS = 20.0


async def knock(box: Sandbox, url: str, key: str, *, user: str = "agent") -> ExecResult:
    """Ask for the models with a session's key; stdout is the status. Raises as `Sandbox.exec`."""
    script = await anyio.Path(Path(__file__).with_name("knock.sh")).read_bytes()
    return await box.exec(("sh", "-s", "--", f"{url}/v1/models", key), user=user, input=script, seconds=_SECONDS)
