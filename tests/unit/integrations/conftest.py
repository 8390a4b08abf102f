"""One stored group for every converter."""

from __future__ import annotations

import pytest

from rollwright.integrations.record import StoredRollout, stored_groups
from support.rollouts import stored_run


@pytest.fixture(scope="session")
def calc(tmp_path_factory: pytest.TempPathFactory) -> list[StoredRollout]:
    (group,) = stored_groups(stored_run(tmp_path_factory.mktemp("calc")))
    return group
