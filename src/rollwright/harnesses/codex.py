"""Codex (npm `@openai/codex`, a native program), over OpenAI Responses."""

from __future__ import annotations

import json
from typing import Any, cast

from rollwright.harnesses import AgentReport, Artifact, DialectName, Endpoint, Launch
from rollwright.harnesses.events import REASON_CHARS, last_lines, not_exited, parse_event, without_result
from rollwright.harnesses.options import TOO_LONG, UNLIMITED_WINDOW, check_not_empty, check_pin
from rollwright.sandboxes import JobResult

VERSION = "0.171.0"
SHA512 = "l66NZkQgdk2C3pbcfULDz42yEUB581MVA6I+Y43Wp4OIqEy73HCdmZ0GTjeAHY2ycuH4N00d9VsLrwT1jxshTw=="

SYSTEM_PROMPT = """\
You are a coding agent in a terminal, working in a repository on the user's machine. Nobody answers questions: carry \
the task through to its end. Read the code before you change it. Run commands with the shell tool. Change files with \
the apply_patch tool. Check your change by running it. When the task is done, say in a few words what you changed.
"""
"""The CLI has one prompt for each OpenAI model and none for others."""

_TARGET = "vendor/x86_64-unknown-linux-musl"
_HOUR_MS = 3_600_000
_TOOL_OUTPUT_TOKENS = 10_000


def _artifacts(version: str, sha512: str) -> tuple[Artifact, ...]:
    keep = (f"{_TARGET}/bin/codex", f"{_TARGET}/codex-path/rg", f"{_TARGET}/codex-package.json")
    return (Artifact(package="@openai/codex", version=f"{version}-linux-x64", sha512=sha512, keep=keep),)


class Codex:
    """Runs `codex exec` with the prompt on stdin, without its own fences: the sandbox is the fence."""

    name: str = "codex"
    dialect: DialectName = "openai_responses"
    artifacts: tuple[Artifact, ...] = _artifacts(VERSION, SHA512)

    def __init__(
        self,
        *,
        system_prompt: str = SYSTEM_PROMPT,
        apply_patch: bool = True,
        subagents: bool = False,
        skills: bool = False,
        context_files: bool = True,
        compaction: bool = False,
        extra_args: tuple[str, ...] = (),
        version: str = VERSION,
        sha512: str = SHA512,
    ) -> None:
        """`system_prompt`: the policy's instructions; the CLI adds where it is and what it may do.

        `apply_patch`: offer that tool, whose input is text in a grammar of the CLI's own. `context_files`: AGENTS.md
        of the repository is read. `compaction`: let the CLI summarize its history when the context fills, which
        starts a new branch; off, a full context ends the run. Another `version` needs its `sha512` too (of the
        registry's VERSION-linux-x64).
        """
        check_not_empty(self.name, system_prompt)
        check_pin(self.name, "sha512", version_is_default=version == VERSION, checksum_is_default=sha512 == SHA512)
        self.artifacts = _artifacts(version, sha512)
        self._system_prompt = system_prompt
        self._apply_patch = apply_patch
        self._subagents = subagents
        self._skills = skills
        self._context_files = context_files
        self._compaction = compaction
        self._extra_args = extra_args

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return (self._program(bundle), "--version")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        folder = f"{home}/.codex"
        return Launch(
            argv=(
                self._program(bundle),
                *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
                *self._extra_args,
                "-",
            ),
            env={"HOME": home, "CODEX_HOME": folder, "ROLLWRIGHT_API_KEY": endpoint.api_key},
            stdin=prompt.encode("utf-8", errors="replace"),
            files={
                f"{folder}/config.toml": self._config(folder, endpoint).encode(),
                f"{folder}/models.json": json.dumps({"models": [self._model(endpoint)]}).encode(),
            },
        )

    def report(self, result: JobResult) -> AgentReport:
        return not_exited(result) or _read_end(result) or without_result(result)

    def _program(self, bundle: str) -> str:
        return f"{bundle}/{self.artifacts[0].folder}/{_TARGET}/bin/codex"

    def _config(self, folder: str, endpoint: Endpoint) -> str:
        window = endpoint.context_window if self._compaction else UNLIMITED_WINDOW
        compact_at = max(1, endpoint.context_window - endpoint.max_output_tokens) if self._compaction else window
        lines = [
            f"model = {_toml(endpoint.model)}",
            'model_provider = "rollwright"',
            f"model_catalog_json = {_toml(f'{folder}/models.json')}",
            f"model_context_window = {window}",
            f"model_auto_compact_token_limit = {compact_at}",
            'web_search = "disabled"',
            "check_for_update_on_startup = false",
            *([] if self._context_files else ["project_doc_max_bytes = 0"]),
            "[skills]",
            f"include_instructions = {_toml(self._skills)}",
            "bundled = { enabled = false }",
            "[history]",
            'persistence = "none"',
            "[analytics]",
            "enabled = false",
            "[agents]",
            f"enabled = {_toml(self._subagents)}",
            "[features]",
            "goals = false",
            # else it waits for ever for a gateway that is gone
            "unbounded_connection_retries = false",
            "[model_providers.rollwright]",
            'name = "rollwright"',
            f"base_url = {_toml(f'{endpoint.base_url}/v1')}",
            'env_key = "ROLLWRIGHT_API_KEY"',
            'wire_api = "responses"',
            f"stream_idle_timeout_ms = {_HOUR_MS}",
        ]
        return "\n".join(lines) + "\n"

    def _model(self, endpoint: Endpoint) -> dict[str, Any]:
        """An entry for its catalog. Without one its prompt names tools that it does not offer."""
        window = endpoint.context_window if self._compaction else UNLIMITED_WINDOW
        return {
            "slug": endpoint.model,
            "display_name": endpoint.model,
            "description": "",
            "supported_reasoning_levels": [],
            "shell_type": "unified_exec",
            "visibility": "list",
            "supported_in_api": True,
            "priority": 1,
            "base_instructions": self._system_prompt,
            "supports_reasoning_summaries": False,
            "support_verbosity": False,
            "apply_patch_tool_type": "freeform" if self._apply_patch else None,
            "truncation_policy": {"mode": "tokens", "limit": _TOOL_OUTPUT_TOKENS},
            "supports_parallel_tool_calls": True,
            "context_window": window,
            "max_context_window": window,
            "effective_context_window_percent": 100,
            "experimental_supported_tools": [],
            "input_modalities": ["text"],
            "use_responses_lite": False,
        }


def _toml(value: str | bool) -> str:
    """A JSON string or boolean is one of TOML too, but for the delete character."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def _read_end(result: JobResult) -> AgentReport | None:
    for line in last_lines(result.stdout):
        event = parse_event(line)
        if not event:
            continue
        if event.get("type") == "turn.completed":
            return AgentReport(ok=True, reason="completed")
        if event.get("type") == "turn.failed":
            return _read_failure(event.get("error"))
    return None


def _read_failure(error: Any) -> AgentReport:
    message = str(cast("dict[str, Any]", error).get("message")) if isinstance(error, dict) else str(error)
    if "max_output_tokens" in message:
        return AgentReport(ok=True, reason="length")
    if TOO_LONG.search(message) or "ran out of room" in message:
        return AgentReport(ok=True, reason="prompt_too_long")
    return AgentReport(ok=False, reason=f"api_error: {message}"[:REASON_CHARS])
