"""Claude Code (npm `@anthropic-ai/claude-code-linux-x64`, a native program), over Anthropic Messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.harnesses import AgentReport, Artifact, DialectName, Endpoint, Launch
from rollwright.harnesses.events import REASON_CHARS, last_lines, not_exited, parse_event, without_result
from rollwright.harnesses.options import UNLIMITED_WINDOW, check_max_turns, check_pin, local_tarball
from rollwright.sandboxes import JobResult

VERSION = "2.1.332"
SHA512 = "f4JWhzwYutJIHScC7/dYOPX6s28tt7ZADhsOi8zwOHq5fFPEuUeChh2NMfinSg0GrUckYxaeebC4h0DqiKzLcw=="

_HOUR_MS = str(3_600_000)

_ENV = {
    # nothing but the policy's turns on the wire: no updates, telemetry, title or suggestion calls
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    # each request says which agent it is of, and why
    "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
    # a version string in the system prompt that differs between rollouts
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    # a failed stream is sent again as it was, not as another kind of request
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
    # sub-agents run while their parent waits, so the history never gets notes in between
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "API_TIMEOUT_MS": _HOUR_MS,
    "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": _HOUR_MS,
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": _HOUR_MS,
    # without it the CLI refuses to run unattended as root
    "IS_SANDBOX": "1",
}
_SETTINGS = {"attribution": {"commit": "", "pr": ""}}
"""No advertising lines asked of the policy."""


def _artifacts(version: str, sha512: str) -> tuple[Artifact, ...]:
    package = "@anthropic-ai/claude-code-linux-x64"
    return (Artifact(package=package, version=version, sha512=sha512, keep=("claude", "LICENSE.md")),)


class ClaudeCode:
    """Runs `claude -p` with the prompt on stdin and every permission given: the sandbox is the fence."""

    name: str = "claude-code"
    dialect: DialectName = "anthropic"
    artifacts: tuple[Artifact, ...] = _artifacts(VERSION, SHA512)

    def __init__(
        self,
        *,
        system_prompt: str | None = None,
        tools: tuple[str, ...] | None = None,
        max_turns: int | None = None,
        bare: bool = False,
        skills: bool = False,
        compaction: bool = False,
        extra_args: tuple[str, ...] = (),
        extra_env: Mapping[str, str] | None = None,
        tarball: Path | None = None,
        version: str = VERSION,
        sha512: str = SHA512,
    ) -> None:
        """`system_prompt` replaces the CLI's own. `tools`: names of the tools offered (None: the CLI's set).

        `bare`: the CLI's minimal mode (no CLAUDE.md, no environment notes, small prompts). `compaction`: let the CLI
        summarize its history when the context fills, which starts a new branch; off, a full context ends the run.
        `extra_env` is set last, so it wins. `tarball`: the npm tarball of the native program on this machine, in place
        of the registry's. Another `version` needs its `sha512` too.
        """
        check_max_turns("claude-code", max_turns)
        check_pin(
            "claude-code",
            "sha512",
            version_is_default=version == VERSION,
            checksum_is_default=sha512 == SHA512,
        )
        self.artifacts = _artifacts(version, sha512)
        if tarball is not None:
            self.artifacts = (local_tarball(self.artifacts[0], tarball, "harness.claude-code.tarball"),)
        self._extra_env = dict(extra_env or {})
        self._system_prompt = system_prompt
        self._compaction = compaction
        self._skills = skills
        self._flags = (
            *(() if tools is None else ("--tools", ",".join(tools))),
            *(() if max_turns is None else ("--max-turns", str(max_turns))),
            *(("--bare",) if bare else ()),
            *(() if skills else ("--disable-slash-commands",)),
            *extra_args,
        )

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return (self._program(bundle), "--version")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        files = {f"{home}/.claude/settings.json": json.dumps(_SETTINGS).encode()}
        system: tuple[str, ...] = ()
        if self._system_prompt is not None:
            files[f"{home}/.claude/system-prompt.md"] = self._system_prompt.encode()
            system = ("--system-prompt-file", f"{home}/.claude/system-prompt.md")
        return Launch(
            argv=(
                self._program(bundle),
                *("-p", "--output-format", "stream-json", "--verbose"),
                *("--permission-mode", "bypassPermissions"),
                *system,
                *self._flags,
            ),
            env={"HOME": home, **_ENV, **self._endpoint_env(endpoint), **self._extra_env},
            stdin=_literal(prompt).encode("utf-8", errors="replace"),
            files=files,
        )

    def report(self, result: JobResult) -> AgentReport:
        if early := not_exited(result):
            return early
        for line in last_lines(result.stdout):
            event = parse_event(line)
            if event and event.get("type") == "result":
                return _read_result(event)
        return without_result(result)

    def _program(self, bundle: str) -> str:
        return f"{bundle}/{self.artifacts[0].folder}/claude"

    def _endpoint_env(self, endpoint: Endpoint) -> dict[str, str]:
        # with compaction off, a real window only makes the CLI refuse prompts by its own guess, without asking
        window = endpoint.context_window if self._compaction else UNLIMITED_WINDOW
        return {
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
            "ANTHROPIC_MODEL": endpoint.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output_tokens),
            **({} if self._compaction else {"DISABLE_COMPACT": "1"}),
            **({} if self._skills else {"CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1"}),
        }


def _literal(prompt: str) -> str:
    """A prompt whose first character is a slash would be run as a command of the CLI, without a model turn."""
    return "\n" + prompt if prompt.startswith("/") else prompt


def _read_result(event: dict[str, Any]) -> AgentReport:
    terminal = event.get("terminal_reason")
    if event.get("is_error") is False:
        if event.get("num_turns") == 0:  # a command of the CLI's own answered the prompt
            return AgentReport(ok=False, reason="no_result")
        return AgentReport(ok=True, reason="completed")
    if event.get("subtype") == "error_max_turns" or terminal == "max_turns":
        return AgentReport(ok=True, reason="max_turns")
    if terminal in ("prompt_too_long", "blocking_limit"):
        return AgentReport(ok=True, reason="prompt_too_long")
    if event.get("api_error") == "max_output_tokens":
        return AgentReport(ok=True, reason="length")
    said = event.get("result") or event.get("errors") or terminal or event.get("subtype")
    return AgentReport(ok=False, reason=f"api_error: {said}"[:REASON_CHARS])
