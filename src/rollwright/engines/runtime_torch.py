"""Any Hugging Face causal LM folder through transformers and torch, float32. Needs the `torch` extra."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from rollwright.engines.runtime import Cache, Logits
from rollwright.errors import ConfigError

__all__ = ["TorchCache", "TorchRuntime"]


class TorchCache:
    """A transformers `DynamicCache` of one sequence. It grows as it needs, so capacities are not used."""

    __slots__ = ("past",)

    def __init__(self, past: Any) -> None:
        self.past = past

    @property
    def length(self) -> int:
        return int(self.past.get_seq_length())

    @property
    def nbytes(self) -> int:
        return sum(
            int(tensor.nbytes)
            for layer in self.past.layers
            if layer.is_initialized
            for tensor in (layer.keys, layer.values)
        )

    def fork(self, length: int, capacity: int) -> Self:
        twin = type(self)(type(self.past)())
        for index, layer in enumerate(self.past.layers):
            if layer.is_initialized:
                keys, values = (tensor[:, :, :length].clone() for tensor in (layer.keys, layer.values))
                twin.past.update(keys, values, index)
        return twin


class TorchRuntime:
    """See `Runtime`. Sequences are run one by one, so that none depends on its neighbours."""

    prefill_tile = 1

    def __init__(self, folder: Path) -> None:
        try:
            # No stubs and no plain import: both are absent from an install without the extra.
            self._torch: Any = importlib.import_module("torch")
            self._transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ConfigError(
                f"engine.local.runtime = 'torch' needs {error.name}: pip install 'rollwright[torch]'",
                field="engine.local.runtime",
            ) from error
        self._model: Any = self._load(folder)
        # transformers 5.2x renamed it and warns at each use of the old name.
        named = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        config = self._model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_context = int(config.max_position_embeddings)

    def _load(self, folder: Path) -> Any:
        bars = self._transformers.utils.logging
        shown = bars.is_progress_bar_enabled()
        bars.disable_progress_bar()
        try:
            return self._transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=self._torch.float32, local_files_only=True
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"engine.local.model: transformers cannot load {folder}: {error}", field="engine.local.model"
            ) from error
        finally:
            if shown:
                bars.enable_progress_bar()

    def set_threads(self, count: int) -> int:
        before = int(self._torch.get_num_threads())
        self._torch.set_num_threads(count)
        return before

    def new_cache(self, capacity: int) -> TorchCache:
        return TorchCache(self._transformers.DynamicCache())

    def prefill(self, ids: Sequence[int], cache: Cache) -> Logits:
        past = cast(TorchCache, cache).past
        with self._torch.inference_mode():
            output = self._model(
                input_ids=self._torch.tensor([list(ids)]),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: past},
            )
        return output.logits[0, -1].numpy()

    def step(self, ids: Sequence[int], caches: Sequence[Cache]) -> Logits:
        return np.stack([self.prefill([token], cache) for token, cache in zip(ids, caches, strict=True)])
