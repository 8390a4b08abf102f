"""The way from a box on another machine to the gateway, looked at before and after the agent runs.

What a CLI does that cannot reach its policy is our failure and never a reward. To the gateway a way that broke looks
like an agent that does something else, so the box is asked.
"""

from __future__ import annotations

from rollwright.errors import AgentSilent, Unreachable
from rollwright.harnesses import AgentReport
from rollwright.sandboxes import Sandbox
from rollwright.sandboxes.knock import NOBODY_ANSWERS, knock

__all__ = ["Line", "used_up"]


def used_up(report: AgentReport) -> bool:
    """Whether the agent had all the turns or tokens it may have, which only the policy can use up. Its time runs on
    also while nobody answers."""
    return report.reason in ("limit: turns", "limit: sampled_tokens")


class Line:
    """The way of one box. `begin` before the agent, `end` after it, with the session open both times."""

    def __init__(self, box: Sandbox, url: str, key: str) -> None:
        self._box = box
        self._url = url
        self._key = key
        self._known = False
        """The image has what it takes to ask, and was answered. Otherwise the end tells nothing."""
        self._lost = False

    async def begin(self) -> None:
        self._known = await self._ask() == 0

    async def end(self) -> None:
        self._lost = self._known and await self._ask() == NOBODY_ANSWERS

    async def _ask(self) -> int:
        try:
            # As root, so that what the agent left in its home has no say.
            return (await knock(self._box, self._url, self._key, user="root")).exit_code
        except Unreachable:
            return NOBODY_ANSWERS

    def must_have_held(self, report: AgentReport, *, delivered: bool) -> None:
        """Raises `AgentSilent` for an agent that did not end well and may have been cut off.

        `delivered`: its last reply has reached it.
        """
        if report.ok or used_up(report):
            return
        if self._lost or (not delivered and report.reason.startswith("api_error")):
            what = "is not reached from its box any more" if self._lost else "could not bring it a reply"
            raise AgentSilent(f"the agent ended ({report.reason}), and the gateway at {self._url} {what}")
