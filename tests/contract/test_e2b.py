"""The E2B backend keeps the sandbox contract: the real SDK against our own server."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.e2b_rig import API_KEY, IMAGE_KEY, Rig, e2b_rig

from rollwright.errors import ConfigError, LimitError, ProvisionFailed, SandboxGone, Unsupported, UsageError
from rollwright.sandboxes import Mount, Provider, SandboxSpec
from rollwright.sandboxes.e2b import E2BProvider
from rollwright.testing.sandbox_contract import SandboxContract, shell_job

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2b")


@pytest.fixture
async def rig(state: Path) -> AsyncIterator[Rig]:
    async with e2b_rig(state) as rig:
        yield rig


class TestE2B(SandboxContract):
    @pytest.fixture
    async def provider(self, rig: Rig) -> AsyncIterator[Provider]:
        async with rig.provider() as provider:
            yield provider
        assert rig.server.boxes.all() == [], "a box was left behind"

    async def test_a_file_that_does_not_fit_is_a_limit_error_and_leaves_nothing(self, provider: Provider) -> None:
        box = await provider.create(replace(self.spec, image="small"), key=secrets.token_hex(8))
        with pytest.raises(LimitError):
            await box.put("/srv/big", bytes(40 << 20))
        assert (await box.exec(["ls", "-A", "/srv"])).stdout == b""
        await box.close()
