"""`rollwright.rollouts`: the quickstart's tasks as a trainer takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwright import rollouts
from rollwright.integrations.places import user_places
from rollwright.run import Places
from rollwright.store import RunDir
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
