"""Prompts that take as long to plan as a test likes, and an engine that takes shorter ones than it says."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollwright.engines import Generation
from rollwright.errors import EngineRejected
from rollwright.messages import Message, ToolSpec
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

__all__ = ["BoastfulEngine", "SlowRenderer"]


class SlowRenderer(TemplateRenderer):
    """What ends with a message that says "slow" is rendered once `may` is set."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.may = threading.Event()
        self.waiting = threading.Semaphore(0)
        """Released by each render that begins to wait."""
        self.counted = 0
        """Characters that were encoded outside of a render."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        if "slow" in messages[-1].content:
            self.waiting.release()
            assert self.may.wait(60)
        return super().render(messages, tools)

    def encode(self, text: str) -> list[int]:
        self.counted += len(text)
        return super().encode(text)


class BoastfulEngine(WatchedEngine):
    """Its context is shorter than it says."""

    def __init__(self, engine: WatchedEngine, takes: int) -> None:
        super().__init__(engine)
        self._takes = takes

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, stop_ids: frozenset[int], request_id: str, session_key: str
    ) -> Generation:
        said = await super().generate(ids, sampling, stop_ids=stop_ids, request_id=request_id, session_key=session_key)
        if len(ids) > self._takes:
            raise EngineRejected("400: the input is longer than the model's context length", too_long=True)
        return said
