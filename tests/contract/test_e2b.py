"""The E2B backend keeps the sandbox contract: the real SDK against our own server."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollwright.errors import ConfigError, LimitError, ProvisionFailed, SandboxGone, Unsupported
from rollwright.sandboxes import Mount, Provider, Sandbox, SandboxSpec
from rollwright.sandboxes.e2b import E2BProvider
from rollwright.sandboxes.e2b.sdk import check_version
from rollwright.testing.attach_contract import AttachContract, Elsewhere
from rollwright.testing.sandbox_contract import SandboxContract
from support.e2b_rig import API_KEY, IMAGE_KEY, Rig, e2b_rig

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

    @pytest.fixture(autouse=True)
    def gateway(self, rig: Rig) -> None:
        self.public_socket = rig.gateway.dup

    async def test_a_file_that_does_not_fit_is_a_limit_error_and_leaves_nothing(self, provider: Provider) -> None:
        box = await provider.create(replace(self.spec, image="small"), key=secrets.token_hex(8))
        with pytest.raises(LimitError):
            await box.put("/srv/big", bytes(40 << 20))
        assert (await box.exec(["ls", "-A", "/srv"])).stdout == b""
        await box.close()


class TestE2BThatSurvives(AttachContract):
    @pytest.fixture
    def elsewhere(self, rig: Rig) -> Elsewhere:
        urls = {"api_url": rig.url, "sandbox_url": rig.url}
        provider = "rollwright.sandboxes.e2b:E2BProvider"
        return Elsewhere(provider, state_dir=str(rig.state), api_key=API_KEY, survive=100, **urls)

    @pytest.fixture
    async def provider(self, rig: Rig) -> AsyncIterator[Provider]:
        async with rig.provider(survive=100) as provider:
            yield provider
        assert rig.server.boxes.all() == [], "a box was left behind"

    @pytest.fixture(autouse=True)
    def server(self, rig: Rig) -> None:
        self.boxes = rig.server.boxes

    async def end(self, provider: Provider, box: Sandbox) -> None:
        theirs = self.boxes.find(box.id)
        assert theirs is not None
        await self.boxes.kill(theirs)


# --------------------------------------------------------------------------- images, networks, sizes


async def test_an_image_travels_in_the_metadata_key_of_the_cluster(rig: Rig) -> None:
    options = {"image_metadata_key": IMAGE_KEY, "size_metadata_key": "cluster-size", "size": "4c8g"}
    async with rig.provider(template="small", **options) as provider:
        await provider.check_image("any")
        box = await provider.create(SandboxSpec(image="host", labels={"run": "r"}), key="k")
        (theirs,) = rig.server.boxes.all()
        assert (theirs.template, theirs.size.disk_mb) == ("small", 16)
        assert theirs.metadata[IMAGE_KEY] == "host"
        assert theirs.metadata["cluster-size"] == "4c8g"
        assert (await box.exec(["echo", "well"])).stdout == b"well\n"
        with pytest.raises(ProvisionFailed, match="no-such"):
            await provider.create(SandboxSpec(image="no-such"), key="other")
        assert len(rig.server.boxes.all()) == 1


async def test_a_template_without_a_key_stands_for_every_image(rig: Rig) -> None:
    async with rig.provider(template="small") as provider:
        await provider.check_image("whatever the row says")
        await provider.create(SandboxSpec(image="whatever the row says"), key="k")
        assert [theirs.template for theirs in rig.server.boxes.all()] == ["small"]
    async with rig.provider(template="gone") as provider:
        with pytest.raises(ConfigError, match="gone"):
            await provider.check_image("host")


@pytest.mark.parametrize("url", [None, "no url", "http://"])
async def test_a_box_that_is_to_reach_the_gateway_alone_is_told_where_it_is(rig: Rig, url: str | None) -> None:
    async with rig.provider() as provider:
        with pytest.raises(Unsupported, match="public address"):
            await provider.create(SandboxSpec(image="host", network="gateway_only", gateway_url=url), key="k")
        assert rig.server.boxes.all() == []


async def test_a_cluster_without_network_rules_is_not_asked_for_them(rig: Rig) -> None:
    async with rig.provider(network_rules=False) as provider:
        await provider.probe()
        for network in ("none", "gateway_only"):
            spec = SandboxSpec(image="host", network=network, gateway_url="http://example.org")
            box = await provider.create(spec, key=network)
            assert b"lo" in (await box.exec(["cat", "/proc/net/dev"])).stdout
            assert rig.server.boxes.all()[-1].network == "open"


async def test_the_network_of_a_box_is_what_was_asked_for(rig: Rig) -> None:
    async with rig.provider() as provider:
        script = "cat /proc/net/route | wc -l; ls /sys/class/net 2>/dev/null; cat /proc/net/dev | wc -l"
        closed = await provider.create(SandboxSpec(image="host", network="none"), key="closed")
        open_ = await provider.create(SandboxSpec(image="host", network="open"), key="open")
        assert (await closed.exec(["sh", "-c", script])).stdout != (await open_.exec(["sh", "-c", script])).stdout


@pytest.mark.parametrize(
    "wrong", [{"mounts": (Mount(source=Path("/usr"), target="/x"),)}, {"memory_mb": 100}, {"pids": 10}]
)
async def test_what_a_template_decides_cannot_be_asked_for(rig: Rig, wrong: dict[str, Any]) -> None:
    async with rig.provider() as provider:
        with pytest.raises(Unsupported):
            await provider.create(SandboxSpec(image="host", **wrong), key="k")
    assert rig.server.boxes.all() == []


@pytest.mark.parametrize(
    "wrong", [{"size": "big"}, {"size_metadata_key": "size"}, {"survive": 600, "max_lifetime_seconds": 600}]
)
def test_options_that_make_no_sense_are_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.e2b"):
        E2BProvider(state_dir=tmp_path, api_key=API_KEY, **wrong)


@pytest.mark.parametrize("version", ["2.63.0", "2.63.1", "2.70", "3.0.0rc1"])
def test_a_new_enough_sdk_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.62.9", "2.30.0", "1.99", "0.17.1"])
def test_an_older_sdk_is_refused_in_one_sentence_that_says_what_to_do(version: str) -> None:
    with pytest.raises(Unsupported, match=r"e2b>=2\.63") as raised:
        check_version(version)
    assert version in str(raised.value)


# --------------------------------------------------------------------------- leases and orphans


async def test_a_lease_ends_a_box_and_renewing_keeps_it(rig: Rig) -> None:
    async with rig.provider() as provider:
        spec = SandboxSpec(image="host", network="none", lifetime_seconds=2)
        while True:
            try:
                kept = await provider.create(spec, key=f"kept {spec.lifetime_seconds}")
                await kept.renew(600)
                short = await provider.create(spec, key=f"short {spec.lifetime_seconds}")
                break
            except SandboxGone:  # a machine as slow as that gets more time
                spec = replace(spec, lifetime_seconds=2 * spec.lifetime_seconds)
        with anyio.fail_after(50):
            while short.id in {box.id for box in rig.server.boxes.all()}:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.1)
        with pytest.raises(SandboxGone) as raised:
            await short.exec(["true"])
        assert raised.value.details["reason"] == "expired"
        assert (await kept.exec(["echo", "well"])).stdout == b"well\n"


async def test_the_cluster_s_longest_lease_is_kept_to(rig: Rig) -> None:
    async with rig.provider(max_lifetime_seconds=50) as provider:
        box = await provider.create(SandboxSpec(image="host", lifetime_seconds=7200), key="k")
        await box.renew(7200)
        (info,) = await provider.list()
        assert info.lease_seconds_left <= 50


async def test_a_box_lives_longer_than_one_lease_of_the_cluster(rig: Rig) -> None:
    for lease in (2, 4, 8, 16):  # seconds; a slow machine gets more
        async with rig.provider(max_lifetime_seconds=lease) as provider:
            try:
                box = await provider.create(SandboxSpec(image="host", lifetime_seconds=7200), key="k")
                until = anyio.current_time() + 1.5 * lease
                while anyio.current_time() < until:
                    assert (await box.exec(["sleep", "0.3"])).exit_code == 0
                return
            except SandboxGone:
                continue
    raise AssertionError("the lease was not renewed in time")


_ORPHAN = """
import anyio, os, signal, sys
from pathlib import Path
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.e2b import E2BProvider

