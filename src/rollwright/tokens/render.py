"""Choose and load the renderer of a tokenizer folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rollwright.errors import ConfigError
from rollwright.tokens import Renderer
from rollwright.tokens.parse import REASONING_PARSERS, TOOL_PARSERS
from rollwright.tokens.render_renderers import RenderersRenderer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.tokenizer import SpecialText

__all__ = ["RendererKind", "load_renderer"]

RendererKind = Literal["auto", "renderers", "template"]
"""auto: the folder's own template where agents can be served with it, else the family of `renderers` that renders
alike, else the template after all."""


def load_renderer(
    folder: Path,
    *,
    kind: RendererKind = "auto",
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    special_text: SpecialText = "plain",
) -> Renderer:
    """The renderer for the tokenizer and chat template in `folder`.

    Parsers left None are found by what the template writes; a family of `renderers` has its own, so naming one there
    is an error.
    Raises `ConfigError` naming the folder or the setting.
    """
    if tool_parser is not None and tool_parser not in TOOL_PARSERS:
        raise ConfigError(f"unknown tool_parser {tool_parser!r}: one of {', '.join(TOOL_PARSERS)}")
    if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
        raise ConfigError(f"unknown reasoning_parser {reasoning_parser!r}: one of {', '.join(REASONING_PARSERS)}")
    if kind == "renderers":
        if tool_parser is not None or reasoning_parser is not None:
            raise ConfigError(
                "renderer = renderers brings its family's parsers: leave tool_parser and reasoning_parser out"
            )
        return RenderersRenderer(folder, special_text=special_text)
    template = TemplateRenderer(
        folder, tool_parser=tool_parser, reasoning_parser=reasoning_parser, special_text=special_text
    )
    if kind == "template" or template.serves():
        return template
    try:
        return RenderersRenderer(folder, special_text=special_text)
    except ConfigError:
        # Still right: without bridges turns are rendered in full and told as drift, and tools without a parser refused.
        return template
