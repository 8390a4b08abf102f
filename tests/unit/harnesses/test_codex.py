"""Codex: its configuration and its own catalog of models."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from rollwright.harnesses import AgentReport, Launch
from rollwright.harnesses.codex import Codex
from support.job_results import ENDPOINT, ended


def launch(**options: Any) -> Launch:
    return Codex(**options).launch(bundle="/b", home="/home/agent", workdir="/repo", prompt="Fix.", endpoint=ENDPOINT)


def config(**options: Any) -> dict[str, Any]:
    return tomllib.loads(launch(**options).files["/home/agent/.codex/config.toml"].decode())


def model(**options: Any) -> dict[str, Any]:
    (entry,) = json.loads(launch(**options).files["/home/agent/.codex/models.json"])["models"]
    return entry


def test_it_talks_responses_to_the_gateway_and_to_nobody_else() -> None:
    settings = config()
    assert settings["model_providers"]["rollwright"]["wire_api"] == "responses"
    assert settings["model_providers"]["rollwright"]["base_url"] == "http://127.0.0.1:18001/v1"
    assert settings["model_catalog_json"] == "/home/agent/.codex/models.json"
    assert not settings["analytics"]["enabled"]
    assert not settings["check_for_update_on_startup"]
    assert not settings["features"]["unbounded_connection_retries"]
    assert launch().env["CODEX_HOME"] == "/home/agent/.codex"


def test_it_has_full_access_and_reads_the_prompt_from_stdin() -> None:
    argv = launch(extra_args=("--strict-config",)).argv
    assert "--dangerously-bypass-approvals-and-sandbox" in argv
    assert argv[-2:] == ("--strict-config", "-")


def test_the_policy_gets_its_own_entry_in_the_catalog() -> None:
    entry = model(system_prompt="Be brief.")
    assert (entry["slug"], entry["base_instructions"]) == ("m", "Be brief.")
    assert entry["apply_patch_tool_type"] == "freeform"
    assert model(apply_patch=False)["apply_patch_tool_type"] is None


def test_it_is_told_the_real_window_only_when_it_may_compact() -> None:
    settings = config(compaction=True)
    assert (settings["model_context_window"], settings["model_auto_compact_token_limit"]) == (8192, 8192 - 512)
    assert config()["model_auto_compact_token_limit"] > 10**8


@pytest.mark.parametrize(
    ("options", "table", "key", "value"),
    [
        ({}, "agents", "enabled", False),
        ({"subagents": True}, "agents", "enabled", True),
        ({}, "skills", "include_instructions", False),
        ({"skills": True}, "skills", "include_instructions", True),
    ],
)
def test_options_become_settings(options: dict[str, Any], table: str, key: str, value: bool) -> None:
    assert config(**options)[table][key] is value


def test_context_files_can_be_left_out() -> None:
    assert "project_doc_max_bytes" not in config()
    assert config(context_files=False)["project_doc_max_bytes"] == 0


def test_a_model_of_any_name_is_written_right() -> None:
    harness = Codex()
    endpoint = type(ENDPOINT)(
        base_url=ENDPOINT.base_url, api_key="k", model='a"b\\c\x7f\u00fc\n', context_window=1, max_output_tokens=1
    )
    started = harness.launch(bundle="/b", home="/h", workdir="/repo", prompt="", endpoint=endpoint)
    assert tomllib.loads(started.files["/h/.codex/config.toml"].decode())["model"] == endpoint.model


def test_a_retry_that_is_not_the_end_is_not_taken_for_it() -> None:
    out = b'{"type":"error","message":"Reconnecting... 1/5"}\n{"type":"turn.completed","usage":{}}\n'
    assert Codex().report(ended(out)) == AgentReport(ok=True, reason="completed")
