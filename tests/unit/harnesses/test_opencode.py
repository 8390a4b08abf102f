"""OpenCode: its configuration, and which of its events is the end."""

from __future__ import annotations

import json
from typing import Any

from rollwright.harnesses import AgentReport, Launch
from rollwright.harnesses.opencode import OpenCode
from support.job_results import ENDPOINT, ended

FOLDER = "/home/agent/.config/opencode"


def launch(**options: Any) -> Launch:
    harness = OpenCode(**options)
    return harness.launch(bundle="/b", home="/home/agent", workdir="/repo", prompt="Fix.", endpoint=ENDPOINT)


def config(**options: Any) -> dict[str, Any]:
    return json.loads(launch(**options).files[f"{FOLDER}/opencode.json"])


def test_it_asks_for_no_title_and_for_no_permission() -> None:
    argv = launch(extra_args=("--thinking",)).argv
    assert argv[1:3] == ("run", "--format")
    assert {"--title", "--auto", "--pure"} <= set(argv)
    assert argv[-1] == "--thinking"


def test_it_waits_for_the_engine_as_long_as_it_takes() -> None:
    options = config()["provider"]["rollwright"]["options"]
    assert (options["headerTimeout"], options["timeout"]) == (False, False)
    assert options["baseURL"] == "http://127.0.0.1:18001/v1"
    assert options["apiKey"] == "{env:ROLLWRIGHT_API_KEY}"


def test_the_model_has_a_name_that_nothing_can_break() -> None:
    settings = config()
    assert settings["model"] == "rollwright/policy"
    assert settings["provider"]["rollwright"]["models"]["policy"]["id"] == "m"


def test_it_is_told_the_real_window_only_when_it_may_compact() -> None:
    def told(compaction: bool) -> tuple[int, bool]:
        settings = config(compaction=compaction)
        limit = settings["provider"]["rollwright"]["models"]["policy"]["limit"]
        assert limit["output"] == 512
        return limit["context"], settings["compaction"]["auto"]

    assert told(True) == (8192, True)
    window, auto = told(False)
    assert window > 10**8
    assert not auto


def test_tools_and_system_prompt_replace_its_own() -> None:
    settings = config(system_prompt="Be brief.", tools=("bash", "edit"))
    assert settings["tools"] == {"*": False, "bash": True, "edit": True}
    assert settings["agent"]["build"]["prompt"] == f"{{file:{FOLDER}/system-prompt.md}}"
    assert launch(system_prompt="Be brief.").files[f"{FOLDER}/system-prompt.md"] == b"Be brief."
    assert (config()["tools"], config(skills=True)["tools"]) == ({"skill": False}, {})


def test_the_repositorys_own_settings_can_be_left_out() -> None:
    assert "OPENCODE_DISABLE_PROJECT_CONFIG" not in launch().env
    assert launch(context_files=False).env["OPENCODE_DISABLE_PROJECT_CONFIG"] == "1"


def test_a_run_that_stopped_after_a_tool_did_not_complete() -> None:
    out = b'{"type":"step_finish","part":{"reason":"tool-calls"}}\n'
    assert OpenCode().report(ended(out)) == AgentReport(ok=False, reason="stopped: tool-calls")
