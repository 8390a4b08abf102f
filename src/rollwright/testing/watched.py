"""An engine in front of another one that keeps every call and can be held, for tests of what calls engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import anyio

from rollwright.engines import Engine, EngineCapabilities, Generation
from rollwright.types import Sampling

__all__ = ["EngineCall", "WatchedEngine"]


@dataclass(slots=True)
class EngineCall:
    """One call of `generate`, and what became of it."""

    prompt: list[int]
    sampling: Sampling
    request_id: str
    session_key: str
    outcome: Literal["running", "done", "cancelled", "failed"] = "running"
    generation: Generation | None = None


class WatchedEngine:
    """`Engine` that passes everything on. While `hold` is on, calls wait before they are passed on."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[EngineCall] = []
        self._engine = engine
        self._gate: anyio.Event | None = None
        self._changed = anyio.Event()

    def hold(self) -> None:
        """From now on calls wait for `release`."""
        self._gate = anyio.Event()

    def release(self) -> None:
        """Let the waiting calls and all later ones go on."""
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    async def called(self, count: int) -> None:
        """Wait until `generate` has been called so many times."""
        while len(self.calls) < count:
            await self._changed.wait()

    async def settled(self) -> None:
        """Wait until no call is running."""
        while any(call.outcome == "running" for call in self.calls):
            await self._changed.wait()

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._engine.__aexit__(kind, error, trace)

    async def check(self) -> None:
        await self._engine.check()

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        session_key: str,
    ) -> Generation:
        call = EngineCall(list(ids), sampling, request_id, session_key)
        self.calls.append(call)
        self._tell()
        try:
            if self._gate is not None:
                await self._gate.wait()
            call.generation = await self._engine.generate(
                ids, sampling, stop_ids=stop_ids, request_id=request_id, session_key=session_key
            )
            call.outcome = "done"
        except anyio.get_cancelled_exc_class():
            call.outcome = "cancelled"
            raise
        except Exception:
            call.outcome = "failed"
            raise
        finally:
            self._tell()
        return call.generation

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
