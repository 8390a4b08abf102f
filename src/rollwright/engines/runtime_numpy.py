"""Llama-family models (`LlamaForCausalLM`, safetensors) in plain numpy, float32. For a few million weights.

Reproducible by construction: a token's result must not depend, not even in the last bit, on what else runs or on how
much of its prompt was cached. BLAS rounds differently for different matrix shapes, so every product has a shape that
the token's position alone decides: prompts go through in tiles of `TILE` rows aligned to absolute positions, and each
sampled token goes through on its own (numpy runs a stack of one-row products as one vector product each).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import safetensors
from numpy.typing import NDArray

from rollwright.engines.blas import set_blas_threads
from rollwright.engines.runtime import Cache, Logits
from rollwright.errors import ConfigError

__all__ = ["LlamaConfig", "NumpyCache", "NumpyRuntime", "read_safetensors"]

Array = NDArray[np.floating[Any]]
"""float32 throughout; numpy's stubs lose sight of it."""

TILE = 48
"""Rows of one prompt product: the smallest size near full speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The numbers of config.json that the computation needs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope_theta: float

    @classmethod
    def read(cls, folder: Path) -> LlamaConfig:
        """Raises `ConfigError` when the folder has no config.json or the model is not one this runtime can run."""
        raw = _read_config(folder)
        architectures = raw.get("architectures") or ["?"]
        if architectures != ["LlamaForCausalLM"]:
            raise _cannot_run(folder, f"architecture {architectures[0]}")
        rope = cast("dict[str, Any]", raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        unsupported = {
            f"rope type {rope_type}": rope_type != "default",
            "attention_bias": bool(raw.get("attention_bias")),
            "mlp_bias": bool(raw.get("mlp_bias")),
            f"activation {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
        }
        for what, present in unsupported.items():
            if present:
                raise _cannot_run(folder, what)
        try:
            heads = int(raw["num_attention_heads"])
            config = cls(
                hidden=int(raw["hidden_size"]),
                layers=int(raw["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
                vocab_size=int(raw["vocab_size"]),
                max_context=int(raw["max_position_embeddings"]),
                norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"engine.local.model: {folder / 'config.json'} is not a Llama config: {error!r}"
            ) from error
        if config.heads % config.kv_heads or config.head_dim % 2:
            raise ConfigError(f"engine.local.model: {folder / 'config.json'} has head numbers that do not divide")
        return config


class NumpyCache:
    """Rotated keys, and values, as `[layers, kv_heads, capacity, head_dim]`. Unused places are zero."""

    __slots__ = ("keys", "length", "values")

    def __init__(self, config: LlamaConfig, capacity: int) -> None:
        # Prompt tiles look at whole tiles of keys, so the room ends with one.
        room = -(-capacity // TILE) * TILE
        shape = (config.layers, config.kv_heads, room, config.head_dim)
        self.keys: Array = np.zeros(shape, np.float32)
        self.values: Array = np.zeros(shape, np.float32)
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def fork(self, length: int, capacity: int) -> Self:
        twin = object.__new__(type(self))
        layers, kv_heads, _, head_dim = self.keys.shape
        shape = (layers, kv_heads, -(-capacity // TILE) * TILE, head_dim)
        twin.keys = np.zeros(shape, np.float32)
        twin.values = np.zeros(shape, np.float32)
        twin.keys[:, :, :length] = self.keys[:, :, :length]
        twin.values[:, :, :length] = self.values[:, :, :length]
        twin.length = length
        return twin


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Array
    """[hidden]"""
    qkv: Array
    """[hidden, (heads + 2 kv_heads) * head_dim]"""
    out: Array
    """[heads * head_dim, hidden]"""
    mlp_norm: Array
    """[hidden]"""
    gate_up: Array
    """[hidden, 2 * intermediate]"""
    down: Array
    """[intermediate, hidden]"""


class NumpyRuntime:
    """See `Runtime`."""

    prefill_tile = TILE

    def __init__(self, folder: Path) -> None:
        config = LlamaConfig.read(folder)
        weights = _Weights(folder, _read_folder(folder))
        width = config.head_dim
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self._config = config
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden)
        self._layers = [weights.layer(index, config) for index in range(config.layers)]
        self._norm = weights.take("model.norm.weight", config.hidden)
        tied = not weights.has("lm_head.weight")
        self._head: Array = (
            self._embedding if tied else weights.take("lm_head.weight", config.vocab_size, config.hidden)
        ).T
        frequencies = config.rope_theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
        angles = np.arange(-(-config.max_context // TILE) * TILE)[:, None] * frequencies
        self._cos: Array = np.cos(angles).astype(np.float32)[:, None, :]
        self._sin: Array = np.sin(angles).astype(np.float32)[:, None, :]
        """[positions, 1, head_dim / 2]"""
        self._scale = np.float32(width**-0.5)

    def set_threads(self, count: int) -> int:
        return set_blas_threads(count)

    def new_cache(self, capacity: int) -> NumpyCache:
        return NumpyCache(self._config, capacity)

    def prefill(self, ids: Sequence[int], cache: Cache) -> Logits:
        cache = cast(NumpyCache, cache)
        start, stop = cache.length, cache.length + len(ids)
        first_tile, tiles = start // TILE, -(-stop // TILE)
        origin = first_tile * TILE
        x = np.zeros(((tiles - first_tile) * TILE, self._config.hidden), np.float32)
        x[start - origin : stop - origin] = self._embedding[np.asarray(ids)]
        x = x.reshape(-1, TILE, self._config.hidden)
        rotation = self._cos[origin : tiles * TILE], self._sin[origin : tiles * TILE]
        with np.errstate(over="ignore"):
            for index, layer in enumerate(self._layers):
                query, key, value = self._project(layer, x, rotation)
                rows = slice(start - origin, stop - origin)
                cache.keys[index, :, start:stop] = key[rows].transpose(1, 0, 2)
                cache.values[index, :, start:stop] = value[rows].transpose(1, 0, 2)
                query = query.reshape(-1, TILE, *query.shape[1:])
                if index == len(self._layers) - 1:
                    # After the last keys and values only the last token's row is of use.
                    x, query = x[-1:], query[-1:]
                    first_tile = tiles - 1
                mixed = np.stack(
                    [self._attend_tile(query[i], cache, index, first_tile + i) for i in range(tiles - first_tile)]
                )
                x = self._finish(layer, x, mixed)
            cache.length = stop
            last = x[-1, (stop - 1) % TILE]
            return self._logits(last[None])[0]

    def step(self, ids: Sequence[int], caches: Sequence[Cache]) -> Logits:
        own = cast("Sequence[NumpyCache]", caches)
        positions = np.array([cache.length for cache in own])
        rotation = self._cos[positions], self._sin[positions]
        x: Array = self._embedding[np.asarray(ids)][:, None, :]
        with np.errstate(over="ignore"):
            for index, layer in enumerate(self._layers):
                query, key, value = self._project(layer, x, rotation)
                mixed = np.stack(
                    [self._attend_one(query[i], key[i], value[i], cache, index) for i, cache in enumerate(own)]
                )
                x = self._finish(layer, x, mixed)
            for cache in own:
                cache.length += 1
            return self._logits(x[:, 0])

    def _project(self, layer: _Layer, x: Array, rotation: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Rotated, scaled queries `[rows, heads, head_dim]`; rotated keys, and values, `[rows, kv_heads, head_dim]`."""
        config = self._config
        projected = (self._normed(x, layer.attention_norm) @ layer.qkv).reshape(-1, config.head_dim)
        heads = projected.reshape(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        turning, value = heads[:, : config.heads + config.kv_heads], heads[:, config.heads + config.kv_heads :]
        cos, sin = rotation
        half = config.head_dim // 2
        left, right = turning[..., :half], turning[..., half:]
        turned = np.empty_like(turning)
        turned[..., :half] = left * cos - right * sin
        turned[..., half:] = right * cos + left * sin
        return turned[:, : config.heads] * self._scale, turned[:, config.heads :], value

    def _attend_tile(self, query: Array, cache: NumpyCache, layer: int, tile: int) -> Array:
        """Queries `[TILE, heads, head_dim]` of `tile` over keys up to its end: values `[TILE, heads * head_dim]`."""
        config = self._config
        end = (tile + 1) * TILE
        group = config.heads // config.kv_heads
        grouped = query.transpose(1, 0, 2).reshape(config.kv_heads, group * TILE, config.head_dim)
        scores = grouped @ cache.keys[layer, :, :end].transpose(0, 2, 1)
        own = scores.reshape(config.kv_heads, group, TILE, end)[..., end - TILE :]
        own += _CAUSAL
        mixed = _softmax_mix(scores, cache.values[layer, :, :end])
        return mixed.reshape(config.heads, TILE, config.head_dim).transpose(1, 0, 2).reshape(TILE, -1)

    def _attend_one(self, query: Array, key: Array, value: Array, cache: NumpyCache, layer: int) -> Array:
        """One token's queries `[heads, head_dim]` over all keys and its own: values `[1, heads * head_dim]`."""
        config = self._config
        position = cache.length
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, position] = key
        values[:, position] = value
        grouped = query.reshape(config.kv_heads, -1, config.head_dim)
        scores = grouped @ keys[:, : position + 1].transpose(0, 2, 1)
        return _softmax_mix(scores, values[:, : position + 1]).reshape(1, -1)

    def _finish(self, layer: _Layer, x: Array, mixed: Array) -> Array:
        """The rest of a layer after attention: output projection, then the gated MLP, each added to the stream."""
        x = x + mixed @ layer.out
        gate_up = self._normed(x, layer.mlp_norm) @ layer.gate_up
        middle = gate_up.shape[-1] // 2
        gate, up = gate_up[..., :middle], gate_up[..., middle:]
        return x + (gate / (np.float32(1) + np.exp(-gate)) * up) @ layer.down

    def _normed(self, x: Array, weight: Array) -> Array:
        square: Array = np.add.reduce(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
        return x / np.sqrt(square + np.float32(self._config.norm_eps)) * weight

    def _logits(self, x: Array) -> Logits:
        return (self._normed(x, self._norm)[:, None, :] @ self._head)[:, 0]


_CAUSAL: Array = np.triu(np.full((TILE, TILE), -np.inf, np.float32), k=1)


def _softmax_mix(scores: Array, values: Array) -> Array:
    """`softmax(scores) @ values` over the last axis of `scores`, which is overwritten."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=-1, keepdims=True)
    return (scores @ values) / total


# --------------------------------------------------------------------------- reading a model folder


class _Weights:
    """Tensors by name, given out once with their shape checked."""

    def __init__(self, folder: Path, tensors: dict[str, Array]) -> None:
        self._folder = folder
        self._tensors = tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int | None) -> Array:
        """`shape`: expected sizes, None for any."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ConfigError(f"engine.local.model: {self._folder} has no tensor {name}", field="engine.local.model")
        fits = len(tensor.shape) == len(shape) and all(
            want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"engine.local.model: tensor {name} in {self._folder} is {tensor.shape}, config.json says {shape}",
                field="engine.local.model",
            )
        return tensor

    def layer(self, index: int, config: LlamaConfig) -> _Layer:
        name = f"model.layers.{index}."
        hidden, wide = config.hidden, config.heads * config.head_dim
        narrow = config.kv_heads * config.head_dim
        query = self.take(name + "self_attn.q_proj.weight", wide, hidden)
        key = self.take(name + "self_attn.k_proj.weight", narrow, hidden)
        value = self.take(name + "self_attn.v_proj.weight", narrow, hidden)
        gate = self.take(name + "mlp.gate_proj.weight", None, hidden)
        up = self.take(name + "mlp.up_proj.weight", gate.shape[0], hidden)
        return _Layer(
            attention_norm=self.take(name + "input_layernorm.weight", hidden),
            qkv=_transposed(np.concatenate([query, key, value])),
            out=_transposed(self.take(name + "self_attn.o_proj.weight", hidden, wide)),
            mlp_norm=self.take(name + "post_attention_layernorm.weight", hidden),
            gate_up=_transposed(np.concatenate([gate, up])),
            down=_transposed(self.take(name + "mlp.down_proj.weight", hidden, gate.shape[0])),
        )


def _transposed(matrix: Array) -> Array:
    return np.ascontiguousarray(matrix.T)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"engine.local.model: {path}: {error.strerror}", field="engine.local.model") from error
    except ValueError as error:
        raise ConfigError(f"engine.local.model: {path} is not JSON: {error}", field="engine.local.model") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"engine.local.model: {path} is not a JSON object", field="engine.local.model")
    return cast("dict[str, Any]", raw)


