"""Recorded requests of the real CLIs: read, told apart and grown as they were, also where no CLI can be run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rollwright.dialects import Dialect
from rollwright.dialects.anthropic import Anthropic
from rollwright.dialects.jsonio import dumps
from rollwright.dialects.openai_chat import OpenAIChat
from rollwright.dialects.openai_responses import OpenAIResponses
from rollwright.gateway.turn import Asked, read_request
from support.golden import Transcript, transcripts

DIALECTS: dict[str, Dialect] = {
    "anthropic": Anthropic(),
    "openai_chat": OpenAIChat(),
    "openai_responses": OpenAIResponses(),
}
MAIN = ["main"] * 3
COMPACTED = [*["main"] * 4, "compaction", "main"]
CLASSES = {
    **dict.fromkeys(("claude-code", "codex", "opencode", "pi", "pi-anthropic"), MAIN),
    **dict.fromkeys(("mini-swe-agent", "qwen-code", "qwen-code-chat"), MAIN),
    **dict.fromkeys(("claude-code-compaction", "opencode-compaction", "pi-compaction"), COMPACTED),
    "qwen-code-compaction": COMPACTED[:5],  # the summary was not in its words, so it gave up
    "claude-code-subagent": ["main", "subagent", "main"],
    "opencode-subagent": ["main", "subagent", "main"],
    "qwen-code-subagent": ["main", "main", "subagent", "main"],
}
recorded = pytest.mark.parametrize("transcript", [*transcripts()], ids=lambda transcript: transcript.name)


def asked_in(transcript: Transcript, *, headers: bool = True) -> list[Asked]:
    dialect = DIALECTS[transcript.dialect]
    return [
        read_request(dialect, dumps(request["body"]), request["headers"] if headers else {})
        for request in transcript.requests
    ]


def test_every_transcript_is_known() -> None:
    assert {transcript.name for transcript in transcripts()} == set(CLASSES)


@recorded
def test_each_request_is_of_its_class_and_all_are_of_one_program(transcript: Transcript) -> None:
    asked = asked_in(transcript)
    if transcript.name.startswith("qwen-code-subagent"):  # the two run beside each other
        assert sorted(each.traffic.kind for each in asked) == sorted(CLASSES[transcript.name])
    else:
        assert [each.traffic.kind for each in asked] == CLASSES[transcript.name]
    assert len({each.program for each in asked}) == 1


@recorded
def test_compactions_are_known_without_headers_too(transcript: Transcript) -> None:
    compactions = [each.traffic.kind == "compaction" for each in asked_in(transcript)]
    assert [each.traffic.kind == "compaction" for each in asked_in(transcript, headers=False)] == compactions


@recorded
def test_the_history_of_the_main_line_only_grows(transcript: Transcript) -> None:
    """Until it is compacted; Claude Code's moving cache marks and its notes make no difference."""
    asked = asked_in(transcript)
    lines = [each.keys for each in asked if each.traffic.kind == "main"]
    end = next((at for at, each in enumerate(asked) if each.traffic.kind == "compaction"), len(lines))
    for shorter, longer in pairwise(lines[:end]):
        assert len(longer) > len(shorter)
        assert longer[: len(shorter)] == shorter
