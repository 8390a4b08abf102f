"""What the local engine needs of a model: feed ids to a cache, get logits. Two variants, numpy and torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rollwright.errors import ConfigError

__all__ = ["Cache", "Logits", "Runtime", "RuntimeName", "load_runtime"]

RuntimeName = Literal["numpy", "torch"]

Logits = NDArray[np.floating[Any]]


class Cache(Protocol):
    """Keys and values of one sequence. Belongs to the runtime that made it."""

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        ...

    def fork(self, length: int, capacity: int) -> Self:
        """A copy of the first `length` tokens with room for `capacity`; the original stays as it is."""
        ...


class Runtime(Protocol):
    """One model's weights and how to run them. Used from one thread at a time.

    Both calls append to the caches they are given. What a token's logits are depends on the tokens of its own
    sequence alone, never on which sequences are stepped together.
    """

    vocab_size: int
    max_context: int
    prefill_tile: int
    """Ends of prefill chunks are best at multiples of this position."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache with room for `capacity` tokens."""
        ...

    def prefill(self, ids: Sequence[int], cache: Cache) -> Logits:
        """Append `ids` (at least one) to `cache`; the logits after the last of them, `[vocab_size]` float32."""
        ...

    def step(self, ids: Sequence[int], caches: Sequence[Cache]) -> Logits:
        """Append one id to each cache; the logits after each, `[len(ids), vocab_size]` float32."""
        ...

    def set_threads(self, count: int) -> int:
        """Let the matrix products use `count` threads, and return how many it was. Process-wide."""
        ...


def load_runtime(name: RuntimeName, folder: Path) -> Runtime:
    """Load the model in `folder` (Hugging Face layout). Takes as long as reading the weights does.

    Raises `ConfigError` when the folder is no such model, when the runtime cannot run it, or is not installed.
    """
    if name == "numpy":
        from rollwright.engines.runtime_numpy import NumpyRuntime

        return NumpyRuntime(folder)
    if name == "torch":
        from rollwright.engines.runtime_torch import TorchRuntime

        return TorchRuntime(folder)
    raise ConfigError(f"engine.local.runtime must be 'numpy' or 'torch', not {name!r}", field="engine.local.runtime")
