"""Patches after which there is nothing to judge: no way out of a bad reward, and no reward for what is our failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.calc_task import FIX, WORKDIR, Place, python, task
from contract.pro_task import assets, pro_image, pro_row
from contract.test_other_protocols import APPLY, REPORT, SEPARATE, command_task, harbor_folder, harbor_task
from rollwright.errors import GradingFailed, JobLost, LimitError, RollwrightError, SandboxGone
from rollwright.graders import Grader, RawRun
from rollwright.graders.command import Command
from rollwright.graders.grading import Grading, GradingLimits, grade, judge_run
from rollwright.graders.harbor import Harbor
from rollwright.graders.patch import Patch, capture, take_baseline
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.graders.swebench_pro import SwebenchPro
from rollwright.graders.workspace import prepare, scrub_history
from rollwright.sandboxes import JobResult, JobSpec, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.types import Task, VerdictStatus

pytestmark = pytest.mark.anyio

EATS_MEMORY = python("held = []\nwhile True: held.append(bytearray(1 << 22))")
HONEST = "if python3 /tests/check.py; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
TWO_TESTS = "printf '1..2\\nok 1 - new\\nnot ok 2 - old\\n'; exit 1"


async def graded(
    place: Place, of: Task, patch: Patch, grader: Grader, key: str, *, provider: Any = None, **options: Any
) -> Grading:
    spec = replace(options.pop("spec", place.spec), image=of.agent.image)
    return await grade(
        provider=provider or place.provider, spec=spec, task=of, patch=patch, grader=grader, key=key, **options
    )


def breaks_an_old_test() -> Task:
    report = {"format": "tap", "path": "-"}
    return command_task(command=["sh", "-c", TWO_TESTS], report=report, FAIL_TO_PASS=["new"], PASS_TO_PASS=["old"])


def is_the_patchs_fault(grading: Grading, words: str) -> None:
    verdict = grading.verdict
    assert (verdict.status, verdict.reward, verdict.trainable) == (VerdictStatus.UNRESOLVED, 0.0, True)
    assert verdict.signals[0].startswith("spoiled_by_the_patch: "), verdict.signals
    assert words in verdict.signals[0]


async def test_tests_that_run_out_of_memory_twice_where_the_base_does_not_are_the_patchs_fault(place: Place) -> None:
    if not (await place.provider.probe()).memory_limit:
        pytest.skip("no memory cgroup here")
    spec = SandboxSpec(image="calc", memory_mb=128)
    grading = await graded(place, task(), await place.patch(EATS_MEMORY), ScaleSwe(), "oom", spec=spec)
    is_the_patchs_fault(grading, "ended as oom")
    assert grading.attempts == 2
    assert grading.raw is not None
    assert judge_run(ScaleSwe(), task(), RawRun.restore(grading.raw.record(), grading.raw.log)) == grading.verdict


async def test_a_box_too_small_for_the_task_itself_is_our_failure(place: Place) -> None:
    if not (await place.provider.probe()).memory_limit:
        pytest.skip("no memory cgroup here")
    of = command_task(command=["python3", "-c", "held = [bytearray(1 << 22) for _ in range(100)]"])
    spec = SandboxSpec(image="calc", memory_mb=128)
    with pytest.raises(GradingFailed, match="ended as oom") as caught:
        await graded(place, of, await place.patch(FIX), Command(), "small", spec=spec)
    assert caught.value.details["control"] == "the test run ended as oom"


async def test_a_patch_after_which_no_reward_is_written_is_unresolved(place: Place, tmp_path: Path) -> None:
    of = harbor_task(harbor_folder(tmp_path / "t", test="[ ! -e check.sh ] || . ./check.sh\n" + HONEST))
    grading = await graded(place, of, await place.patch(FIX + "echo exit 7 >check.sh"), Harbor(), "unrewarded")
    is_the_patchs_fault(grading, "neither reward.json nor reward.txt")
    assert grading.raw is not None
    assert grading.raw.exit_code == 7
    assert (await graded(place, of, await place.patch(FIX), Harbor(), "rewarded")).verdict.reward == 1.0


async def test_a_verifier_that_never_writes_a_reward_is_our_failure(place: Place, tmp_path: Path) -> None:
    of = harbor_task(harbor_folder(tmp_path / "t", test="exit 7\n"))
    with pytest.raises(GradingFailed, match="neither reward") as caught:
        await graded(place, of, await place.patch(FIX), Harbor(), "never")
    assert "neither reward" in caught.value.details["control"]


async def test_artifacts_that_the_patch_has_made_too_large_are_its_fault(place: Place, tmp_path: Path) -> None:
    of = harbor_task(harbor_folder(tmp_path / "t", SEPARATE, APPLY))
    limits = GradingLimits(artifact_bytes=1 << 20)
    fat = await place.patch(FIX + "head -c 3000000 /dev/urandom >data.bin")
    is_the_patchs_fault(await graded(place, of, fat, Harbor(), "fat", limits=limits), "over 1048576 bytes")
    with pytest.raises(LimitError, match="over 100 bytes") as caught:
        await graded(place, of, fat, Harbor(), "thin", limits=GradingLimits(artifact_bytes=100))
    assert caught.value.details["step"] == "collect"


async def test_a_collect_step_that_the_patch_makes_run_out_of_memory_is_its_fault(place: Place, tmp_path: Path) -> None:
    if not (await place.provider.probe()).memory_limit:
        pytest.skip("no memory cgroup here")
    hook = """[[verifier.collect]]\ncommand = "[ ! -e fat ] || python3 -c 'bytearray(1 << 28)'"\n"""
    of = harbor_task(harbor_folder(tmp_path / "t", SEPARATE + hook, APPLY))
    spec = SandboxSpec(image="calc", memory_mb=128)
    grading = await graded(place, of, await place.patch(FIX + "touch fat"), Harbor(), "hook", spec=spec)
    is_the_patchs_fault(grading, "collect: oom")


async def test_a_module_that_stands_in_the_launchers_way_is_the_patchs_fault(place: Place) -> None:
    """The image's PYTHONPATH has the workdir, so the patch's `json` is imported before pytest is."""
    shadow = await place.patch(FIX + "echo 'raise SystemExit(3)' >json.py")
    is_the_patchs_fault(await graded(place, task(), shadow, ScaleSwe(), "shadow"), "could not start pytest")


async def test_a_full_disk_of_the_patchs_making_is_its_fault(place: Place, tmp_path: Path) -> None:
    """The parser's input no longer fits into the box."""
    commits = pro_image(place.images)
    grader = SwebenchPro(assets=assets(tmp_path / "assets"), seconds=60)
    of = grader.parse(pro_row(commits), where="test")
    fill = python(
        "import contextlib\nwith contextlib.suppress(OSError), open('/tmp/fill', 'wb', 0) as f:\n"
        "    while True: f.write(bytes(1 << 16))\ndef add(a, b): return a + b\n"
    )
    agent = await place.provider.create(SandboxSpec(image="pro"), key="full-agent")
    patch = await patch_in(agent, of, fill)
    spec = SandboxSpec(image="pro", disk_mb=64)
    grading = await graded(place, of, patch, grader, "full", spec=spec)
    is_the_patchs_fault(grading, "does not fit")


