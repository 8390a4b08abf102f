"""slime's arguments and its users' environment as the settings of a run. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rollwright import plugins
from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.graders.grading import GradingLimits
from rollwright.integrations.slime.names import from_environment

__all__ = ["prompt_of", "protocol_for", "run_config", "seconds_needed", "to_be_stored"]

RUN_FILE = "ROLLWRIGHT_RUN_FILE"
"""Environment name of a run file whose settings win over slime's names."""
_WITH_NODE = ("pi", "qwen-code")
_GUARD_EXTRA_SECONDS = 900.0
"""For boots, their queue, and the steps around the tests: the guard is for what hangs."""
_PLACES = 100_000
"""slime bounds what is in flight itself; fewer places are the user's wish."""


def run_config(args: Any, environ: Mapping[str, str]) -> RunConfig:
    """What a run file would say.

    The strongest first: `args.rollwright` (a table of settings, from slime's `--custom-config-path`), the run file that
    `ROLLWRIGHT_RUN_FILE` names, the environment's names (`names.NAMES`), slime's own arguments. Raises `ConfigError`.
    """
    names = from_environment(environ)
    own, base = _run_file(environ)
    table: Any = getattr(args, "rollwright", None)
    if table is not None and not isinstance(table, Mapping):
        raise ConfigError("args.rollwright must be a table of settings", field="rollwright")
    own = _merged(own, cast("Mapping[str, Any]", table or {}))
    data = _merged(_merged(_from_arguments(args), _from_names(names)), own)
    config = RunConfig.resolve(data, base=base, where="slime's arguments and environment")
    run, gateway = config.run, config.gateway
    if "rollout_seconds" not in run.model_fields_set:
        run = run.model_copy(update={"rollout_seconds": seconds_needed(config) + _GUARD_EXTRA_SECONDS})
    if run.executor == "ray" and not {"public_host", "public_url"} & set(own.get("gateway", ())):
        # the names are of one machine, and there is a gateway on each
        gateway = gateway.model_copy(update={"public_host": "node"})
    return config.model_copy(update={"run": run, "gateway": gateway})


def seconds_needed(config: RunConfig) -> float:
    """What the agent and its grading may take: less would make failures of ours of the policy's."""
    tests = [table.get("seconds") for table in config.grading.options.values()]
    longest = max((each for each in tests if isinstance(each, int | float)), default=0)
    return config.harness.seconds + GradingLimits().runs * longest


def _run_file(environ: Mapping[str, str]) -> tuple[dict[str, Any], Path]:
    """The user's own run file, and the folder its paths are from."""
    if not environ.get(RUN_FILE):
        return {}, Path.cwd()
    file = Path(environ[RUN_FILE])
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")), file.parent.resolve()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{RUN_FILE}: {file} cannot be read: {error}", field=RUN_FILE) from error


def to_be_stored(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """`Parts.resolved` for the run folder, which others may read: the backend's key stays in the environment."""
    config = resolved["config"]
    sandbox = config["sandbox"]
    options = {
        kind: {name: value for name, value in table.items() if name != "api_key"}
        for kind, table in sandbox["options"].items()
    }
    return {**resolved, "config": {**config, "sandbox": {**sandbox, "options": options}}}


def protocol_for(config: RunConfig, environ: Mapping[str, str], *, evaluation: bool) -> str:
    """The grading protocol of a row that names none. A run file's own `tasks.protocol` is in `config`."""
    return from_environment(environ)["SWE_EVAL_PROTOCOL"] if evaluation else config.tasks.protocol


def prompt_of(prompt: str, environ: Mapping[str, str]) -> str:
    """What the CLI is told."""
    before = environ.get("SWE_CC_PROMPT")
    return f"{before}\n\n{prompt}" if before else prompt


def _from_arguments(args: Any) -> dict[str, Any]:
    """slime's own command line."""
    checkpoint = getattr(args, "hf_checkpoint", None)
    if not checkpoint:
        raise ConfigError("slime's --hf-checkpoint is not set; its tokenizer and chat template are needed")
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    engine: dict[str, Any] = {"kind": "sglang", "sglang": {"url": f"http://{host}:{port}"}}
    if context := getattr(args, "rollout_max_context_len", None):
        engine["sglang"]["max_context"] = int(context)
    reply = int(getattr(args, "rollout_max_response_len", None) or 1024)
    return {
        "tasks": {"path": str(getattr(args, "prompt_data", None) or "slime")},
        "policy": {
            "path": str(checkpoint),
            "tool_parser": getattr(args, "sglang_tool_call_parser", None),
            "reasoning_parser": getattr(args, "sglang_reasoning_parser", None),
        },
        "engine": engine,
        "sampling": {"max_new_tokens": reply},
        "run": {"concurrency": _PLACES},
    }


def _from_names(names: Mapping[str, Any]) -> dict[str, Any]:
    kind: str = names["SWE_AGENT"]
    harness: dict[str, Any] = {"kind": kind, "seconds": names["SWE_AGENT_TIME_BUDGET_SEC"]}
    options: dict[str, Any] = {}
    if kind == "claude-code":
        for name, option in (
            ("SLIME_AGENT_CC_TARBALL", "tarball"),
            ("SLIME_AGENT_CC_EXTRA_ARGS", "extra_args"),
            ("SLIME_AGENT_CC_EXTRA_ENVS", "extra_env"),
        ):
            if name in names:
                options[option] = names[name]
    elif kind in _WITH_NODE and "SLIME_AGENT_NODE_TARBALL" in names:
        options["node_tarball"] = names["SLIME_AGENT_NODE_TARBALL"]
    if options:
        harness[kind] = options
    sandbox: dict[str, Any] = {
        "kind": names["SLIME_AGENT_SANDBOX_BACKEND"],
        "boot_concurrency": names["SWE_BOOT_CONCURRENCY"],
        "boot_retries": names["SWE_BOOT_RETRIES"],
    }
    e2b = {
        option: names[name]
        for name, option in (
            ("E2B_API_KEY", "api_key"),
            ("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image_metadata_key"),
        )
        if name in names
    }
    if e2b:
        sandbox["e2b"] = e2b
    gateway: dict[str, Any] = {"bind": names["ADAPTER_BIND_HOST"], "public_port": names["ADAPTER_PORT"]}
    if "ADAPTER_PUBLIC_HOST" in names:
        gateway["public_host"] = names["ADAPTER_PUBLIC_HOST"]
    data: dict[str, Any] = {
        "tasks": {"protocol": names["SWE_TRAIN_PROTOCOL"]},
        "harness": harness,
        "sandbox": sandbox,
        "gateway": gateway,
        "grading": {name: {"seconds": names["SWE_EVAL_TIMEOUT_SEC"]} for name in _timed_graders()},
    }
    if "SWE_ROLLOUT_GUARD_SEC" in names:
        data["run"] = {"rollout_seconds": names["SWE_ROLLOUT_GUARD_SEC"]}
    return data


def _timed_graders() -> list[str]:
    """The protocols that have a setting for their tests' time."""
    return [name for name in plugins.names("graders") if "seconds" in plugins.options("graders", name)]


def _merged(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged, a text over a table is its `kind`, everything else is replaced."""
    merged = dict(weak)
    for key, value in strong.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(cast("Mapping[str, Any]", below), cast("Mapping[str, Any]", value))
        elif isinstance(below, Mapping) and isinstance(value, str):
            merged[key] = {**cast("Mapping[str, Any]", below), "kind": value}
        else:
            merged[key] = value
    return merged
