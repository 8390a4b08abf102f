"""OpenCode (npm `opencode-linux-x64`, a native program), over OpenAI Chat."""

from __future__ import annotations

import json
from typing import Any, cast

from rollwright.harnesses import AgentReport, Artifact, DialectName, Endpoint, Launch
from rollwright.harnesses.events import REASON_CHARS, last_lines, not_exited, parse_event, without_result
from rollwright.harnesses.options import TOO_LONG, UNLIMITED_WINDOW, check_not_empty, check_pin
from rollwright.sandboxes import JobResult

VERSION = "1.18.33"
SHA512 = "q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw=="

_MODEL = "policy"
"""Our own name for it in the configuration; its real name may hold anything."""

_ENV = {
    # no look at models.dev, at new releases, at language servers
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_EMBEDDED_WEB_UI": "1",
    # sub-agents run while their parent waits
    "OPENCODE_EXPERIMENTAL_BACKGROUND_SUBAGENTS": "0",
}


def _artifacts(version: str, sha512: str) -> tuple[Artifact, ...]:
    return (Artifact(package="opencode-linux-x64", version=version, sha512=sha512, keep=("bin/opencode",)),)


class OpenCode:
    """Runs `opencode run` with the prompt on stdin, every tool allowed: the sandbox is the fence."""

    name: str = "opencode"
    dialect: DialectName = "openai_chat"
    artifacts: tuple[Artifact, ...] = _artifacts(VERSION, SHA512)

    def __init__(
        self,
        *,
        system_prompt: str | None = None,
        tools: tuple[str, ...] | None = None,
        context_files: bool = True,
        skills: bool = False,
        compaction: bool = False,
        extra_args: tuple[str, ...] = (),
        version: str = VERSION,
        sha512: str = SHA512,
    ) -> None:
        """`system_prompt` replaces the CLI's own. `tools`: names of the tools offered (None: the CLI's set).

        `context_files`: obey what the repository holds for the CLI (AGENTS.md, opencode.json, `.opencode`).
        `compaction`: let the CLI summarize its history when the context fills, which starts a new branch; off, a full
        context ends the run. Another `version` needs its `sha512` too.
        """
        check_not_empty(self.name, system_prompt)
        check_pin(self.name, "sha512", version_is_default=version == VERSION, checksum_is_default=sha512 == SHA512)
        self.artifacts = _artifacts(version, sha512)
        self._system_prompt = system_prompt
        self._tools = tools
        self._context_files = context_files
        self._skills = skills
        self._compaction = compaction
        self._extra_args = extra_args

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return (self._program(bundle), "--version")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        folder = f"{home}/.config/opencode"
        files: dict[str, bytes] = {}
        agent: dict[str, str] = {}
        if self._system_prompt is not None:
            files[f"{folder}/system-prompt.md"] = self._system_prompt.encode()
            agent["prompt"] = f"{{file:{folder}/system-prompt.md}}"
        files[f"{folder}/opencode.json"] = json.dumps(self._config(agent, endpoint)).encode()
        return Launch(
            argv=(
                self._program(bundle),
                # without a title the CLI asks the policy for one
                *("run", "--format", "json", "--title", "task", "--auto", "--pure"),
                *self._extra_args,
            ),
            env={
                "HOME": home,
                "ROLLWRIGHT_API_KEY": endpoint.api_key,
                **_ENV,
                **({} if self._context_files else {"OPENCODE_DISABLE_PROJECT_CONFIG": "1"}),
                **({} if self._skills else {"OPENCODE_DISABLE_EXTERNAL_SKILLS": "1"}),
            },
            stdin=prompt.encode("utf-8", errors="replace"),
            files=files,
        )

    def report(self, result: JobResult) -> AgentReport:
        return not_exited(result) or _read_end(result) or without_result(result)

    def _program(self, bundle: str) -> str:
        return f"{bundle}/{self.artifacts[0].folder}/bin/opencode"

    def _config(self, agent: dict[str, str], endpoint: Endpoint) -> dict[str, Any]:
        window = endpoint.context_window if self._compaction else UNLIMITED_WINDOW
        tools = {} if self._skills else {"skill": False}
        if self._tools is not None:
            tools = {"*": False, **dict.fromkeys(self._tools, True)}
        return {
            "model": f"rollwright/{_MODEL}",
            "small_model": f"rollwright/{_MODEL}",
            "enabled_providers": ["rollwright"],
            "provider": {
                "rollwright": {
                    "npm": "@ai-sdk/openai-compatible",  # is inside the program
                    "options": {
                        "baseURL": f"{endpoint.base_url}/v1",
                        "apiKey": "{env:ROLLWRIGHT_API_KEY}",
                        # the gateway keeps the stream alive as long as the engine works
                        "headerTimeout": False,
                        "timeout": False,
                    },
                    "models": {
                        _MODEL: {
                            "id": endpoint.model,
                            "reasoning": True,
                            "tool_call": True,
                            "limit": {"context": window, "output": endpoint.max_output_tokens},
                        }
                    },
                }
            },
            "agent": {"build": agent},
            "tools": tools,
            "compaction": {"auto": self._compaction, "prune": False},
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
        }


_REASONS = {"stop": "completed", "length": "length"}


def _read_end(result: JobResult) -> AgentReport | None:
    """The last step's reason, or the error after it."""
    for line in last_lines(result.stdout):
        event = parse_event(line)
        if not event:
            continue
        if event.get("type") == "error":
            message = _error_text(event.get("error"))
            if TOO_LONG.search(message):
                return AgentReport(ok=True, reason="prompt_too_long")
            return AgentReport(ok=False, reason=f"api_error: {message}"[:REASON_CHARS])
        part = event.get("part")
        if event.get("type") == "step_finish" and isinstance(part, dict):
            reason = str(cast("dict[str, Any]", part).get("reason"))[:REASON_CHARS]
            return AgentReport(ok=reason in _REASONS, reason=_REASONS.get(reason, f"stopped: {reason}"))
    return None


def _error_text(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    fields = cast("dict[str, Any]", error)
    data = fields.get("data")
    message = cast("dict[str, Any]", data).get("message") if isinstance(data, dict) else None
    return str(message or fields.get("name") or "no message")
