"""The docker backend keeps the sandbox contract, over a daemon that these tests start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollwright.errors import SandboxGone, Unreachable
from rollwright.sandboxes import Mount, Provider, Sandbox, SandboxSpec
from rollwright.sandboxes.docker import DockerProvider
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.testing.attach_contract import AttachContract, Elsewhere
from rollwright.testing.sandbox_contract import SandboxContract, shell_job
from support.docker_daemon import (
    IMAGE,
    PODMAN_IMAGE,
    DockerDaemon,
    docker_daemon,
    missing,
    podman_missing,
    podman_service,
)

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


class TestDockerThatSurvives(AttachContract):
    spec = replace(AttachContract.spec, image=IMAGE, network="gateway_only")

    @pytest.fixture
    def elsewhere(self, daemon: DockerDaemon, tmp_path: Path) -> Elsewhere:
        provider = "rollwright.sandboxes.docker:DockerProvider"
        return Elsewhere(provider, state_dir=str(tmp_path), url=daemon.url, survive=100)

    @pytest.fixture
    async def provider(self, daemon: DockerDaemon, tmp_path: Path) -> AsyncIterator[Provider]:
        async with DockerProvider(state_dir=tmp_path, url=daemon.url, survive=100) as provider:
            yield provider
            await provider.reap(everything=True)

    @pytest.fixture(autouse=True)
    def url(self, daemon: DockerDaemon) -> None:
        self.daemon = daemon

    async def end(self, provider: Provider, box: Sandbox) -> None:
        import docker

        client = docker.APIClient(base_url=self.daemon.url, version="auto")
        try:
            client.kill(box.id)
        finally:
            client.close()


@pytest.mark.anyio
async def test_what_the_daemon_saves_is_an_image_of_namespaces_boxes(daemon: DockerDaemon, tmp_path: Path) -> None:
    """With a layer that a container made on top, and what it removed."""
    import docker

    client = docker.APIClient(base_url=daemon.url, version="auto")
    try:
        change = ["sh", "-c", "mkdir -p /opt && echo made >/opt/made && rm $(command -v yes)"]
        host = client.create_host_config(network_mode="none")
        made = client.create_container(IMAGE, command=change, user="0:0", host_config=host)["Id"]
        client.start(made)
        assert client.wait(made)["StatusCode"] == 0
        client.commit(made, repository="saved/image", tag="v1", changes=["ENV FROM=commit"])
        client.remove_container(made)
        with (tmp_path / "saved_image_v1.tar").open("wb") as file:
            for piece in client.get_image("saved/image:v1"):
                file.write(piece)
        identity = client.inspect_image("saved/image:v1")["Id"]
        client.remove_image("saved/image:v1")
    finally:
        client.close()
    async with NamespacesProvider(state_dir=tmp_path / "state", images=tmp_path) as provider:
        assert await provider.image_digest("saved/image:v1") == identity
        box = await provider.create(SandboxSpec(image="saved/image:v1", disk_mb=64), key="saved")
        result = await box.run(shell_job("cat /opt/made; echo $FROM; id -un; yes | head -n 1"))
        assert result.stdout.data() == b"made\ncommit\nagent\n"
        assert b"yes" in result.stderr.data(), "it was removed"


@pytest.mark.anyio
@pytest.mark.skipif(podman_missing() is not None, reason=podman_missing() or "")
async def test_podman_is_as_good_a_daemon(tmp_path: Path) -> None:
    with podman_service() as url:
        async with DockerProvider(state_dir=tmp_path, url=url) as provider:
            await provider.check_image(PODMAN_IMAGE)
            has = await provider.probe()
            assert "gateway_only" in has.networks
            spec = SandboxSpec(image=PODMAN_IMAGE, network="gateway_only", memory_mb=256, pids=100)
            box = await provider.create(spec, key="podman")
            assert box.gateway_socket is not None
            data = bytes(range(256)) * 1000
            await box.put("/srv/file", data)
            assert await box.get("/srv/file", offset=255, limit=2) == b"\xff\0"
            (tmp_path / "tree").mkdir()
            (tmp_path / "tree" / "leaf").write_text("leaf")
            await box.put_tree(tmp_path / "tree", "/home/agent/tree", user="agent")
            assert (await box.exec(["stat", "-c", "%U", "/home/agent/tree/leaf"])).stdout == b"agent\n"
            result = await box.run(shell_job("id -un; setsid sleep 100 & cat /srv/file; exit 3"))
            assert (result.exit_code, result.survivors, result.stdout.data()) == (3, 0, b"agent\n" + data)
            with pytest.raises(Unreachable):
                await box.exec(["tail", "-f", "/dev/null"], seconds=0.5)
            (info,) = await provider.list()
            assert (info.id, info.alive, info.owner_alive) == (box.id, True, True)
            await box.close()
            with pytest.raises(SandboxGone):
                await box.get("/srv/file")
            assert await provider.list() == []
