"""Real samples for the trainers' own classes. Each test is skipped where its trainer is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

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


@pytest.fixture
def need() -> Callable[[str], Any]:
    """Imports a trainer's module, or skips and says what is missing."""

    def import_it(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name}: {error} (make test-trainers)")

    return import_it
