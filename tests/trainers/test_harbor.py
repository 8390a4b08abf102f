"""Harbor's own models take our trajectories and rollout details. Harbor needs Python 3.12."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollwright.export import export_run
from rollwright.integrations.harbor import rollout_details
from rollwright.integrations.record import StoredRollout
from rollwright.store import RunDir

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


def test_each_trajectory_is_valid_and_comes_back_the_same(need: Need, run: RunDir, tmp_path: Path) -> None:
    model = need("harbor.models.trajectories.trajectory").Trajectory
    assert export_run(run, "atif", tmp_path / "out").count == 4
    for path in (tmp_path / "out").iterdir():
        data = orjson.loads(path.read_bytes())
        read = model.model_validate(data)
        assert read.session_id == path.stem
        assert _without_none(read.to_json_dict()) == _without_none(data)


def test_the_format_is_what_harbors_validator_accepts(need: Need, run: RunDir, tmp_path: Path) -> None:
    validator = need("harbor.utils.trajectory_validator").TrajectoryValidator()
    export_run(run, "atif", tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert validator.validate(path), validator.get_errors()


def test_rollout_details_fit_the_agent_context(need: Need, calc: list[StoredRollout]) -> None:
    model = need("harbor.models.agent.context").AgentContext
    for rollout in calc:
        details = rollout_details(rollout)
        assert model(rollout_details=details).rollout_details == details


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
