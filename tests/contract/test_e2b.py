"""The E2B backend keeps the sandbox contract: the real SDK against our own server."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollwright.errors import LimitError
from rollwright.sandboxes import Provider
from rollwright.testing.sandbox_contract import SandboxContract
from support.e2b_rig import Rig, e2b_rig

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
