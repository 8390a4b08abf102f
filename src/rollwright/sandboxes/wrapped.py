"""A provider in front of another one: what is not its business goes through as it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollwright.errors import SandboxGone
from rollwright.sandboxes import Attaches, BoxInfo, Capabilities, Provider, Sandbox, SandboxSpec, Sweeps
from rollwright.sandboxes.retry import Counts, Tally

__all__ = ["WrappedProvider"]


class WrappedProvider:
    """A `Provider` that does what `inner` does. Subclass it and change something."""

    def __init__(self, inner: Provider) -> None:
        self.inner = inner

    async def probe(self) -> Capabilities:
        return await self.inner.probe()

    async def check_image(self, image: str) -> None:
        await self.inner.check_image(image)

    async def create(self, spec: SandboxSpec, *, key: str) -> Sandbox:
        return await self.inner.create(spec, key=key)

    async def attach(self, key: str) -> Sandbox:
        """As the backend's, where it has the capability. Raises `SandboxGone` elsewhere."""
        if not isinstance(self.inner, Attaches):
            raise SandboxGone("this backend keeps no box that another process could take over")
        return await self.inner.attach(key)

    def known_as(self, key: str) -> str:
        return self.inner.known_as(key) if isinstance(self.inner, Attaches) else key

    async def list(self) -> list[BoxInfo]:
        return await self.inner.list()

    async def reap(self, *, everything: bool = False) -> list[str]:
        return await self.inner.reap(everything=everything)

    @property
    def maker(self) -> str:
        """As the backend's; empty where it cannot be swept from another machine."""
        return self.inner.maker if isinstance(self.inner, Sweeps) else ""

    async def sweep(self, maker: str) -> list[str]:
        return await self.inner.sweep(maker) if isinstance(self.inner, Sweeps) else []

    async def close(self) -> None:
        await self.inner.close()

    async def image_digest(self, image: str) -> str:
        """Changes when the image does; empty where the backend cannot tell."""
        digest: Callable[[str], Awaitable[str]] | None = getattr(self.inner, "image_digest", None)
        return "" if digest is None else await digest(image)

    def tally(self) -> Tally:
        """What failed so far, as far as the backend counts it."""
        return self.inner.tally() if isinstance(self.inner, Counts) else Tally()
