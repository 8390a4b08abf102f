"""The real CLIs, unmodified, against a scripted model: their manners and what they make of faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollwright.harnesses import AgentReport
from rollwright.harnesses.claude_code import ClaudeCode
from rollwright.harnesses.codex import Codex
from rollwright.harnesses.mini_swe_agent import MiniSweAgent
from rollwright.harnesses.opencode import OpenCode
from rollwright.harnesses.pi import Pi
from rollwright.harnesses.qwen_code import QwenCode
from support.cli_runner import run
from support.clis import CLAUDE, EACH_CLI, EVERY_WAY, PI, Cli
from support.model_server import Reply, serve

# looks like a command of the CLI's own, and is larger than an argument may be
PROMPT_200_KIB = "/compact is broken, fix it. " + "x" * (200 << 10) + " THE END"

FULL = "This model's maximum context length is 32768 tokens: prompt is too long: 40000 tokens > 32768 maximum"

each_cli = pytest.mark.parametrize("cli", EACH_CLI)


@pytest.mark.parametrize("cli", EVERY_WAY)
def test_a_session_sends_everything_back_as_it_came_and_leaves_only_its_work(cli: Cli, tmp_path: Path) -> None:
    """A prompt of 200 KiB, thoughts, parallel calls, a command that fails."""
    script = (
        Reply(
            thinking="First.",
            text="I look.",
            calls=(cli.call("echo marker-$((6*7)) | tee out.txt"), cli.call("echo two")),
        ),
        Reply(text="Again.", calls=(cli.call("echo three; exit 3"),)),
        cli.done(),
    )
    with serve(*script) as model:
        result = run(cli.harness, tmp_path, PROMPT_200_KIB, model.base_url)
    assert cli.harness.report(result) == AgentReport(ok=True, reason="completed"), result.stderr.text()
    assert len(model.requests) == 3
    assert PROMPT_200_KIB in json.dumps(model.requests[0])
    said = [_as_it_means(request.get("messages") or request["input"]) for request in model.requests]
    assert said[1][: len(said[0])] == said[0]
    assert said[2][: len(said[1])] == said[1]
    assert "marker-42" in json.dumps(said[1])
    assert "First." in json.dumps(said[1])
    assert (tmp_path / "workdir/out.txt").read_text() == "marker-42\n"
    assert sorted(path.name for path in (tmp_path / "workdir").iterdir()) == ["a.py", "out.txt"]


@each_cli
def test_an_api_error_is_reported_whatever_the_exit_code(cli: Cli, tmp_path: Path) -> None:
    with serve(Reply(status=400, text="session closed")) as model:
        result = run(cli.harness, tmp_path, "Fix a.py.", model.base_url)
    report = cli.harness.report(result)
    assert not report.ok
    assert report.reason.startswith("api_error: ")
    assert "session closed" in report.reason
    assert result.exit_code == cli.on_error
    assert len(model.requests) == cli.asks


@each_cli
def test_a_full_context_is_the_policys_end(cli: Cli, tmp_path: Path) -> None:
    too_long = Reply(status=400, text=FULL)
    with serve(Reply(calls=(cli.call("true"),)), too_long) as model:
        result = run(cli.harness, tmp_path, "Fix a.py.", model.base_url)
    assert cli.harness.report(result) == AgentReport(ok=True, reason="prompt_too_long")
    assert len(model.requests) == 1 + cli.full


@each_cli
def test_a_cut_reply_is_the_policys_end(cli: Cli, tmp_path: Path) -> None:
    with serve(Reply(text="and then", cut=True)) as model:
        result = run(cli.harness, tmp_path, "Fix a.py.", model.base_url)
    assert cli.harness.report(result) == AgentReport(ok=True, reason=cli.cut)


@pytest.mark.parametrize(
    ("harness", "cli"),
    [
        pytest.param(Pi(compaction=True), PI, id="pi", marks=pytest.mark.pi),
        pytest.param(ClaudeCode(compaction=True), CLAUDE, id="claude-code", marks=pytest.mark.claude_code),
    ],
)
def test_with_compaction_a_full_context_is_summarized_and_the_work_goes_on(
    harness: Pi | ClaudeCode, cli: Cli, tmp_path: Path
) -> None:
    long_output = Reply(calls=(cli.call("seq 100000000 100002000"),))
    too_long = Reply(status=400, text=FULL)
    script = (*[long_output] * 3, too_long, Reply(text="<summary>We looked.</summary>"), Reply(text="Done."))
    with serve(*script) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    assert harness.report(result) == AgentReport(ok=True, reason="completed")
    assert len(model.requests) == 6
    assert "We looked." in json.dumps(model.requests[5])
    assert len(json.dumps(model.requests[5])) < len(json.dumps(model.requests[3]))


@pytest.mark.pi
def test_pi_sends_a_small_request_when_told_to(tmp_path: Path) -> None:
    harness = Pi(system_prompt="You fix bugs.", tools=("bash", "edit"), context_files=False)
    with serve(Reply(text="Done.")) as model:
        run(harness, tmp_path, "Fix a.py.", model.base_url)
    request = model.requests[0]
    cwd = f"<cwd>\n{tmp_path}/workdir\n</cwd>"
    assert request["messages"][0] == {"role": "system", "content": f"You fix bugs.\n\n{cwd}"}
    assert [tool["function"]["name"] for tool in request["tools"]] == ["bash", "edit"]
    assert len(json.dumps(request)) < 2600
    assert request["max_completion_tokens"] == 512
    assert model.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.pi
def test_pi_finds_a_model_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    with serve(Reply(text="Done.")) as model:
        run(Pi(), tmp_path, "Fix a.py.", model.base_url, model="Org/Model-4B:high*")
    assert model.requests[0]["model"] == "Org/Model-4B:high*"


@pytest.mark.claude_code
def test_claude_code_says_who_asks_and_with_which_limits(tmp_path: Path) -> None:
    harness = ClaudeCode(system_prompt="You fix bugs.", tools=("Bash", "Edit"), bare=True)
    with serve(Reply(text="Done.")) as model:
        run(harness, tmp_path, "Fix a.py.", model.base_url)
    request, headers = model.requests[0], model.headers[0]
    assert request["system"][-1]["text"] == "You fix bugs."
    assert [tool["name"] for tool in request["tools"]] == ["Bash", "Edit"]
    assert request["max_tokens"] == 512
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-claude-code-request-class"] == "main"
    assert "Co-Authored-By" not in json.dumps(request)


@pytest.mark.claude_code
def test_claude_code_stops_at_its_turn_limit(tmp_path: Path) -> None:
    harness = ClaudeCode(max_turns=2, bare=True)
    with serve(Reply(calls=(CLAUDE.call("true"),))) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    report = harness.report(result)
    assert (report.ok, report.reason, result.exit_code) == (True, "max_turns", 1)
    assert len(model.requests) == 2


@pytest.mark.codex
def test_codex_patches_files_with_its_own_tool(tmp_path: Path) -> None:
    patch = "*** Begin Patch\n*** Update File: a.py\n@@\n def f():\n-    return 1\n+    return 2\n*** End Patch\n"
    with serve(Reply(calls=(("apply_patch", {"patch": patch}),)), Reply(text="Done.")) as model:
        result = run(Codex(extra_args=("--strict-config",)), tmp_path, "Fix a.py.", model.base_url, model="Org/M:x*")
    assert Codex().report(result).ok, result.stderr.text()
    assert (tmp_path / "workdir/a.py").read_text() == "def f():\n    return 2\n"
    request, headers = model.requests[0], model.headers[0]
    assert request["model"] == "Org/M:x*"
    assert [tool["name"] for tool in request["tools"] if tool["type"] != "function"] == ["apply_patch"]
    assert "danger-full-access" in json.dumps(request["input"])
    assert "skills_instructions" not in json.dumps(request["input"])
    assert len(json.dumps(request)) < 9000
    assert headers["authorization"] == "Bearer secret"


@pytest.mark.opencode
def test_opencode_sends_a_small_request_when_told_to(tmp_path: Path) -> None:
    with serve(Reply(text="Done.")) as model:
        run(
            OpenCode(system_prompt="You fix bugs.", tools=("bash",)), tmp_path, "Fix.", model.base_url, model="Org/M:x*"
        )
    (request,) = model.requests
    assert request["model"] == "Org/M:x*"
    assert request["messages"][0]["content"].startswith("You fix bugs.\n")
    assert [tool["function"]["name"] for tool in request["tools"]] == ["bash"]
    assert model.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.qwen_code
def test_qwen_code_sends_a_small_request_when_told_to(tmp_path: Path) -> None:
    harness = QwenCode(system_prompt="You fix bugs.", tools=("run_shell_command", "edit"))
    with serve(Reply(text="Done.")) as model:
        run(harness, tmp_path, "Fix a.py.", model.base_url, model="Org/M:x*")
    (request,) = model.requests
    assert request["model"] == "Org/M:x*"
    assert [block["text"] for block in request["system"]] == ["You fix bugs."]
    assert sorted(tool["name"] for tool in request["tools"]) == ["edit", "run_shell_command"]
    assert request["max_tokens"] == 512


@pytest.mark.qwen_code
def test_qwen_code_stops_at_its_turn_limit(tmp_path: Path) -> None:
    harness = QwenCode(max_turns=2)
    with serve(Reply(calls=(("run_shell_command", {"command": "true", "is_background": False}),))) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    assert harness.report(result) == AgentReport(ok=True, reason="max_turns")
    assert len(model.requests) == 2


@pytest.mark.mini_swe_agent
def test_mini_swe_agent_stops_at_its_turn_limit_and_renders_no_prompt_as_template(tmp_path: Path) -> None:
    harness = MiniSweAgent(
        python="/usr/bin/python3",
        system_prompt="You fix bugs.",
        instance_template="Do: {{task}}",
        max_turns=2,
    )
    with serve(Reply(calls=(("bash", {"command": "true"}),))) as model:
        result = run(harness, tmp_path, "{{ 7 * 7 }} {% if", model.base_url)
    assert harness.report(result) == AgentReport(ok=True, reason="max_turns")
    assert [message["content"] for message in model.requests[0]["messages"]] == [
        "You fix bugs.",
        "Do: {{ 7 * 7 }} {% if",
    ]
    assert len(model.requests) == 2


def _as_it_means(value: Any) -> Any:
    """Messages as they mean: no cache marks, and a lone text block is its text."""
    if isinstance(value, dict):
        plain = {key: _as_it_means(item) for key, item in value.items() if key != "cache_control"}
        if isinstance(plain.get("content"), str) and "role" in plain:
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        return plain
    if isinstance(value, list):
        return [_as_it_means(item) for item in value]
    return value
