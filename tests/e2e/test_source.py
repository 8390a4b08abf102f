"""`rollwright.rollouts`: the quickstart's tasks as a trainer takes them."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from rollwright import Pace, rollouts
from rollwright.audit import audit_run
from rollwright.export import samples_of
from rollwright.integrations.places import user_places
from rollwright.quorum import group_table
from rollwright.rollout import RolloutPlan
from rollwright.run import Places, Silent
from rollwright.store import RolloutRecord, RunDir, RunWriter
from support.commandline import QUICKSTART, Rollwright

pytestmark = pytest.mark.anyio

RECORDER = "rollwright.testing.recorder:Recorder"
SETTINGS = ("run.limit=2", "run.attempts=2", "run.concurrency=4", f'telemetry.kinds=["{RECORDER}"]')


async def test_a_trainer_takes_groups_and_a_later_one_goes_on_where_it_was(
    rollwright: Rollwright, tmp_path: Path
) -> None:
    places = Places(cache=user_places().cache, state=tmp_path / "state" / "rollwright")
    job, folder = QUICKSTART / "scripted.toml", tmp_path / "run"
    async with rollouts(job, *SETTINGS, folder=folder, places=places) as source:
        first = await anext(source)
        second = await anext(source)
        with pytest.raises(StopAsyncIteration):
            await anext(source)
    assert {first.state, second.state} == {"complete"}
    assert all(sum(sample.loss_mask) > 0 for sample in first.samples)
    stored = RunDir(folder).records()
    assert len(stored) == 4
    heard = (folder / "logs/telemetry.jsonl").read_bytes().splitlines()
    assert len(heard) == 1 + len(stored) + 1  # the beginning, each rollout, the end

    again = rollouts(job, *SETTINGS, folder=folder, places=places, delivered={first.id})
    async with again as source:
        groups = [group async for group in source]
    assert [group.id for group in groups] == [second.id]
    assert groups[0].samples == second.samples
    assert RunDir(folder).records() == stored
    assert rollwright.boxes() == []


async def test_a_later_trainer_makes_what_an_earlier_one_left_with_a_lower_number(
    rollwright: Rollwright, tmp_path: Path
) -> None:
    places = Places(cache=user_places().cache, state=tmp_path / "state" / "rollwright")
    job, folder = QUICKSTART / "scripted.toml", tmp_path / "run"
    settings = (*SETTINGS, "run.limit=1", "sandbox.namespaces.survive=60")
    async with rollouts(job, *settings, folder=folder, places=places) as source:
        first = await anext(source)
    names = [attempt.record.rollout for attempt in first.attempts]
    writer = RunWriter.reopen(folder)
    writer.drop({names[0]})
    left = writer.begin(names[0])
    left.write_json(left.held, {"schema": 1, "of": "another version"})
    writer.close()
    async with rollouts(job, *settings, folder=folder, places=places) as source:
        (group,) = [group async for group in source]
    assert [attempt.record.rollout for attempt in group.attempts] == names
    assert group.state == "complete"
    assert not RunDir(folder).work.exists(), "nothing of it is left"
    assert rollwright.boxes() == []


class Stored(Silent):
    """Tells when so many rollouts are stored."""

    def __init__(self, count: int) -> None:
        self.done = anyio.Event()
        self._count = count

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None:
        self._count -= 1
        if self._count == 0:
            self.done.set()


async def test_what_became_too_old_is_superseded_in_the_run_folder_and_a_later_process_knows_it(
    rollwright: Rollwright, tmp_path: Path
) -> None:
    places = Places(cache=user_places().cache, state=tmp_path / "state" / "rollwright")
    job, run = QUICKSTART / "scripted.toml", RunDir(tmp_path / "run")
    settings = (*SETTINGS, "run.limit=1", "run.attempts=1")
    waits = Stored(2)
    pace = Pace(epochs=2, ahead=1, max_lag=0)
    async with rollouts(job, *settings, folder=run.path, places=places, pace=pace, observer=waits) as source:
        first = await anext(source)
        await waits.done.wait()
        (sampled_with,) = run.versions()
        async with source.new_weights("step-1"):
            pass  # the engine itself says what it samples with, and goes on with what it had
    assert run.versions() == [sampled_with, "step-1"]

    again = rollouts(job, *settings, folder=run.path, places=places, pace=pace, delivered={first.id})
    async with again as source:
        groups = [group async for group in source]
    (group,) = groups
    assert group.state == "complete"
    assert run.versions() == ["step-1", sampled_with], "the engine went back to them"
    records = {record.rollout: record for record in run.records()}
    superseded = [record for record in records.values() if record.superseded]
    assert [record.epoch for record in superseded] == [2]
    assert {attempt.record.rollout for attempt in group.attempts}.isdisjoint(r.rollout for r in superseded)
    assert [row.rollouts for row in group_table(run)] == [1, 1]
    assert audit_run(run).violations == []
    assert {sample.rollout_id for sample in samples_of(run)} == set(records) - {r.rollout for r in superseded}
