"""The docker backend keeps the sandbox contract, over a daemon that these tests start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollwright.sandboxes import Mount, Provider
from rollwright.sandboxes.docker import DockerProvider
from rollwright.testing.sandbox_contract import SandboxContract, shell_job
from support.docker_daemon import IMAGE, DockerDaemon, docker_daemon, missing

_MISSING = missing()
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_MISSING is not None, reason=_MISSING or "")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerDaemon]:
    with docker_daemon() as daemon:
        yield daemon


class TestDocker(SandboxContract):
    spec = replace(SandboxContract.spec, image=IMAGE)

    @pytest.fixture
    async def provider(self, daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Provider]:
        state = tmp_path_factory.mktemp("state")
        async with DockerProvider(state_dir=state, url=daemon.url) as provider:
            yield provider
            assert {info.alive for info in await provider.list()} <= {True}

    async def test_a_host_folder_is_shown_read_only(self, provider: Provider, tmp_path: Path) -> None:
        (tmp_path / "bundle").mkdir()
        (tmp_path / "bundle" / "tool").write_text("#!/bin/sh\necho tool\n")
        (tmp_path / "bundle" / "tool").chmod(0o755)
        mounts = (Mount(source=tmp_path / "bundle", target="/opt/bundle"),)
        box = await provider.create(replace(self.spec, mounts=mounts), key="mounts")
        assert (await box.run(shell_job("/opt/bundle/tool"))).stdout.data() == b"tool\n"
        assert (await box.exec(["touch", "/opt/bundle/new"])).exit_code != 0