async def main():
    state, key, url = sys.argv[1:]
    provider = E2BProvider(state_dir=Path(state), api_key=key, api_url=url, sandbox_url=url)
    box = await provider.create(SandboxSpec(image="host", network="none", labels={"run": "killed"}), key="k")
    print(box.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


async def test_what_a_killed_orchestrator_left_is_reaped_and_nothing_else(rig: Rig, tmp_path: Path) -> None:
    async with rig.provider() as provider, rig.provider(state_dir=tmp_path) as stranger:
        mine = await provider.create(SandboxSpec(image="host", network="none"), key="mine")
        theirs = await stranger.create(SandboxSpec(image="host", network="none"), key="theirs")
        argv = [sys.executable, "-c", _ORPHAN, str(rig.state), API_KEY, rig.url]
        orphan = (await anyio.run_process(argv, check=False)).stdout.decode().strip()
        assert orphan
        (info,) = [info for info in await provider.list() if info.id == orphan]
        assert (info.alive, info.owner_alive, info.labels) == (True, False, {"run": "killed"})
        assert await provider.reap() == [orphan]
        assert {box.id for box in rig.server.boxes.all()} == {mine.id, theirs.id}
        assert await provider.reap(everything=True) == [mine.id]


async def test_what_a_dead_machine_left_is_swept_from_another_one_and_nothing_else(rig: Rig, tmp_path: Path) -> None:
    spec = SandboxSpec(image="host", network="none")
    async with (
        rig.provider(state_dir=tmp_path / "dead") as dead,
        rig.provider(state_dir=tmp_path / "alive") as alive,
        rig.provider(state_dir=tmp_path / "driver") as driver,
    ):
        left = [await dead.create(spec, key=key) for key in ("one", "two")]
        kept = await alive.create(spec, key="one")
        assert sorted(await driver.sweep(dead.maker)) == sorted(box.id for box in left)
        assert [box.id for box in rig.server.boxes.all()] == [kept.id]
        assert await driver.sweep(dead.maker) == []
