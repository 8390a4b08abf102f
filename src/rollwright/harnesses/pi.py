"""The pi coding agent (npm `@earendil-works/pi-coding-agent`), over OpenAI Chat or Anthropic Messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, Artifact, DialectName, Endpoint, Launch
from rollwright.harnesses.events import REASON_CHARS, last_lines, not_exited, parse_event, without_result
from rollwright.harnesses.node import NODE, node_program
from rollwright.harnesses.options import TOO_LONG, UNLIMITED_WINDOW, check_not_empty, check_pin, local_tarball
from rollwright.sandboxes import Captured, JobResult

VERSION = "1.6.0"
SHA512 = "zX1BVEsshx7A2MRuQ6jfr3RJGWw4Wn+vLq5ZfmlvS1RskhRmByaSZVXH/zcwRrWHO7qPgs98pNCbPOEti/t0fQ=="
_CLAMP_MARGIN = 4096
"""What pi's guess adds to be safe."""


def _artifacts(version: str, sha512: str) -> tuple[Artifact, ...]:
    keep = ("dist/bundle", "package.json", "README.md", "docs", "examples")
    cli = Artifact(package="@earendil-works/pi-coding-agent", version=version, sha512=sha512, keep=keep)
    return cli, NODE


class Pi:
    """Runs `pi --mode json` with the prompt on stdin. Its settings live in the agent's home, not in the workdir."""

    name: str = "pi"
    artifacts: tuple[Artifact, ...] = _artifacts(VERSION, SHA512)

    def __init__(
        self,
        *,
        api: DialectName = "openai_chat",
        system_prompt: str | None = None,
        tools: tuple[str, ...] | None = None,
        skills: bool = False,
        extensions: bool = False,
        context_files: bool = True,
        offline: bool = True,
        compaction: bool = False,
        extra_args: tuple[str, ...] = (),
        node_tarball: Path | None = None,
        version: str = VERSION,
        sha512: str = SHA512,
    ) -> None:
        """`system_prompt` replaces pi's own; pi adds the working directory and, with `context_files`, AGENTS.md.

        `tools`: names of the tools offered (None: pi's read, bash, edit, write). `compaction`: let pi summarize its
        history when the context fills, which starts a new branch; off, a full context ends the run. `node_tarball`: a
        Node.js distribution on this machine, in place of the registry's. Another `version` needs its `sha512` too.
        """
        if api == "openai_responses":
            field = "harness.pi.api"
            raise ConfigError(f"{field} is openai_responses; pi goes through openai_chat or anthropic", field=field)
        check_not_empty("pi", system_prompt)
        check_pin("pi", "sha512", version_is_default=version == VERSION, checksum_is_default=sha512 == SHA512)
        self.dialect: DialectName = api
        self.artifacts = _artifacts(version, sha512)
        if node_tarball is not None:
            node = local_tarball(NODE, node_tarball, "harness.pi.node_tarball")
            self.artifacts = tuple(node if artifact is NODE else artifact for artifact in self.artifacts)
        self._system_prompt = system_prompt
        self._compaction = compaction
        self._offline = offline
        self._flags = (
            *(() if tools is None else ("--tools", ",".join(tools)) if tools else ("--no-tools",)),
            *(() if skills else ("--no-skills",)),
            *(() if extensions else ("--no-extensions",)),
            *(() if context_files else ("--no-context-files",)),
            *(("--offline",) if offline else ()),
            *extra_args,
        )

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return (*self._program(bundle), "--version")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        folder = f"{home}/.pi/agent"
        files = {
            f"{folder}/models.json": json.dumps(self._models(endpoint)).encode(),
            f"{folder}/settings.json": json.dumps(self._settings(endpoint)).encode(),
        }
        system: tuple[str, ...] = ()
        if self._system_prompt is not None:
            # as a file: pi would read the text itself as a path if one of that name existed
            files[f"{folder}/system-prompt.md"] = self._system_prompt.encode()
            system = ("--system-prompt", f"{folder}/system-prompt.md")
        return Launch(
            argv=(
                *self._program(bundle),
                *("--mode", "json", "--no-session", "--no-approve", "--no-prompt-templates", "--no-themes"),
                *system,
                *self._flags,
            ),
            env={
                "HOME": home,
                "ROLLWRIGHT_API_KEY": endpoint.api_key,
                "PI_TELEMETRY": "0",
                **({"PI_OFFLINE": "1"} if self._offline else {}),
            },
            stdin=prompt.encode("utf-8", errors="replace"),
            files=files,
        )

    def report(self, result: JobResult) -> AgentReport:
        return not_exited(result) or _read_end(result.stdout) or without_result(result)

    def _program(self, bundle: str) -> tuple[str, str]:
        return node_program(bundle), f"{bundle}/{self.artifacts[0].folder}/dist/bundle/cli.js"

    def _models(self, endpoint: Endpoint) -> dict[str, Any]:
        chat = self.dialect == "openai_chat"
        # pi caps its replies to what its guess of the prompt leaves of the window, down to one token
        window = endpoint.context_window if self._compaction else UNLIMITED_WINDOW
        provider = {
            "baseUrl": f"{endpoint.base_url}/v1" if chat else endpoint.base_url,
            "api": "openai-completions" if chat else "anthropic-messages",
            "apiKey": "$ROLLWRIGHT_API_KEY",
            "models": [
                {
                    "id": endpoint.model,
                    "contextWindow": window,
                    "maxTokens": endpoint.max_output_tokens,
                }
            ],
        }
        return {"providers": {"rollwright": provider}}

    def _settings(self, endpoint: Endpoint) -> dict[str, Any]:
        return {
            "defaultProvider": "rollwright",
            "defaultModel": endpoint.model,
            "httpIdleTimeoutMs": 0,  # the gateway keeps the stream alive as long as the engine works
            "compaction": {
                "enabled": self._compaction,
                "reserveTokens": endpoint.max_output_tokens + _CLAMP_MARGIN,
                "keepRecentTokens": endpoint.context_window // 4,
            },
        }