def _cannot_run(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"engine.local.model: the numpy runtime cannot run {folder} ({what}); set engine.local.runtime = 'torch'",
        field="engine.local.model",
    )


def _read_folder(folder: Path) -> dict[str, Array]:
    """All tensors of `*.safetensors` in the folder (one file or shards), as float32."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"engine.local.model: {folder} has no model.safetensors", field="engine.local.model")
    tensors: dict[str, Array] = {}
    for file in files:
        tensors |= read_safetensors(file)
    return tensors


_FLOATS: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def read_safetensors(file: Path) -> dict[str, Array]:
    """The file's tensors (float64/32/16, bfloat16) as float32, by name. Raises `ConfigError` when it is broken."""
    try:
        entries = cast("list[tuple[str, dict[str, Any]]]", safetensors.deserialize(file.read_bytes()))  # pyright: ignore[reportUnknownMemberType]
    except OSError as error:
        raise ConfigError(f"engine.local.model: {file}: {error.strerror}", field="engine.local.model") from error
    except safetensors.SafetensorError as error:
        raise ConfigError(f"engine.local.model: {file} is broken: {error}", field="engine.local.model") from error
    tensors: dict[str, Array] = {}
    for name, entry in entries:
        kind, shape, data = entry["dtype"], entry["shape"], entry["data"]
        if kind == "BF16":
            # numpy has no bfloat16: it is the upper half of a float32.
            wide = np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)
            tensor = wide.view(np.float32)
        elif kind in _FLOATS:
            tensor = np.frombuffer(data, _FLOATS[kind]).astype(np.float32)
        else:
            raise ConfigError(f"engine.local.model: {file}: tensor {name} has type {kind}", field="engine.local.model")
        tensors[name] = tensor.reshape(shape)
    return tensors
