"""What holds for every harness: where things go, and a report from any bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, Artifact, Harness, Wheels
from rollwright.harnesses.bundle import locate
from rollwright.harnesses.claude_code import ClaudeCode
from rollwright.harnesses.codex import Codex
from rollwright.harnesses.mini_swe_agent import MiniSweAgent
from rollwright.harnesses.opencode import OpenCode
from rollwright.harnesses.pi import Pi
from rollwright.harnesses.qwen_code import QwenCode
from rollwright.sandboxes import JobState
from support.job_results import ENDPOINT, ended

RECORDED = Path(__file__).parent / "recorded"
HARNESSES: list[Harness] = [Pi(), ClaudeCode(), Codex(), OpenCode(), QwenCode(), MiniSweAgent()]

every_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)


def recorded(harness: Harness, name: str) -> bytes:
    (file,) = (RECORDED / harness.name.replace("-", "_")).glob(f"{name}.*")
    return file.read_bytes()


@every_harness
def test_the_prompt_and_the_secret_never_reach_argv(harness: Harness) -> None:
    prompt = "x" * 300_000 + " \ud800 end"
    started = harness.launch(bundle="/b", home="/home/agent", workdir="/repo", prompt=prompt, endpoint=ENDPOINT)
    assert max(len(word) for word in started.argv) < 2000
    assert not any("s3cret" in word for word in started.argv)
    assert b"x" * 300_000 in started.stdin + b"".join(started.files.values())
    assert "s3cret" in started.env.values()


@every_harness
def test_all_its_files_are_in_the_agents_home(harness: Harness) -> None:
    started = harness.launch(bundle="/b", home="/home/agent", workdir="/repo", prompt="Fix.", endpoint=ENDPOINT)
    assert started.env["HOME"] == "/home/agent"
    assert all(path.startswith("/home/agent/.") for path in started.files)
    assert not any("/repo" in word for word in (*started.argv, *started.env.values()))


@every_harness
def test_its_pins_are_exact(harness: Harness, tmp_path: Path) -> None:
    for artifact in harness.artifacts:
        assert artifact.version[0].isdigit()
        if isinstance(artifact, Artifact):
            assert len(artifact.sha512) == 88
        else:
            assert f"{artifact.package}=={artifact.version} \\" in artifact.requirements.read_text()
    folders = [artifact.folder for artifact in harness.artifacts]
    assert len(set(folders)) == len(folders)
    assert locate(harness, tmp_path).path.name.startswith(f"{harness.name}-{harness.artifacts[0].version}-")


@every_harness
def test_another_version_needs_its_checksum(harness: Harness) -> None:
    with pytest.raises(ConfigError, match=rf"harness\.{harness.name}\.version"):
        type(harness)(version="9.9.9")  # type: ignore[call-arg]


@pytest.mark.parametrize("harness", [Codex(), OpenCode(), QwenCode(), MiniSweAgent(), Pi()], ids=lambda h: h.name)
def test_an_empty_system_prompt_is_refused(harness: Harness) -> None:
    with pytest.raises(ConfigError, match=rf"harness\.{harness.name}\.system_prompt is empty"):
        type(harness)(system_prompt="")  # type: ignore[call-arg]


@every_harness
def test_recorded_runs_that_worked_are_read_right(harness: Harness) -> None:
    assert harness.report(ended(recorded(harness, "completed"))) == AgentReport(ok=True, reason="completed")


@pytest.mark.parametrize("harness", [Codex(), OpenCode(), QwenCode(), MiniSweAgent(), Pi()], ids=lambda h: h.name)
def test_recorded_faults_are_read_right(harness: Harness) -> None:
    full = harness.report(ended(recorded(harness, "prompt_too_long"), exit_code=1))
    assert full == AgentReport(ok=True, reason="prompt_too_long")
    closed = harness.report(ended(recorded(harness, "api_error"), exit_code=1))
    assert not closed.ok
    assert closed.reason.startswith("api_error: ")
    assert "session closed" in closed.reason


@pytest.mark.parametrize(
    ("harness", "reason"),
    [(Codex(), "length"), (OpenCode(), "length"), (QwenCode(), "completed"), (MiniSweAgent(), "format_errors")],
    ids=lambda value: getattr(value, "name", value),
)
def test_recorded_cut_replies_are_the_policys_end(harness: Harness, reason: str) -> None:
    assert harness.report(ended(recorded(harness, "cut"))) == AgentReport(ok=True, reason=reason)


@every_harness
def test_a_run_killed_half_way_has_no_result(harness: Harness) -> None:
    out = recorded(harness, "completed")
    half = b"".join(out.splitlines(keepends=True)[:3])
    assert not harness.report(ended(half)).ok
    assert harness.report(ended(half, exit_code=None)) == AgentReport(ok=False, reason="signal 9")
    assert not harness.report(ended(half, exit_code=143)).ok


@every_harness
@pytest.mark.parametrize("state", ["timeout", "cancelled", "oom", "output_limit", "lost"])
def test_a_job_that_did_not_end_by_itself_reports_why(harness: Harness, state: JobState) -> None:
    report = harness.report(ended(recorded(harness, "completed"), state=state, exit_code=None))
    assert report == AgentReport(ok=False, reason=state)


@every_harness
@given(st.binary(max_size=200), st.integers(0, 300), st.sampled_from([0, 1, 53, None]))
def test_any_bytes_give_a_report(harness: Harness, noise: bytes, at: int, exit_code: int | None) -> None:
    out = recorded(harness, "api_error")[-at:] if at else b""
    for stdout in (noise, out + noise, noise + out):
        assert harness.report(ended(stdout, exit_code=exit_code, stderr=noise)).reason


@every_harness
@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"result","is_error":true,"error":[1]}',
        b'{"type":"turn.failed","error":null}',
        b'{"type":"error","error":{"data":[]}}',
        b'{"type":"step_finish","part":{"reason":{}}}',
        b'{"type":"result","exit_status":{"a":1},"error":null}',
        b"[" * 100_000,
    ],
)
def test_odd_events_are_no_success(harness: Harness, line: bytes) -> None:
    assert not harness.report(ended(line + b"\n", exit_code=1)).ok


def test_wheels_are_pinned_by_the_content_of_their_requirements(tmp_path: Path) -> None:
    class Toy(MiniSweAgent):
        pass

    file = tmp_path / "requirements.txt"
    file.write_text("mini-swe-agent==3.0.0 --hash=sha256:00\n")
    toy = Toy(version="3.0.0", requirements=str(file))
    assert isinstance(toy.artifacts[0], Wheels)
    before = locate(toy, tmp_path).digest
    file.write_text("mini-swe-agent==3.0.0 --hash=sha256:11\n")
    assert locate(toy, tmp_path).digest != before
    file.unlink()
    with pytest.raises(ConfigError, match=r"requirements\.txt cannot be read"):
        locate(toy, tmp_path)
