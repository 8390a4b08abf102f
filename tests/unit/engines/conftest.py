"""A tiny policy: tokenizer, renderer and a random Llama of the same vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwright.testing.tiny import tiny_tokenizer
from rollwright.testing.tiny_llama import write_random_llama
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load_renderer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), kind="template")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer) -> Path:
    return write_random_llama(
        tmp_path_factory.mktemp("model"), vocab_size=renderer.vocab_size, max_context=8192, layers=1
    )


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer) -> Path:
    return write_random_llama(
        tmp_path_factory.mktemp("other"), vocab_size=renderer.vocab_size, max_context=8192, layers=1, seed=1
    )
