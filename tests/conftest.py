"""Fixtures every test may use."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail: what a test may take is pytest's timeout.
settings.register_profile("rollwright", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollwright")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
