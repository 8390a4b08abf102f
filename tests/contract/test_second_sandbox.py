"""The second sandbox: what is undone, what is proved, and what the box's own troubles become: never a verdict."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from contract.calc_task import FIX, GOLD, Place, python, task
from rollwright.errors import GradingFailed, InfraError
from rollwright.graders.grading import Grading, GradingLimits, grade
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.graders.validation import validate_task
from rollwright.sandboxes import Sandbox, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.types import VerdictStatus

pytestmark = pytest.mark.anyio

RESOLVED, UNRESOLVED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED


async def test_what_was_put_back_is_named(place: Place) -> None:
    grading = await place.grade(await place.patch(FIX + "echo >conftest.py; echo >tests/test_calc.py"), "dropped")
    assert set(grading.verdict.dropped_paths) == {"conftest.py", "tests/test_calc.py"}


async def test_gold_resolves_and_doing_nothing_does_not(place: Place) -> None:
    ids = {"FAIL_TO_PASS": '["test_fail_to_pass.py::test_add"]', "PASS_TO_PASS": "['tests/test_calc.py::test_zero']"}
    for extra in ({}, ids):
        checked = await validate_task(
            provider=place.provider, spec=place.spec, task=task(**extra), grader=ScaleSwe(), key=f"v{len(extra)}"
        )
        assert checked.ok, checked.problems
        assert checked.gold is not None
        assert {t.status for t in checked.gold.verdict.tests} == {"passed"}


async def test_a_row_whose_gold_does_nothing_is_found_out(place: Place) -> None:
    useless = GOLD.replace("+    return a + b", "+    return a - b  # really")
    checked = await validate_task(
        provider=place.provider, spec=place.spec, task=task(patch=useless), grader=ScaleSwe(), key="useless"
    )
    assert checked.problems == ("the gold patch is unresolved, not resolved",)


async def test_the_tests_own_patch_beats_the_agents_files(place: Place) -> None:
    tests = (
        "--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,3 @@\n"
        "+from calc import add\n+def test_new():\n+    assert add(1, 1) == 2\n"
    )
    of = task(f2p_script=None, f2p_patch=tests, FAIL_TO_PASS=["tests/test_new.py::test_new"])
    cheat = await place.patch("echo 'def test_new(): pass' >tests/test_new.py")
    assert (await place.grade(cheat, "own1", of=of)).verdict.status == UNRESOLVED
    honest = await place.patch(FIX + "echo 'def test_new(): pass' >tests/test_new.py")
    assert (await place.grade(honest, "own2", of=of)).verdict.status == RESOLVED


async def test_an_exit_code_alone_resolves_but_is_not_for_training(place: Place) -> None:
    of = task(f2p_script=None, eval_cmd="python3 -c 'from calc import add; assert add(1, 1) == 2' && [[ 1 == 1 ]]")
    verdict = (await place.grade(await place.patch(FIX), "exit", of=of)).verdict
    assert verdict.status == RESOLVED
    assert not verdict.trainable


async def test_decisions_without_a_run_need_no_sandbox(place: Place) -> None:
    before = len(await place.provider.list())
    empty = await place.grade(await place.patch("true"), "empty")
    refused = await place.grade(await place.patch("ln -s /etc/passwd l"), "refused")
    assert empty.verdict.status == VerdictStatus.EMPTY_PATCH
    assert refused.verdict.status == VerdictStatus.PATCH_REJECTED
    assert refused.verdict.signals == ("link_outside: l",)
    assert len(await place.provider.list()) == before


async def test_a_hang_is_tried_in_two_boxes_and_then_the_patchs_fault(place: Place) -> None:
    grading = await place.grade(await place.patch(python("while True: pass")), "hang", seconds=3)
    assert grading.verdict.status == VerdictStatus.TEST_TIMEOUT
    assert grading.attempts == 2


async def test_an_image_without_pytest_is_our_failure(place: Place) -> None:
    with pytest.raises(GradingFailed, match="could not start pytest"):
        await grade(
            provider=place.provider,
            spec=SandboxSpec(image="bare"),
            task=task(),
            patch=None,
            grader=ScaleSwe(),
            key="bare",
        )


class Watched(NamespacesProvider):
    """Tells when a grading box exists and who its init process is."""

    box: Sandbox | None = None

    async def create(self, spec: SandboxSpec, *, key: str) -> Any:
        self.box = await super().create(spec, key=key)
        return self.box

    async def tests_run(self) -> bool:
        return self.box is not None and not (await self.box.exec(("test", "-e", "/tmp/started"))).exit_code


def init_of(state: Path, box: str) -> int:
    record = next(p for p in (state / "boxes").iterdir() if box in p.name)
    return json.loads(record.read_bytes())["init"]["pid"]


@pytest.mark.parametrize("how", ["kill", "close"])
async def test_a_box_that_dies_during_the_tests_is_never_a_verdict(place: Place, tmp_path: Path, how: str) -> None:
    slow = await place.patch(python("import time, pathlib\npathlib.Path('/tmp/started').touch()\ntime.sleep(60)"))
    ends: list[BaseException | Grading] = []

    async def grading(provider: NamespacesProvider) -> None:
        try:
            ends.append(
                await grade(
                    provider=provider,
                    spec=place.spec,
                    task=task(),
                    patch=slow,
                    grader=ScaleSwe(),
                    key="dies",
                    limits=GradingLimits(attempts=1),
                )
            )
        except InfraError as e:
            ends.append(e)

    async with Watched(state_dir=tmp_path, images=place.images) as provider, anyio.create_task_group() as tasks:
        tasks.start_soon(grading, provider)
        with anyio.fail_after(60):
            while not await provider.tests_run():  # noqa: ASYNC110 - the event is in another machine
                await anyio.sleep(0.05)
        assert provider.box is not None
        if how == "kill":
            os.kill(init_of(tmp_path, provider.box.id), signal.SIGKILL)
        else:
            await provider.box.close()
    assert isinstance(ends[0], InfraError)
    assert ends[0].details["step"] == "tests"


class Mortal:
    """A box that is removed just before its n-th call."""

    def __init__(self, box: Sandbox, calls: int) -> None:
        self.inner = box
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in ("put", "get", "exec", "run"):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            self.calls -= 1
            if self.calls == 0:
                await self.inner.close()
            return await method(*args, **options)

        return call


class MortalBoxes(NamespacesProvider):
    calls = 0
    box: Mortal

    async def create(self, spec: SandboxSpec, *, key: str) -> Any:
        self.box = Mortal(await super().create(spec, key=key), self.calls)
        return self.box


async def test_a_box_that_dies_before_any_call_leaves_an_error_with_the_step(place: Place, tmp_path: Path) -> None:
    patch = await place.patch(FIX + "echo >conftest.py")
    steps: list[str] = []
    async with MortalBoxes(state_dir=tmp_path, images=place.images) as provider:
        while True:
            provider.calls += 1
            assert provider.calls < 100, f"it never lives: {steps}"
            try:
                done = await grade(
                    provider=provider,
                    spec=place.spec,
                    task=task(),
                    patch=patch,
                    grader=ScaleSwe(),
                    key=f"mortal{provider.calls}",
                )
            except InfraError as e:
                steps.append(e.details["step"])
                continue
            break
        assert done.verdict.status == RESOLVED
        assert provider.box.calls > 0  # it only came through because it was not killed
        assert await provider.list() == []
    assert list(dict.fromkeys(steps)) == ["prepare", "baseline", "apply", "stage", "tests"]
