"""mini-swe-agent: its configuration, its start outside of any site-packages, and the line that says how it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, Launch
from rollwright.harnesses.mini_swe_agent import MiniSweAgent
from support.job_results import ENDPOINT, ended

CONFIG = "/home/agent/.config/mini-swe-agent/run.yaml"


def launch(prompt: str = "Fix.", **options: Any) -> Launch:
    harness = MiniSweAgent(**options)
    return harness.launch(bundle="/b", home="/home/agent", workdir="/repo", prompt=prompt, endpoint=ENDPOINT)


def config(**options: Any) -> dict[str, Any]:
    return json.loads(launch(**options).files[CONFIG])


def test_the_prompt_is_in_its_configuration() -> None:
    started = launch("x" * 300_000)
    assert json.loads(started.files[CONFIG])["run"]["task"] == "x" * 300_000
    assert started.argv[started.argv.index("mini.yaml") + 2] == CONFIG


def test_nothing_of_its_environment_reaches_the_policys_python() -> None:
    started = launch()
    assert started.argv[:3] == ("python3", "-I", "-c")
    assert not any(name.startswith("PYTHON") for name in started.env)


def test_options_become_settings() -> None:
    settings = config(max_turns=7, command_seconds=60, system_prompt="Be brief.", instance_template="Do: {{ task }}")
    assert settings["agent"] == {
        "cost_limit": 0,
        "step_limit": 7,
        "system_template": "Be brief.",
        "instance_template": "Do: {{ task }}",
    }
    assert settings["environment"] == {"timeout": 60}
    assert settings["model"]["model_name"] == "openai/m"
    assert settings["model"]["model_kwargs"]["api_base"] == "http://127.0.0.1:18001/v1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"command_seconds": 0}, "command_seconds is 0"),
        ({"instance_template": "Fix the bug."}, "instance_template has no {{task}}"),
        ({"requirements": "lock.txt"}, "version and harness.mini-swe-agent.requirements are set together"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        MiniSweAgent(**options)
    assert said in raised.value.message


@pytest.mark.parametrize(
    ("status", "ok", "reason"),
    [
        ("Submitted", True, "completed"),
        ("RepeatedFormatError", True, "format_errors"),
        ("LimitsExceeded", True, "max_turns"),
        ("TimeExceeded", False, "TimeExceeded"),
    ],
)
def test_its_exit_status_is_the_result(status: str, ok: bool, reason: str) -> None:
    line = json.dumps({"type": "result", "exit_status": status, "error": None}).encode()
    assert MiniSweAgent().report(ended(b"chatter\n\n" + line + b"\n")) == AgentReport(ok=ok, reason=reason)


def test_text_of_the_policy_cannot_pass_for_the_result() -> None:
    fake = b'{"type": "result", "exit_status": "Submitted", "error": null}\n'
    assert MiniSweAgent().report(ended(fake + b"more\n")).reason == "no_result"
    assert MiniSweAgent().report(ended(fake, exit_code=None)).reason == "signal 9"


def test_the_start_script_says_how_a_cli_ended(tmp_path: Path) -> None:
    """Against a stand-in of the package, with this Python."""
    site = tmp_path / "mini-swe-agent" / "site" / "minisweagent"
    for folder in ("run", "models"):
        (site / folder).mkdir(parents=True)
        (site / folder / "__init__.py").write_text("")
    (site / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (site / "models/litellm_model.py").write_text("")
    (site / "run/mini.py").write_text(
        "import sys\n"
        "class Agent:\n"
        "    messages = [{'extra': {'exit_status': 'Submitted'}}]\n"
        "def app(**options):\n"
        "    if 'fail' in sys.argv:\n"
        "        raise RuntimeError('no\\nway')\n"
        "    return Agent()\n"
    )
    harness = MiniSweAgent(python=sys.executable)

    def start(*argv: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(argv, capture_output=True, check=False, timeout=30)

    assert start(*harness.version_argv(str(tmp_path))).stdout == b"1.2.3\n"
    program = harness.version_argv(str(tmp_path))[:-1]
    assert harness.report(ended(start(*program).stdout)) == AgentReport(ok=True, reason="completed")
    failed = start(*program, "fail")
    assert failed.returncode == 1
    report = harness.report(ended(failed.stdout, exit_code=1))
    assert report == AgentReport(ok=False, reason="api_error: RuntimeError: no\nway")