async def patch_in(box: Any, of: Task, script: str) -> Patch:
    await prepare(box, of.agent)
    await scrub_history(box, WORKDIR)
    baseline = await take_baseline(box, WORKDIR)
    done = await box.exec(("sh", "-c", script), user="agent", cwd=WORKDIR)
    assert done.exit_code == 0, done.stderr
    return await capture(box, baseline)


class Faulty(NamespacesProvider):
    """Boxes in which, by the number of the box, the tests' job ends with an error."""

    errors: Sequence[RollwrightError | None] = ()
    made = 0

    async def create(self, spec: SandboxSpec, *, key: str) -> Any:
        box = await super().create(spec, key=key)
        error = self.errors[self.made]
        self.made += 1

        class Box:
            def __getattr__(self, name: str) -> Any:
                return getattr(box, name)

            async def run(self, spec: JobSpec) -> JobResult:
                if error is not None:
                    raise error
                return await box.run(spec)

        return Box()


LOST, OOM = JobLost("no record"), SandboxGone("gone", reason="oom")


@pytest.mark.parametrize(
    ("errors", "end"),
    [
        ([LOST, None, LOST], "fault"),
        ([OOM, None, OOM], "fault"),
        ([LOST, None, None], "resolved"),
        ([LOST, LOST], JobLost),
        ([OOM, SandboxGone("gone", reason="killed")], SandboxGone),
        ([LOST, None, SandboxGone("gone", reason="killed")], SandboxGone),
        ([SandboxGone("gone", reason="killed")], SandboxGone),
        ([SandboxGone("gone", reason="expired")], SandboxGone),
    ],
)
async def test_only_what_a_run_without_the_patch_contradicts_twice_is_the_patchs_fault(
    place: Place, tmp_path: Path, errors: list[RollwrightError | None], end: Any
) -> None:
    of = command_task(command=["python3", "-c", REPORT], report="junit")
    patch = await place.patch(FIX)
    async with Faulty(state_dir=tmp_path, images=place.images) as provider:
        provider.errors = errors
        if isinstance(end, str):
            grading = await graded(place, of, patch, Command(), "faulty", provider=provider)
            assert grading.verdict.status == ("resolved" if end == "resolved" else "unresolved")
        else:
            with pytest.raises(end) as caught:
                await graded(place, of, patch, Command(), "faulty", provider=provider)
            assert caught.value.details["step"] == "tests"
        assert provider.made == len(errors)


async def test_no_patch_gets_more_runs_than_the_deadline_was_checked_for(place: Place, tmp_path: Path) -> None:
    """It leaves nothing, then fails a test that passed before, and would get two more runs for that alone."""
    of = breaks_an_old_test()
    patch = await place.patch(FIX)
    async with Faulty(state_dir=tmp_path, images=place.images) as provider:
        provider.errors = [LOST, None, None]
        grading = await graded(place, of, patch, Command(), "many", provider=provider)
        assert provider.made == GradingLimits().runs
    assert (grading.verdict.status, grading.attempts) == (VerdictStatus.UNRESOLVED, 2)


async def test_a_run_that_was_judged_stays_judged_when_the_next_one_leaves_nothing(
    place: Place, tmp_path: Path
) -> None:
    of = breaks_an_old_test()
    patch = await place.patch(FIX)
    async with Faulty(state_dir=tmp_path, images=place.images) as provider:
        provider.errors = [None, LOST]
        grading = await graded(place, of, patch, Command(), "judged", provider=provider)
    assert [o.status for o in grading.verdict.tests] == ["passed", "failed"]
    assert grading.verdict.signals == ()
