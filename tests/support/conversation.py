"""Short ways to say messages and turns in tests of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.tokens import Renderer
from rollwright.tokens.canonical import digests
from rollwright.tokens.tree import Plan, Trajectory, Turn
from rollwright.types import BranchRole, FinishReason, VersionSpan

BASH = ToolSpec(
    name="bash",
    description="Run a command.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}, "quiet": {"type": "boolean"}},
    },
)
TOOLS = (BASH,)


def system(text: str = "Be a good agent.") -> Message:
    return Message(role="system", content=text)


def user(text: str = "Fix the bug.") -> Message:
    return Message(role="user", content=text)


def tool(text: str = "a.py", call: str = "") -> Message:
    return Message(role="tool", content=text, tool_call_id=call)


def assistant(
    text: str = "", *calls: tuple[str, Mapping[str, Any] | str, str], reasoning: str | None = None
) -> Message:
    made = tuple(ToolCall(name=name, arguments=arguments, id=id) for name, arguments, id in calls)
    return Message(role="assistant", content=text, tool_calls=made, reasoning=reasoning)


def call_text(command: str) -> str:
    """A call as the tiny template's policy samples it."""
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


class Session:
    """A client and a policy that talk; the policy says what it is told to say."""

    def __init__(self, renderer: Renderer, *, tools: Sequence[ToolSpec] = TOOLS) -> None:
        self.renderer = renderer
        self.tools = tools
        self.trajectory = Trajectory("rollout")
        self.sent: dict[int, list[int]] = {}
        self._minted = 0

    def plan(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> Plan:
        keys = self.trajectory.keys_of(messages)
        assert keys == digests(messages)
        return self.trajectory.plan(messages, self.tools if tools is None else tools, self.renderer, keys=keys)

    def turn(
        self,
        messages: Sequence[Message],
        says: str | Sequence[int],
        *,
        tools: Sequence[ToolSpec] | None = None,
        finish: FinishReason = "stop",
        role: BranchRole = "main",
        version: str = "1",
        logprobs: Sequence[float] | None = None,
    ) -> tuple[Turn, Message]:
        """One request and its reply (text, or ids): the turn, and the message as the client gets it."""
        plan = self.plan(messages, tools)
        ids = self.renderer.encode(says) if isinstance(says, str) else list(says)
        if finish == "stop" and isinstance(says, str):
            ids.append(min(self.renderer.stop_ids))
        parsed = self.renderer.parse(ids, plan.tools)
        calls: list[ToolCall] = []
        for call in parsed.tool_calls:
            self._minted += 1
            calls.append(replace(call, id=f"call_{self._minted}"))
        self._minted += 1
        reply = Message(
            role="assistant",
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=tuple(calls),
            carriers=(f"sig_{self._minted}",),
        )
        turn = self.trajectory.commit(
            plan,
            sampled=ids,
            logprobs=[-0.25 - 0.001 * len(self.sent) - n / 1e6 for n in range(len(ids))]
            if logprobs is None
            else logprobs,
            finish=finish,
            versions=[VersionSpan(version, 0, len(ids))] if ids else [],
            reply=reply,
            role=role,
            ill_formed=parsed.ill_formed,
        )
        self.sent[turn.index] = list(plan.prompt)
        return turn, reply
