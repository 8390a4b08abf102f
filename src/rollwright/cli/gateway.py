"""`rollwright gateway`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import OK, say


def gateway(
    *options: str,
    tokenizer: Path,
    port: int,
    engine: str = "sglang",
    engine_url: str = "",
    host: str = "127.0.0.1",
    model: str = "policy",
    renderer: Literal["auto", "renderers", "template"] = "auto",
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    special_text: Literal["plain", "special"] = "plain",
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    folder: Path | None = None,
    bench_admin: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve the gateway alone, for any trainer.

    Sessions are opened and closed under /admin by callers on this machine that send the key in ROLLWRIGHT_ADMIN_KEY.

    Parameters
    ----------
    options
        Options of the engine, e.g. `max_context=32768`.
    tokenizer
        Folder with tokenizer.json and the chat template.
    port
        Host port; 0 takes a free one.
    engine
        sglang, vllm, local, scripted, or module:Class.
    engine_url
        Where the engine answers (its option `url`).
    host
        Address to listen at.
    model
        The model name that clients see.
    renderer
        See policy.renderer in docs/configuration.md.
    tool_parser
        How sampled tool calls are read.
    reasoning_parser
        How thinking is read.
    special_text
        See policy.special_text in docs/configuration.md.
    temperature
        The trainer's.
    max_new_tokens
        Per turn.
    folder
        Where turn logs are kept; sessions a killed gateway left open there go on.
    bench_admin
        Offer the benchmark's routes under /_bench, to callers on this machine.

    Examples
    --------
    rollwright gateway --engine-url http://127.0.0.1:30000 --tokenizer /models/mine --port 18010
    rollwright gateway max_context=32768 --engine-url http://127.0.0.1:30000 --tokenizer /models/mine --port 0
    """
    from rollwright import plugins
    from rollwright.config import option_of
    from rollwright.gateway.standalone import serve_gateway
    from rollwright.tokens.render import load_renderer
    from rollwright.types import Sampling

    load = load_renderer(
        tokenizer,
        kind=renderer,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        special_text=special_text,
    )
    given = dict(option_of(option) for option in options) | ({"url": engine_url} if engine_url else {})
    policy = plugins.make("engines", engine, given, table=f"engine.{engine}", base=Path.cwd(), renderer=load)

    async def go() -> None:
        async with policy as opened:
            await opened.check()
            await serve_gateway(
                engine=opened,
                renderer=load,
                sampling=Sampling(temperature=temperature, max_new_tokens=max_new_tokens),
                model=model,
                port=port,
                host=host,
                folder=folder,
                admin_key=os.environ.get("ROLLWRIGHT_ADMIN_KEY") or None,
                bench_admin=bench_admin,
                on_ready=lambda url, sessions: say(f"{url}" + (f", {sessions} sessions go on" if sessions else "")),
            )

    until_interrupted(go)
    return OK
