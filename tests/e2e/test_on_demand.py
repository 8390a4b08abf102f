"""`on_demand`: the quickstart's tasks in the order in which a trainer asks for them, from its own event loop."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from rollwright.errors import UsageError
from rollwright.integrations.background import Background
from rollwright.integrations.on_demand import OnDemand, on_demand
from rollwright.integrations.places import user_places
from rollwright.integrations.record import group_advantages, stored_groups
from rollwright.integrations.trl import rollout_batch
from rollwright.run import Places
from rollwright.store import RunDir
from support.commandline import QUICKSTART, Rollwright

pytestmark = pytest.mark.anyio

RECORDER = "rollwright.testing.recorder:Recorder"
SETTINGS = ("run.limit=2", "run.concurrency=3", f'telemetry.kinds=["{RECORDER}"]')


async def test_a_trainer_asks_for_tasks_from_another_loop(rollwright: Rollwright, tmp_path: Path) -> None:
    places = Places(cache=user_places().cache, state=tmp_path / "state" / "rollwright")
    folder = tmp_path / "run"
    demand = Background(
        lambda: on_demand(QUICKSTART / "scripted.toml", *SETTINGS, folder=folder, places=places), name="demand"
    )
    demand.start()
    try:
        first = await demand.call(OnDemand.group, "cart", 2)
        again = await demand.call(OnDemand.group, "cart", 1)
        with pytest.raises(UsageError, match="no task 'nonsense'"):
            await demand.call(OnDemand.group, "nonsense", 1)
    finally:
        assert await anyio.to_thread.run_sync(demand.stop, 60.0)
    assert [attempt.record.rollout for attempt in (*first, *again)] == ["cart.1", "cart.2", "cart.3"]
    assert {attempt.record.group for attempt in first}.isdisjoint(attempt.record.group for attempt in again)
    assert [len(group) for group in stored_groups(RunDir(folder))] == [2, 1]
    assert group_advantages(first).counted == 2
    assert len(rollout_batch(first, filler=0)["completion_ids"]) == 2
    assert len((folder / "logs/telemetry.jsonl").read_bytes().splitlines()) == 1 + 3 + 1
    assert rollwright.boxes() == []
