"""Who is asking, by the headers that real CLIs send."""

from __future__ import annotations

from typing import Any

import pytest

from rollwright.gateway.traffic import Traffic, classify


@pytest.mark.parametrize(
    ("headers", "agent", "role"),
    [
        ({}, "", "main"),
        ({"x-claude-code-session-id": "s"}, "", "main"),
        ({"x-claude-code-request-class": "main"}, "", "main"),
        ({"x-claude-code-agent-id": "a1"}, "a1", "subagent"),
        ({"x-claude-code-agent-id": "a1", "x-claude-code-request-class": "subagent"}, "a1", "subagent"),
        ({"x-claude-code-agent-id": "a1", "x-claude-code-request-class": "compaction"}, "a1", "compaction"),
        ({"x-claude-code-request-class": "workflow"}, "", "subagent"),
        ({"x-claude-code-request-class": "auxiliary"}, "", "side"),
        ({"x-claude-code-request-class": "side_reply"}, "", "side"),
        ({"x-claude-code-request-class": "something new"}, "", "main"),
        ({"x-session-id": "ses_1"}, "", "main"),
        ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, "ses_2", "subagent"),
        ({"x-claude-code-agent-id": "a" * 1000}, "a" * 200, "subagent"),
    ],
)
def test_headers_name_the_agent_and_its_role(headers: dict[str, str], agent: str, role: Any) -> None:
    assert classify(headers) == Traffic(agent=agent, role=role)
