"""The numpy runtime against a float64 re-computation without cache, tiles or fusion."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rollwright.engines.runtime_numpy import TILE, NumpyRuntime, read_safetensors
from rollwright.errors import ConfigError
from rollwright.testing.tiny_llama import write_random_llama


def oracle(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits after every id, `[len(ids), vocab]`, in float64 from the definition of the model."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads, hidden = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    width, eps, n = hidden // heads, config["rms_norm_eps"], len(ids)
    theta = config.get("rope_parameters", config).get("rope_theta")

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    def rotate(vector: np.ndarray, position: int) -> np.ndarray:
        half = len(vector) // 2
        turned = np.empty_like(vector)
        for i in range(half):
            angle = position / theta ** (2 * i / len(vector))
            a, b = vector[i], vector[i + half]
            turned[i] = a * np.cos(angle) - b * np.sin(angle)
            turned[i + half] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    x = w["model.embed_tokens.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        p = f"model.layers.{index}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = ((h @ w[p + f"self_attn.{c}_proj.weight"].T).reshape(n, -1, width) for c in "qkv")
        mixed = np.zeros((n, heads, width))
        for t in range(n):
            for head in range(heads):
                kv = head // (heads // kv_heads)
                scores = np.array([rotate(q[t, head], t) @ rotate(k[s, kv], s) for s in range(t + 1)])
                scores = np.exp((scores - scores.max()) / np.sqrt(width))
                mixed[t, head] = (scores / scores.sum()) @ v[: t + 1, kv]
        x = x + mixed.reshape(n, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"]) @ head_weight.T


def some_ids(count: int, seed: int = 0, vocab_size: int = 64) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


SHAPES = {
    "grouped": {},
    "plain heads, own head": {"kv_heads": 4, "tied": False},
    "one kv head": {"kv_heads": 1, "layers": 3},
    "other theta": {"rope_theta": 500000.0},
    "transformers 5 config": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_prompt_and_reply_logits_equal_the_definition(shape: dict, tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path, **shape)
    runtime = NumpyRuntime(folder)
    ids = some_ids(TILE + 13)
    want = oracle(folder, ids)
    cache = runtime.new_cache(len(ids))
    prompt = TILE + 3
    got = [runtime.prefill(ids[:prompt], cache)]
    got += [runtime.step([token], [cache])[0] for token in ids[prompt:]]
    np.testing.assert_allclose(np.stack(got), want[prompt - 1 :], atol=2e-4)
    assert cache.length == len(ids)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> NumpyRuntime:
    return NumpyRuntime(write_random_llama(tmp_path_factory.mktemp("llama")))


@settings(max_examples=40, deadline=None)
@given(length=st.integers(2, 3 * TILE), cuts=st.lists(st.integers(1, 3 * TILE), max_size=4), seed=st.integers(0, 5))
def test_a_prompt_fed_in_any_pieces_gives_the_same_bits(
    runtime: NumpyRuntime, length: int, cuts: list[int], seed: int
) -> None:
    ids = some_ids(length, seed)
    whole = runtime.new_cache(length)
    want = runtime.prefill(ids, whole)
    pieces = runtime.new_cache(length)
    edges = [0, *sorted({cut for cut in cuts if cut < length}), length]
    for start, stop in pairwise(edges):
        pieces = pieces.fork(pieces.length, length)
        got = runtime.prefill(ids[start:stop], pieces)
    assert np.array_equal(got, want)
    assert np.array_equal(pieces.keys, whole.keys)
    assert np.array_equal(pieces.values, whole.values)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 2 * TILE), min_size=1, max_size=9),
    steps=st.integers(1, 3),
)
def test_sequences_stepped_together_get_the_bits_they_get_alone(
    runtime: NumpyRuntime, lengths: list[int], steps: int
) -> None:
    together, alone = [], []
    for seed, length in enumerate(lengths):
        for caches in (together, alone):
            caches.append(runtime.new_cache(length + steps))
            runtime.prefill(some_ids(length, seed), caches[-1])
    for turn in range(steps):
        tokens = some_ids(len(lengths), 100 + turn)
        rows = runtime.step(tokens, together)
        for index, token in enumerate(tokens):
            assert np.array_equal(rows[index], runtime.step([token], [alone[index]])[0])


def test_a_fork_leaves_the_original_as_it_was(runtime: NumpyRuntime) -> None:
    original = runtime.new_cache(20)
    runtime.prefill(some_ids(20), original)
    before = original.keys.copy()
    fork = original.fork(10, 30)
    runtime.prefill(some_ids(20, 9), fork)
    assert (original.length, fork.length) == (20, 30)
    assert np.array_equal(original.keys, before)


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("BF16", 1e-2), ("F64", 1e-7)])
def test_half_precision_weights_are_read_as_their_float32_values(kind: str, tolerance: float, tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, tensors, kind)
    read = read_safetensors(folder / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == np.float32
        np.testing.assert_allclose(read[name], tensor, rtol=tolerance)
    assert NumpyRuntime(folder).prefill([1, 2], NumpyRuntime(folder).new_cache(2)).shape == (64,)


def rewrite(folder: Path, tensors: dict[str, np.ndarray], kind: str) -> None:
    """Write the safetensors file by hand: numpy has no bfloat16 to hand to the library."""
    header, blobs, offset = {}, [], 0
    for name, tensor in tensors.items():
        if kind == "BF16":
            blob = (tensor.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            blob = tensor.astype({"F16": np.float16, "F64": np.float64}[kind]).tobytes()
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def test_weights_in_shards_are_one_model(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = write_random_llama(tmp_path)
    whole = NumpyRuntime(folder)
    want = whole.prefill([1, 2, 3], whole.new_cache(3))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    sharded = NumpyRuntime(folder)
    assert np.array_equal(sharded.prefill([1, 2, 3], sharded.new_cache(3)), want)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type llama3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_a_model_it_cannot_run_is_refused_and_the_torch_runtime_named(config: dict, says: str, tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path, **config)
    with pytest.raises(ConfigError, match=says) as caught:
        NumpyRuntime(folder)
    assert "engine.local.runtime = 'torch'" in str(caught.value)


def test_a_broken_folder_is_one_sentence_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        NumpyRuntime(tmp_path)
    folder = write_random_llama(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is broken"):
        NumpyRuntime(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        NumpyRuntime(folder)
    write_random_llama(folder, layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\."):
        NumpyRuntime(folder)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(ConfigError, match=r"embed_tokens.*\(64, 16\).*\(65, 16\)"):
        NumpyRuntime(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="not a Llama config"):
        NumpyRuntime(folder)
