"""`rollwright gateway`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rollwright.cli.interrupt import until_interrupted
from rollwright.cli.output import OK, say
from rollwright.types import HistoryPolicy, TrafficClass

if TYPE_CHECKING:
    from rollwright.engines import Engine
    from rollwright.gateway.settings import SessionSettings
    from rollwright.tokens import Renderer


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
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 1024,
    seed: int | None = None,
    history: HistoryPolicy = "exact",
    trained: Annotated[tuple[TrafficClass, ...], Parameter(negative=())] = ("main", "subagent", "compaction"),
    max_turns: int | None = None,
    max_sampled_tokens: int | None = None,
    max_seconds: float | None = None,
    max_failures: int = 8,
    folder: Path | None = None,
    shards: int = 1,
    bench_admin: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve the gateway alone, for any trainer.

    Sessions are opened and closed under /admin by callers on this machine that send the key in ROLLWRIGHT_ADMIN_KEY.
    From --temperature to --max-failures: of sessions that are opened without settings of their own.

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
        The trainer's, like all of sampling: what a client asks for is not used.
    top_p
        Of the likeliest tokens that make up so much; 1: of all.
    top_k
        Of so many likeliest tokens; 0: of all.
    max_new_tokens
        Per turn.
    seed
        Each rollout's own is made from it and the rollout's name.
    history
        See gateway.history in docs/configuration.md.
    trained
        A class of traffic whose turns are trained; repeat it for more.
    max_turns
        Turns of a session; the next one ends it.
    max_sampled_tokens
        Sampled tokens of a session, likewise.
    max_seconds
        Life of a session.
    max_failures
        Failures of ours in a row, mostly of the engine, that end a session.
    folder
        Where turn logs are kept; sessions a killed gateway left open there go on.
    shards
        Processes behind the one address, each with its own sessions; one that dies is started again on its folder.
    bench_admin
        Offer the benchmark's routes under /_bench, to callers on this machine.

    Examples
    --------
    rollwright gateway --engine-url http://127.0.0.1:30000 --tokenizer /models/mine --port 18010
    rollwright gateway --shards 4 --folder logs --engine-url http://127.0.0.1:30000 --tokenizer /models/mine --port 0
    rollwright gateway max_context=32768 --engine-url http://127.0.0.1:30000 --tokenizer /models/mine --port 0
    rollwright gateway --top-p 0.95 --max-turns 99 --engine-url http://127.0.0.1:30000 --tokenizer /models/mine --port 0
    """
    from functools import partial

    from rollwright.config import option_of
    from rollwright.errors import ConfigError
    from rollwright.gateway.shards import serve_shards
    from rollwright.gateway.standalone import serve_gateway

    if shards < 1:
        raise ConfigError(f"shards must be at least 1, not {shards}", field="shards")
    given = dict(option_of(option) for option in options) | ({"url": engine_url} if engine_url else {})
    load = partial(
        load_parts,
        tokenizer,
        engine,
        given,
        Path.cwd(),
        kind=renderer,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        special_text=special_text,
    )
    sessions = session_settings(
        seed,
        {
            "sampling": {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "max_new_tokens": max_new_tokens,
            },
            "limits": {
                "turns": max_turns,
                "sampled_tokens": max_sampled_tokens,
                "seconds": max_seconds,
                "failures": max_failures,
            },
            "history": history,
            "trained": trained,
        },
    )
    settings: dict[str, Any] = {
        "sampling": sessions.sampling,
        "limits": sessions.limits,
        "history": sessions.history,
        "trained": sessions.trained,
        "model": model,
        "port": port,
        "host": host,
        "folder": folder,
        "admin_key": os.environ.get("ROLLWRIGHT_ADMIN_KEY") or None,
        "bench_admin": bench_admin,
        "on_ready": _say_ready,
    }

    async def go() -> None:
        if shards > 1:
            return await serve_shards(count=shards, load=load, **settings)
        policy, loaded = load()
        async with policy:
            await policy.check()
            await serve_gateway(engine=policy, renderer=loaded, **settings)

    until_interrupted(go)
    return OK


def _say_ready(url: str, sessions: int) -> None:
    say(url + (f", {sessions} sessions go on" if sessions else ""))


def session_settings(seed: int | None, given: Mapping[str, Any]) -> SessionSettings:
    """Checked as the admin routes check theirs. Raises `ConfigError` naming the option."""
    from rollwright.dialects.jsonio import dumps
    from rollwright.errors import ConfigError, MalformedRequest
    from rollwright.gateway.admin_bodies import SettingsBody, read_body
    from rollwright.gateway.settings import SessionSettings
    from rollwright.types import Sampling

    try:
        return read_body(SettingsBody, dumps(given)).over(SessionSettings(sampling=Sampling(seed=seed)))
    except MalformedRequest as error:
        field: str = error.details["field"]
        name = field.replace("limits.", "max_").rpartition(".")[2].replace("_", "-")
        raise ConfigError(f"--{name}{error.message.removeprefix(field)}", field=name) from error


def load_parts(
    tokenizer: Path, engine: str, given: Mapping[str, Any], base: Path, **reading: Any
) -> tuple[Engine, Renderer]:
    """Of each process of the gateway its own. `reading`: as `load_renderer` takes it."""
    from rollwright import plugins
    from rollwright.tokens.render import load_renderer

    renderer = load_renderer(tokenizer, **reading)
    made = plugins.make("engines", engine, dict(given), table=f"engine.{engine}", base=base, renderer=renderer)
    return made, renderer
