"""An image that breaks in the middle of a run: what was graded in it is withdrawn, the rest is not begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from rollwright import Pace, rollouts
from rollwright.export import samples_of
from rollwright.integrations.places import user_places
from rollwright.run import Places
from rollwright.store import RunDir
from support.breaking_image import image_that_may_break
from support.commandline import Rollwright

pytestmark = [pytest.mark.pi, pytest.mark.timeout(180)]


@pytest.mark.anyio
@pytest.mark.parametrize("proved", [False, True])
async def test_a_trainer_is_told_what_a_control_takes_back_or_has_not_had_it(
    proved: bool, images: Path, tmp_path: Path, rollwright: Rollwright
) -> None:
    image_that_may_break(images, tmp_path / "images")()
    settings = ("engine.kind=scripted", "run.limit=1", "run.attempts=1", "run.retries=0", "run.concurrency=1")
    source = rollouts(
        rollwright.job,
        *settings,
        "grading.controls=2",
        f"sandbox.namespaces.images={tmp_path / 'images'}",
        folder=tmp_path / "run",
        places=Places(cache=user_places().cache, state=tmp_path / "state"),
        pace=Pace(epochs=2, ahead=1, proved=proved),
    )
    async with source as groups:
        first, second = [group async for group in groups]
        withdrawn = [record.rollout for record in groups.withdrawn]
    assert first.state == ("lost" if proved else "complete")
    assert second.state == "lost"
    assert withdrawn == ([] if proved else ["cart.1"])
    records = RunDir(tmp_path / "run").records()
    assert {record.failure.error for record in records if record.failure} == {"ImageQuarantined"}
    assert [bool(record.turns) for record in records] == [True, not proved], "nothing is begun in a broken image"
    assert not any(record.graded for record in records)


def test_an_image_that_breaks_is_quarantined(
    rollwright: Rollwright, images: Path, tmp_path: Path, until: Callable[[Callable[[], bool], str], None]
) -> None:
    breaks = image_that_may_break(images, tmp_path / "images")
    process = rollwright.start(
        *("run", rollwright.job, f"run.output={rollwright.home}", "run.name=breaks", "engine.kind=scripted"),
        *("run.limit=1", "run.attempts=9", "run.concurrency=1", "--controls", "2", "--json"),
        *("run.retries=0", f"sandbox.namespaces.images={tmp_path / 'images'}"),
    )
    run = RunDir(rollwright.home / "breaks")
    until(lambda: run.index.exists() and len(run.records()) >= 3, "the third stored rollout")
    breaks()
    told, said = process.communicate(timeout=110)
    assert process.returncode == 2, said

    records = run.records()
    kept = [record for record in records if record.graded]
    lost = [record for record in records if record.failure is not None]
    assert [record.rollout for record in records] == [f"cart.{n}" for n in range(1, 10)]
    assert {record.status for record in kept} == {"resolved"}
    assert len(kept) % 2 == 0, "all but those since the last good control"
    assert len(kept) >= 2
    assert {record.failure.error for record in lost if record.failure} == {"ImageQuarantined"}
    withdrawn = [record.rollout for record in lost if record.turns]
    assert withdrawn == [f"cart.{len(kept) + 1}", f"cart.{len(kept) + 2}"]
    assert {sample.rollout_id for sample in samples_of(run)} == {record.rollout for record in kept}
    summary = orjson.loads(told)
    assert "gold patch is unresolved" in summary["quarantined"]["quickstart/cart"]
    assert rollwright("verify", run.path).stdout.startswith("0 violations")
    assert "quarantined: quickstart/cart" in rollwright("resume", run.path, code=2).stdout
