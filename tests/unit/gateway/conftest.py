"""What every gateway test is made with."""

from __future__ import annotations

import pytest

from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
