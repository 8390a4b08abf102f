"""The sandboxes that the tests of grading share within a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from contract.calc_task import WORKDIR, Place, images, task
from rollwright.graders.patch import take_baseline
from rollwright.graders.workspace import prepare, scrub_history
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def place(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("images")
    images(folder)
    spec = SandboxSpec(image="calc")
    state = tmp_path_factory.mktemp("state")
    async with NamespacesProvider(state_dir=state, images=folder) as provider:
        agent = await provider.create(spec, key="agent")
        await prepare(agent, task().agent)
        await scrub_history(agent, WORKDIR)
        yield Place(provider, spec, agent, await take_baseline(agent, WORKDIR), folder)
