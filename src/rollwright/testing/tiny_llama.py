"""A random Llama of a few kilobytes, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors_numpy

__all__ = ["write_random_llama"]


def write_random_llama(
    folder: Path,
    *,
    vocab_size: int = 64,
    hidden: int = 16,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 24,
    max_context: int = 512,
    tied: bool = True,
    sharpness: float = 4.0,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write config.json and model.safetensors (float32) into `folder` and return it.

    `sharpness` scales the head's input, so that the sampled distribution is far from flat. Anything else goes into
    config.json as it is. The same arguments give the same file.
    """
    random = np.random.default_rng(seed)
    width = hidden // heads

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector() -> Any:
        return (1 + 0.2 * random.standard_normal(hidden)).astype(np.float32)

    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": matrix(vocab_size, hidden),
        "model.norm.weight": sharpness * vector(),
    }
    if not tied:
        tensors["lm_head.weight"] = matrix(vocab_size, hidden)
    for index in range(layers):
        name = f"model.layers.{index}."
        tensors |= {
            name + "input_layernorm.weight": vector(),
            name + "self_attn.q_proj.weight": matrix(hidden, hidden),
            name + "self_attn.k_proj.weight": matrix(kv_heads * width, hidden),
            name + "self_attn.v_proj.weight": matrix(kv_heads * width, hidden),
            name + "self_attn.o_proj.weight": matrix(hidden, hidden),
            name + "post_attention_layernorm.weight": vector(),
            name + "mlp.gate_proj.weight": matrix(intermediate, hidden),
            name + "mlp.up_proj.weight": matrix(intermediate, hidden),
            name + "mlp.down_proj.weight": matrix(hidden, intermediate),
        }
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_numpy.save_file(  # pyright: ignore[reportUnknownMemberType]
        tensors, folder / "model.safetensors", metadata={"format": "pt"}
    )
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(described | config, indent=1), "utf-8")
    return folder
