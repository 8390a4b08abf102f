"""A run folder with every shape of rollout in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwright.store import RunDir
from rollwright.testing.run_folder import build_run


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Read only: tests share it."""
    return build_run(tmp_path_factory.mktemp("built") / "run", tasks=8, attempts=4, seed=3)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
