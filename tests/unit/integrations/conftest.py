"""One stored group for every converter."""

from __future__ import annotations

import pytest

from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.integrations.record import StoredRollout, stored_groups
from rollwright.store import RunDir
from support.rollouts import stored_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return stored_run(tmp_path_factory.mktemp("calc"))


@pytest.fixture(scope="session")
def calc(run: RunDir) -> list[StoredRollout]:
    (group,) = stored_groups(run)
    return group


@pytest.fixture(scope="session")
def logs(run: RunDir, calc: list[StoredRollout]) -> list[LoggedTrajectory]:
    """The turn log of each rollout of `calc`."""
    return [read_turn_log(run.rollout(each.record.rollout).turns) for each in calc]
