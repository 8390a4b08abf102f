"""What every run is made of: engine, renderer, harness, sandboxes and graders, made from settings and not yet open."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright import __version__, plugins
from rollwright.config import RunConfig
from rollwright.engines import Engine, HoldsWeights
from rollwright.errors import ConfigError, UsageError
from rollwright.graders import Grader
from rollwright.harnesses import Harness
from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.sandboxes import Provider
from rollwright.sandboxes.boot import PacedProvider
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Host folders a run may use, chosen by the edge that starts it."""

    cache: Path
    """Bundles. Shared by all runs, safe to delete."""
    state: Path
    """The sandbox registry. Shared by all runs of this user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The objects of a run, none of them open yet."""

    config: RunConfig
    graders: Mapping[str, Grader]
    renderer: Renderer
    engine: Engine
    harness: Harness
    provider: Provider

    def resolved(self) -> dict[str, Any]:
        """What goes into resolved.json: settings, versions, digests."""
        return {
            "config": self.config.dump(),
            "versions": {
                "rollwright": __version__,
                "python": platform.python_version(),
                "kernel": platform.release(),
                **{f"grader:{name}": grader.version for name, grader in sorted(self.graders.items())},
                **{f"artifact:{a.package}": a.version for a in self.harness.artifacts},
                **{name: importlib.metadata.version(name) for name in ("tokenizers", "renderers", "numpy")},
            },
            "renderer": {"name": self.renderer.name, "fingerprint": self.renderer.fingerprint},
            "engine": {"weights": self.engine.weights if isinstance(self.engine, HoldsWeights) else None},
        }


def make_parts(config: RunConfig, places: Places) -> Parts:
    """Raises `UsageError` (settings, unknown names, a template that cannot serve agents) with the field or the fix."""
    graders = load_graders(config)
    harness = make_harness(config)
    renderer = make_renderer(config)
    return Parts(
        config=config,
        graders=graders,
        renderer=renderer,
        engine=make_engine(config, renderer),
        harness=harness,
        provider=make_provider(config, places),
    )


def make_harness(config: RunConfig) -> Harness:
    return plugins.make(
        "harnesses",
        config.harness.kind,
        config.harness.chosen,
        table=f"harness.{config.harness.kind}",
        base=config.base,
    )


def make_renderer(config: RunConfig) -> Renderer:
    renderer = load_renderer(
        config.policy.path,
        kind=config.policy.renderer,
        tool_parser=config.policy.tool_parser,
        reasoning_parser=config.policy.reasoning_parser,
        special_text=config.policy.special_text,
    )
    _can_offer_tools(renderer)
    return renderer


def make_engine(config: RunConfig, renderer: Renderer) -> Engine:
    return plugins.make(
        "engines",
        config.engine.kind,
        config.engine.chosen,
        table=f"engine.{config.engine.kind}",
        base=config.base,
        renderer=renderer,
    )


def _can_offer_tools(renderer: Renderer) -> None:
    """A template that cannot offer tools, or say what a tool gave, would fail at each first turn."""
    tool = ToolSpec(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}})
    call = ToolCall(name="bash", arguments={"command": "ls"}, id="call_0")
    messages = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hello."),
        Message(role="assistant", content="I look.", tool_calls=(call,)),
        Message(role="tool", content="a.py", tool_call_id=call.id, tool_name="bash"),
    ]
    for length, what in ((2, "offer tools"), (4, "say what a tool gave")):
        try:
            renderer.render(messages[:length], [tool])
        except UsageError as error:
            raise ConfigError(f"policy.path: the chat template cannot {what}: {error}", field="policy.path") from error


def load_graders(config: RunConfig) -> dict[str, Grader]:
    """All registered graders with their options; cheap, they import their packages only when used."""
    return {
        name: plugins.make(
            "graders", name, config.grading.options.get(name, {}), table=f"grading.{name}", base=config.base
        )
        for name in plugins.names("graders")
    }


def make_provider(config: RunConfig, places: Places) -> Provider:
    """The chosen backend, its boots paced."""
    backend: Provider = plugins.make(
        "sandboxes",
        config.sandbox.kind,
        config.sandbox.chosen,
        table=f"sandbox.{config.sandbox.kind}",
        base=config.base,
        state_dir=places.state / "boxes",
        cache_dir=places.cache / "images",
    )
    return PacedProvider(
        backend,
        concurrency=config.sandbox.boot_concurrency,
        rate=config.sandbox.boot_rate,
        retries=config.sandbox.boot_retries,
    )
