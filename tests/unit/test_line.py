"""The way from a box elsewhere to the gateway."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollwright.errors import AgentSilent, Unreachable
from rollwright.harnesses import AgentReport
from rollwright.line import Line
from rollwright.sandboxes import ExecResult, SandboxSpec
from rollwright.sandboxes.knock import NO_CLIENT, NOBODY_ANSWERS
from support.scripted_provider import IdleBox

pytestmark = pytest.mark.anyio

TIMEOUT = AgentReport(ok=False, reason="timeout")
API_ERROR = AgentReport(ok=False, reason="api_error: connect")


class Box(IdleBox):
    """Knocks there end with these codes; None: no answer to the command itself."""

    def __init__(self, *codes: int | None) -> None:
        super().__init__("box", SandboxSpec(image="host"))
        self.codes = list(codes)

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        assert user == "root"
        code = self.codes.pop(0)
        if code is None:
            raise Unreachable("too long")
        return ExecResult(exit_code=code, stdout=b"", stderr=b"")


async def line_of(*codes: int | None) -> Line:
    box = Box(*codes)
    line = Line(box, "http://gateway", "key")
    await line.begin()
    await line.end()
    assert len(box.codes) <= 1
    return line


@pytest.mark.parametrize("last", [NOBODY_ANSWERS, None])
@pytest.mark.parametrize(
    "report",
    [TIMEOUT, API_ERROR, AgentReport(ok=False, reason="exit 1"), AgentReport(ok=False, reason="limit: seconds")],
)
async def test_who_was_cut_off_is_not_judged(last: int | None, report: AgentReport) -> None:
    with pytest.raises(AgentSilent, match="not reached from its box any more"):
        (await line_of(0, last)).must_have_held(report, delivered=True)


@pytest.mark.parametrize(
    "report", [AgentReport(ok=True, reason="completed"), AgentReport(ok=False, reason="limit: turns")]
)
async def test_who_was_done_before_is_judged(report: AgentReport) -> None:
    (await line_of(0, NOBODY_ANSWERS)).must_have_held(report, delivered=False)


@pytest.mark.parametrize("codes", [(0, 0), (NO_CLIENT, NO_CLIENT), (NOBODY_ANSWERS, NOBODY_ANSWERS), (0, NO_CLIENT)])
async def test_an_image_that_cannot_tell_excuses_nobody(codes: tuple[int, int]) -> None:
    (await line_of(*codes)).must_have_held(TIMEOUT, delivered=False)
    (await line_of(*codes)).must_have_held(API_ERROR, delivered=True)


async def test_who_gave_up_on_a_reply_that_did_not_arrive_is_not_judged() -> None:
    with pytest.raises(AgentSilent, match="could not bring it a reply"):
        (await line_of(0, 0)).must_have_held(API_ERROR, delivered=False)
