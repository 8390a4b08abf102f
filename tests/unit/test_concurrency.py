"""Errors leave task groups as themselves."""

from __future__ import annotations

import anyio
import pytest

from rollwright.concurrency import plain_errors
from rollwright.errors import EngineUnreachable, SandboxGone

pytestmark = pytest.mark.anyio


async def fail(error: Exception) -> None:
    raise error


async def both(*found: Exception) -> None:
    with plain_errors():
        async with anyio.create_task_group() as outer, anyio.create_task_group() as inner:
            for error in found:
                inner.start_soon(fail, error)
            outer.start_soon(anyio.sleep_forever)


async def test_a_single_error_of_ours_is_not_wrapped() -> None:
    with pytest.raises(SandboxGone, match="box died"):
        await both(SandboxGone("box died"))


async def test_several_of_ours_raise_the_first_and_note_the_others() -> None:
    with pytest.raises(SandboxGone) as caught:
        await both(SandboxGone("box died"), EngineUnreachable("no engine"))
    assert caught.value.__notes__ == ["also: EngineUnreachable: no engine"]


async def test_a_bug_among_them_is_never_hidden() -> None:
    with pytest.raises(ExceptionGroup):
        await both(SandboxGone("box died"), ZeroDivisionError())


async def test_a_single_bug_comes_out_as_itself() -> None:
    with pytest.raises(ZeroDivisionError):
        await both(ZeroDivisionError())
