"""Fixtures every test may use."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail: what a test may take is pytest's timeout. CI tries the same examples each time;
# new ones are tried by everybody else.
settings.register_profile(
    "rollwright", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("rollwright")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
