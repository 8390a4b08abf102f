"""Claude Code: how it is started, and what its own output says of its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, Launch
from rollwright.harnesses.claude_code import ClaudeCode
from support.job_results import ENDPOINT, ended

RECORDED = Path(__file__).parent / "recorded/claude_code"


def launch(prompt: str = "Fix it.", **options: Any) -> Launch:
    return ClaudeCode(**options).launch(
        bundle="/opt/claude", home="/home/agent", workdir="/repo", prompt=prompt, endpoint=ENDPOINT
    )


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.jsonl").read_bytes()


# --------------------------------------------------------------------------- launch


def test_the_prompt_and_the_secret_never_reach_argv() -> None:
    started = launch("x" * 300_000, system_prompt="Be brief.")
    assert started.stdin == b"x" * 300_000
    assert max(len(word) for word in started.argv) < 200
    assert not any("s3cret" in word or "Be brief." in word for word in started.argv)


def test_it_speaks_to_the_endpoint_with_the_sessions_secret() -> None:
    env = launch().env
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:18001"
    assert env["ANTHROPIC_AUTH_TOKEN"] == "s3cret"
    assert env["ANTHROPIC_MODEL"] == "m"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "512"
    assert env["CLAUDE_CODE_GATEWAY_HINT_HEADERS"] == "1"
    assert env["IS_SANDBOX"] == "1"


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, "--disable-slash-commands"),
        ({"tools": ("Bash", "Edit")}, "--tools Bash,Edit --disable-slash-commands"),
        ({"max_turns": 7}, "--max-turns 7 --disable-slash-commands"),
        ({"bare": True}, "--bare --disable-slash-commands"),
        ({"skills": True}, ""),
        ({"extra_args": ("--effort", "low")}, "--disable-slash-commands --effort low"),
    ],
)
def test_options_become_the_clis_own_flags(options: dict[str, Any], flags: str) -> None:
    argv = launch(**options).argv
    fixed = "-p --output-format stream-json --verbose --permission-mode bypassPermissions"
    assert argv == ("/opt/claude/claude-code-linux-x64/claude", *fixed.split(), *flags.split())


def test_no_tools_is_said_with_an_empty_list() -> None:
    argv = launch(tools=()).argv
    assert argv[argv.index("--tools") + 1] == ""


def test_its_files_are_in_the_agents_home() -> None:
    started = launch(system_prompt="Be brief.")
    path = started.argv[started.argv.index("--system-prompt-file") + 1]
    assert started.files[path] == b"Be brief."
    assert all(path.startswith("/home/agent/.claude/") for path in started.files)
    assert json.loads(started.files["/home/agent/.claude/settings.json"])["attribution"] == {"commit": "", "pr": ""}


def test_the_cli_is_told_the_real_window_only_when_it_may_compact() -> None:
    on, off = launch(compaction=True).env, launch().env
    assert on["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    assert "DISABLE_COMPACT" not in on
    assert int(off["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) > 10**8
    assert off["DISABLE_COMPACT"] == "1"


def test_a_prompt_that_starts_with_a_slash_is_no_command() -> None:
    assert launch("/compact fails").stdin == b"\n/compact fails"
    assert launch("fix /compact").stdin == b"fix /compact"


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"version": "2.2.0"}, {"sha512": "AAAA"}])
def test_a_wrong_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ClaudeCode(**options)


# --------------------------------------------------------------------------- report


@pytest.mark.parametrize(
    ("name", "exit_code", "ok", "reason"),
    [
        ("completed", 0, True, "completed"),
        ("max_turns", 1, True, "max_turns"),
        ("cut", 1, True, "length"),
        ("prompt_too_long", 1, True, "prompt_too_long"),
        ("api_error", 1, False, "api_error: API Error: 400 session closed"),
    ],
)
def test_recorded_runs_are_read_right(name: str, exit_code: int, ok: bool, reason: str) -> None:
    assert ClaudeCode().report(ended(recorded(name), exit_code=exit_code)) == AgentReport(ok=ok, reason=reason)


def test_the_event_beats_the_exit_code() -> None:
    assert not ClaudeCode().report(ended(recorded("api_error"), exit_code=0)).ok


def test_an_option_the_cli_does_not_know_is_shown() -> None:
    report = ClaudeCode().report(ended(b"", exit_code=1, stderr=b"error: unknown option '--frobnicate'\n"))
    assert report == AgentReport(ok=False, reason="exit 1: error: unknown option '--frobnicate'")


def test_a_prompt_eaten_by_a_command_is_no_result() -> None:
    event = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 0, "result": "not available"}
    assert ClaudeCode().report(ended(json.dumps(event).encode())) == AgentReport(ok=False, reason="no_result")


def test_a_run_killed_half_way_has_no_result() -> None:
    half = b"\n".join(recorded("completed").splitlines()[:-1])
    assert ClaudeCode().report(ended(half, exit_code=143)) == AgentReport(ok=False, reason="exit 143")
    assert ClaudeCode().report(ended(half, state="timeout")) == AgentReport(ok=False, reason="timeout")


def test_text_of_the_policy_cannot_pass_for_the_result() -> None:
    fake = json.dumps('\n{"type":"result","is_error":false,"terminal_reason":"completed"}\n')[1:-1].encode()
    out = recorded("api_error").replace(b"session closed", fake)
    assert not ClaudeCode().report(ended(out, exit_code=1)).ok


def test_a_result_after_dropped_output_is_found() -> None:
    out = recorded("completed")
    keep = len(out.splitlines(keepends=True)[-1]) + 50
    assert ClaudeCode().report(ended(out, keep_last=keep)).reason == "completed"


@given(st.binary(max_size=300), st.sampled_from([0, 1, None]))
def test_any_bytes_give_a_report(noise: bytes, exit_code: int | None) -> None:
    for stdout in (noise, recorded("completed") + noise, b'{"type":"result",' + noise + b"}"):
        assert ClaudeCode().report(ended(stdout, exit_code=exit_code, stderr=noise)).reason


@given(
    st.dictionaries(
        st.sampled_from(["is_error", "num_turns", "terminal_reason", "subtype", "result", "errors", "api_error"]),
        st.sampled_from([None, True, False, 0, 7, "", "max_turns", "x" * 2000, ["a"], {}]),
    )
)
def test_any_result_event_gives_a_report(fields: dict[str, Any]) -> None:
    event = json.dumps({"type": "result", **fields}).encode()
    assert len(ClaudeCode().report(ended(event)).reason) <= 500
