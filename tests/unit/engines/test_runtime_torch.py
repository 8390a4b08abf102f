"""Both runtimes give one distribution for one folder."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from rollwright.engines.runtime import Logits, Runtime, load_runtime
from rollwright.errors import ConfigError
from rollwright.testing.tiny_llama import write_random_llama

has_torch = find_spec("torch") is not None
with_torch = pytest.mark.skipif(not has_torch, reason="needs the torch extra")


def logprobs(runtime: Runtime, ids: list[int], prompt: int) -> np.ndarray:
    def normalised(logits: Logits) -> np.ndarray:
        wide = logits.astype(np.float64)
        return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()

    cache = runtime.new_cache(len(ids))
    rows = [normalised(runtime.prefill(ids[:prompt], cache))]
    rows += [normalised(runtime.step([token], [cache])[0]) for token in ids[prompt:]]
    assert cache.length == len(ids)
    return np.stack(rows)


@pytest.mark.torch
@with_torch
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"kv_heads": 4, "tied": False},
        {
            "kv_heads": 1,
            "layers": 3,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ],
    ids=["grouped, tied", "plain, own head", "one kv head, other theta"],
)
def test_numpy_and_torch_agree_on_every_logprob(shape: dict, tmp_path: Path) -> None:
    folder = write_random_llama(tmp_path, hidden=32, **shape)
    ids = np.random.default_rng(3).integers(0, 64, 180).tolist()
    ours, theirs = (logprobs(load_runtime(name, folder), ids, 150) for name in ("numpy", "torch"))
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.torch
@with_torch
def test_a_forked_torch_cache_goes_on_like_the_original(tmp_path: Path) -> None:
    runtime = load_runtime("torch", write_random_llama(tmp_path))
    ids = np.random.default_rng(4).integers(0, 64, 40).tolist()
    original = runtime.new_cache(40)
    want = runtime.prefill(ids, original)
    fork = original.fork(25, 40)
    got = runtime.prefill(ids[25:], fork)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert (original.length, fork.length) == (40, 40)
    assert fork.nbytes == original.nbytes > 0


@pytest.mark.torch
@with_torch
def test_a_folder_that_transformers_cannot_load_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transformers cannot load"):
        load_runtime("torch", tmp_path)


@pytest.mark.skipif(has_torch, reason="torch is installed")
def test_without_torch_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'rollwright\[torch\]'"):
        load_runtime("torch", tmp_path)
    assert "torch" not in sys.modules
