"""Qwen Code (npm `@qwen-code/qwen-code`), over Anthropic Messages or OpenAI Chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, Artifact, DialectName, Endpoint, Launch
from rollwright.harnesses.events import REASON_CHARS, last_lines, not_exited, parse_event, without_result
from rollwright.harnesses.node import NODE, node_program
from rollwright.harnesses.options import (
    TOO_LONG,
    UNLIMITED_WINDOW,
    check_max_turns,
    check_not_empty,
    check_pin,
    local_tarball,
)
from rollwright.sandboxes import JobResult

VERSION = "0.24.4"
SHA512 = "pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg=="

# Without a terminal of its own this CLI loses the output of quick commands: it takes the end of the process for the end
# of its output.
_TERMINAL = (
    Artifact(
        package="@lydell/node-pty",
        version="1.2.0-beta.10",
        sha512="Fv+A3+MZVA8qhkBIZsM1E6dCdHNMyXXz22mAYiMWd03LlyK///F3OH6CKPX9mj4id7LUlxpr45yPzyBVy9aDPw==",
        at="node_modules/@lydell/node-pty",
    ),
    Artifact(
        package="@lydell/node-pty-linux-x64",
        version="1.2.0-beta.10",
        sha512="J9HnxvSzEeMH748+Ul1VrmCLWMo7iCVJy9EGijRR62+YO/Yk5GaCydUTZ+KzlH0/X5aTrgt5cfiof4vx45tRRg==",
        at="node_modules/@lydell/node-pty-linux-x64",
    ),
)

_BARE_TOOLS = ("edit", "get_goal", "notebook_edit", "read_file", "run_shell_command", "update_goal")
_EXIT_MAX_TURNS = 53

_HOUR_MS = 3_600_000
_ENV = {
    "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    # the parent process adds nothing but a second start
    "QWEN_CODE_NO_RELAUNCH": "1",
}


def _artifacts(version: str, sha512: str) -> tuple[Artifact, ...]:
    # without its ripgrep: that comes without the right to be executed, so the CLI searches by itself
    keep = ("cli-entry.js", "cli.js", "package.json", "chunks", "locales", "vendor/tree-sitter", "bundled", "LICENSE")
    workers = ("execution-worker.js", "fzfWorker.js", "codeModeHost.js", "sandboxBwrapRelay.js", "sandboxFileWorker.js")
    cli = Artifact(package="@qwen-code/qwen-code", version=version, sha512=sha512, keep=(*keep, *workers))
    return cli, NODE, *_TERMINAL


class QwenCode:
    """Runs `qwen` with the prompt on stdin, every tool allowed: the sandbox is the fence."""

    name: str = "qwen-code"
    artifacts: tuple[Artifact, ...] = _artifacts(VERSION, SHA512)

    def __init__(
        self,
        *,
        api: DialectName = "anthropic",
        system_prompt: str | None = None,
        tools: tuple[str, ...] | None = None,
        max_turns: int | None = None,
        bare: bool = True,
        compaction: bool = False,
        extra_args: tuple[str, ...] = (),
        node_tarball: Path | None = None,
        version: str = VERSION,
        sha512: str = SHA512,
    ) -> None:
        """`api`: `anthropic` brings everything back as it was sent; over `openai_chat` the CLI trims its thoughts.

        `system_prompt` replaces the CLI's own. `tools`: names of the tools offered (None: the CLI's set). `bare`: no
        memory, skills, sub-agents or files of the repository, and no settings: the CLI takes the context for 200000
        tokens where the model's name says nothing else. `compaction` (needs `bare = false`): let the CLI summarize
        its history before the context is full, which starts a new branch; off, it does so only when it is told, or
        believes, that the context is full. `node_tarball`: a Node.js distribution on this machine, in place of the
        registry's. Another `version` needs its `sha512` too.
        """
        if api == "openai_responses":
            field = "harness.qwen-code.api"
            raise ConfigError(f"{field} is openai_responses; qwen goes through anthropic or openai_chat", field=field)
        if compaction and bare:
            field = "harness.qwen-code.compaction"
            raise ConfigError(
                f"{field} needs harness.qwen-code.bare = false: the bare mode reads no settings", field=field
            )
        check_not_empty(self.name, system_prompt)
        check_max_turns(self.name, max_turns)
        check_pin(self.name, "sha512", version_is_default=version == VERSION, checksum_is_default=sha512 == SHA512)
        self.dialect: DialectName = api
        self.artifacts = _artifacts(version, sha512)
        if node_tarball is not None:
            node = local_tarball(NODE, node_tarball, "harness.qwen-code.node_tarball")
            self.artifacts = tuple(node if artifact is NODE else artifact for artifact in self.artifacts)
        self._system_prompt = system_prompt
        self._compaction = compaction
        self._flags = (
            *(("--bare",) if bare else ()),
            *_tool_flags(tools, bare=bare),
            *(() if max_turns is None else ("--max-session-turns", str(max_turns))),
            *extra_args,
        )

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return (*self._program(bundle), "--version")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        files = {f"{home}/.qwen/settings.json": json.dumps(self._settings(endpoint)).encode()}
        env = {"HOME": home, **_ENV, **self._endpoint_env(endpoint)}
        if self._system_prompt is not None:
            files[f"{home}/.qwen/system-prompt.md"] = self._system_prompt.encode()
            env["QWEN_SYSTEM_MD"] = f"{home}/.qwen/system-prompt.md"
        return Launch(
            argv=(
                *self._program(bundle),
                *("--auth-type", "anthropic" if self.dialect == "anthropic" else "openai"),
                *("--yolo", "--output-format", "stream-json"),
                *self._flags,
            ),
            env=env,
            stdin=_literal(prompt).encode("utf-8", errors="replace"),
            files=files,
        )

    def report(self, result: JobResult) -> AgentReport:
        if early := not_exited(result):
            return early
        if result.exit_code == _EXIT_MAX_TURNS:
            return AgentReport(ok=True, reason="max_turns")
        for line in last_lines(result.stdout):
            event = parse_event(line)
            if event and event.get("type") == "result":
                return _read_result(event)
        return without_result(result)

    def _program(self, bundle: str) -> tuple[str, str]:
        return node_program(bundle), f"{bundle}/{self.artifacts[0].folder}/cli-entry.js"

    def _endpoint_env(self, endpoint: Endpoint) -> dict[str, str]:
        # told its limit, the CLI does not send a cut turn again with a higher one
        limit = {"QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output_tokens)}
        if self.dialect == "anthropic":
            wire = {"ANTHROPIC_BASE_URL": endpoint.base_url, "ANTHROPIC_API_KEY": endpoint.api_key}
            return {**wire, "ANTHROPIC_MODEL": endpoint.model, **limit}
        wire = {"OPENAI_BASE_URL": f"{endpoint.base_url}/v1", "OPENAI_API_KEY": endpoint.api_key}
        return {**wire, "OPENAI_MODEL": endpoint.model, **limit}

    def _settings(self, endpoint: Endpoint) -> dict[str, Any]:
        window = endpoint.context_window if self._compaction else UNLIMITED_WINDOW
        return {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "tools": {"shell": {"enableInteractiveShell": True}, "useRipgrep": False},
            "model": {
                "chatCompression": {"contextPercentageThreshold": 0.7 if self._compaction else 0},
                "skipNextSpeakerCheck": True,
                "skipLoopDetection": True,
                "generationConfig": {"contextWindowSize": window, "timeout": _HOUR_MS},
            },
        }


def _tool_flags(tools: tuple[str, ...] | None, *, bare: bool) -> tuple[str, ...]:
    if tools is None:
        return ()
    if not bare:
        return ("--core-tools", *tools)
    unknown = set(tools) - set(_BARE_TOOLS)
    if unknown:
        field = "harness.qwen-code.tools"
        raise ConfigError(
            f"{field}: {', '.join(sorted(unknown))} is not among the tools of the bare mode: {', '.join(_BARE_TOOLS)}",
            field=field,
        )
    # this mode ignores the list of tools to offer, but not that of tools to leave out
    return tuple(word for name in _BARE_TOOLS if name not in tools for word in ("--exclude-tools", name))


def _literal(prompt: str) -> str:
    """A prompt that starts with a slash would be run as a command of the CLI, without a model turn."""
    return "\n" + prompt if prompt.startswith("/") else prompt


def _read_result(event: dict[str, Any]) -> AgentReport:
    if event.get("is_error") is False:
        return AgentReport(ok=True, reason="completed")
    error = event.get("error")
    said = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else error
    message = str(said or event.get("result") or event.get("subtype"))
    if TOO_LONG.search(message) or "Context is too large" in message:
        return AgentReport(ok=True, reason="prompt_too_long")
    if message.startswith("Loop detection halted the run"):
        return AgentReport(ok=True, reason="loop")
    return AgentReport(ok=False, reason=f"api_error: {message}"[:REASON_CHARS])