_STOP = b'"stopReason":"'
_ERROR = re.compile(rb'"errorMessage":("(?:[^"\\]|\\.)*")')


def _read_end(stdout: Captured) -> AgentReport | None:
    """Read how the last assistant message stopped.

    Pi's last event but one repeats the whole session on one line, longer than the tail that is kept of long runs. So
    the stop reason is looked for as bytes: quotes within JSON strings are escaped, so no text of the policy looks
    like the key, and of the message's keys only its error follows it.
    """
    before_end: list[bytes] = []
    settled = None
    for line in last_lines(stdout):
        event = None if settled else parse_event(line)
        if event and event.get("type") == "agent_settled":
            settled = event
        elif settled and _STOP in line:
            before_end.append(line)
            break
    if not settled or not before_end:
        return None
    if settled.get("aborted"):
        return AgentReport(ok=False, reason="aborted")
    rest = before_end[0].rpartition(_STOP)[2]
    stop = rest.partition(b'"')[0].decode("utf-8", errors="replace")[:REASON_CHARS]
    if stop == "error":
        message = _error_text(rest)
        if TOO_LONG.search(message):
            return AgentReport(ok=True, reason="prompt_too_long")
        return AgentReport(ok=False, reason=f"api_error: {message}")
    return AgentReport(ok=stop in ("stop", "length"), reason="completed" if stop == "stop" else stop or "no_result")


def _error_text(rest: bytes) -> str:
    found = _ERROR.search(rest)
    if not found:
        return "no message"
    try:
        return str(orjson.loads(found[1]))[:REASON_CHARS]
    except orjson.JSONDecodeError:
        return found[1].decode("utf-8", errors="replace")[:REASON_CHARS]
