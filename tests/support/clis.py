"""The CLIs under test: how each wants its tools called, and what its manners are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rollwright.harnesses import Harness
from rollwright.harnesses.claude_code import ClaudeCode
from rollwright.harnesses.codex import Codex
from rollwright.harnesses.mini_swe_agent import MiniSweAgent
from rollwright.harnesses.opencode import OpenCode
from rollwright.harnesses.pi import Pi
from rollwright.harnesses.qwen_code import QwenCode
from support.model_server import Reply


@dataclass(frozen=True, kw_only=True)
class Cli:
    """One harness and what a scripted policy must know of its CLI."""

    harness: Harness
    shell: str
    """The tool that runs a command."""
    command: str = "command"
    """Its argument."""
    more: dict[str, Any] = field(default_factory=dict)
    """Its other arguments that must be there."""
    submit: str = ""
    """The command that ends the run, where a turn without a call does not."""
    on_error: int = 1
    """Exit code after an API error."""
    asks: int = 1
    """How often it asks before it gives up on an API error that no repetition helps."""
    full: int = 1
    """How often it asks once the context is full."""
    cut: str = "length"
    """What it reports of a reply that was cut."""
    prompt_bytes: int = 200 << 10
    """As long a prompt as the CLI passes on when every byte is a token."""

    def call(self, command: str) -> tuple[str, dict[str, Any]]:
        return self.shell, {self.command: command, **self.more}

    def markup(self, command: str) -> str:
        """The call in the tiny policy's own words."""
        values = {self.command: command, **self.more}
        parameters = "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
        return f"<tool_call>\n<function={self.shell}>\n{parameters}\n</function>\n</tool_call>"

    def done(self) -> Reply:
        return Reply(text="Done.", calls=(self.call(self.submit),) if self.submit else ())

    def done_markup(self) -> str:
        return "Done." + (f"\n{self.markup(self.submit)}" if self.submit else "")


PI = Cli(harness=Pi(), shell="bash", on_error=0)
PI_ANTHROPIC = Cli(harness=Pi(api="anthropic"), shell="bash", on_error=0)
CLAUDE = Cli(harness=ClaudeCode(), shell="Bash")
CLAUDE_BARE = Cli(harness=ClaudeCode(bare=True), shell="Bash")
CODEX = Cli(harness=Codex(), shell="exec_command", command="cmd")
OPENCODE = Cli(harness=OpenCode(), shell="bash", more={"description": "a command"})
_QWEN: dict[str, Any] = {"shell": "run_shell_command", "more": {"is_background": False}, "full": 3, "cut": "completed"}
QWEN = Cli(harness=QwenCode(), prompt_bytes=50 << 10, **_QWEN)
QWEN_CHAT = Cli(harness=QwenCode(api="openai_chat"), prompt_bytes=50 << 10, **_QWEN)
MINI = Cli(
    harness=MiniSweAgent(python="/usr/bin/python3"),
    shell="bash",
    submit="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    asks=3,
    cut="format_errors",
)

EACH_CLI = [
    pytest.param(PI, id="pi", marks=pytest.mark.pi),
    pytest.param(CLAUDE, id="claude-code", marks=pytest.mark.claude_code),
    pytest.param(CODEX, id="codex", marks=pytest.mark.codex),
    pytest.param(OPENCODE, id="opencode", marks=pytest.mark.opencode),
    pytest.param(QWEN, id="qwen-code", marks=pytest.mark.qwen_code),
    pytest.param(MINI, id="mini-swe-agent", marks=pytest.mark.mini_swe_agent),
]
EVERY_WAY = [
    *EACH_CLI,
    pytest.param(PI_ANTHROPIC, id="pi-anthropic", marks=pytest.mark.pi),
    pytest.param(CLAUDE_BARE, id="claude-code-bare", marks=pytest.mark.claude_code),
    pytest.param(QWEN_CHAT, id="qwen-code-chat", marks=pytest.mark.qwen_code),
]
"""Also over its other wire or in its other mode."""
