"""Bundles, fetched with the machine's own npm from a loopback registry."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from rollwright.errors import AgentInstallFailed, ConfigError
from rollwright.harnesses import AgentReport, Artifact, DialectName, Endpoint, Launch
from rollwright.harnesses.bundle import ensure_bundle, locate
from rollwright.harnesses.options import local_tarball
from rollwright.sandboxes import JobResult
from support.npm_registry import Registry, serve_registry, sha512, tarball

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]

CLI = tarball({"cli.js": b"console.log(1)", "big.txt": random.Random(1).randbytes(200_000)})
NODE = tarball({"bin/node": b"\x7fELF", "include/node.h": b""}, executable="bin/node")


class Toy:
    """A harness of two small packages."""

    name = "toy"
    dialect: DialectName = "openai_chat"

    def __init__(self, **pins: str) -> None:
        self.artifacts: tuple[Artifact, ...] = (
            Artifact(
                package="@scope/toy-cli", version=pins.get("version", "1.0.0"), sha512=pins.get("cli", sha512(CLI))
            ),
            Artifact(package="toy-node", version="22.0.0", sha512=sha512(NODE), keep=("bin/node",)),
        )

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return (f"{bundle}/toy-node/bin/node", "--version")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        return Launch(argv=("true",), env={})

    def report(self, result: JobResult) -> AgentReport:
        return AgentReport(ok=True, reason="completed")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The user's npm settings point at it, through the variables npm itself reads."""
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm-cache"))
    with serve_registry() as served:
        served.packages = {("@scope/toy-cli", "1.0.0"): CLI, ("toy-node", "22.0.0"): NODE}
        monkeypatch.setenv("npm_config_registry", served.url)
        yield served


def left_in(cache: Path) -> list[str]:
    """What is in the cache but lock files."""
    return sorted(path.name for path in (cache / "bundles").iterdir() if path.suffix != ".lock")


async def test_a_bundle_is_fetched_once_and_then_needs_no_registry(registry: Registry, tmp_path: Path) -> None:
    bundle = await ensure_bundle(Toy(), cache_dir=tmp_path)
    assert (bundle.path / "toy-cli/cli.js").read_bytes() == b"console.log(1)"
    assert (bundle.path / "toy-node/bin/node").stat().st_mode & 0o777 == 0o755
    assert not (bundle.path / "toy-node/include").exists()
    assert left_in(tmp_path) == [f"toy-1.0.0-{bundle.digest}"]
    assert registry.downloads == 2
    assert await ensure_bundle(Toy(), cache_dir=tmp_path, npm="/no/such/npm") == bundle


async def test_two_at_a_time_fetch_once(registry: Registry, tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(lambda: ensure_bundle(Toy(), cache_dir=tmp_path))
    assert registry.downloads == 2
    assert len(left_in(tmp_path)) == 1


async def test_another_pin_is_another_bundle(tmp_path: Path) -> None:
    paths = {locate(toy, tmp_path).path for toy in (Toy(), Toy(cli="AAAA"), Toy(version="2.0.0"))}
    assert len(paths) == 3


async def test_a_file_that_is_not_the_pinned_one_is_refused(registry: Registry, tmp_path: Path) -> None:
    registry.packages["@scope/toy-cli", "1.0.0"] = tarball({"cli.js": b"evil()"})
    with pytest.raises(ConfigError, match=r"@scope/toy-cli@1\.0\.0 from the npm registry is not the pinned file"):
        await ensure_bundle(Toy(), cache_dir=tmp_path)
    assert left_in(tmp_path) == []


async def test_a_missing_npm_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"install Node\.js with npm"):
        await ensure_bundle(Toy(), cache_dir=tmp_path, npm="/no/such/npm")
    assert left_in(tmp_path) == []


async def test_an_npm_without_node_says_what_to_install(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/usr/bin/env no-such-node\n")
    npm.chmod(0o755)
    with pytest.raises(ConfigError, match=r"no-such-node.*install Node\.js with npm"):
        await ensure_bundle(Toy(), cache_dir=tmp_path, npm=str(npm))


async def test_a_version_that_is_not_published_is_the_users_to_fix(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no @scope/toy-cli@9\.9\.9"):
        await ensure_bundle(Toy(version="9.9.9"), cache_dir=tmp_path)
    del registry.packages["@scope/toy-cli", "1.0.0"]
    with pytest.raises(ConfigError, match=r"has no @scope/toy-cli@1\.0\.0"):
        await ensure_bundle(Toy(), cache_dir=tmp_path)
    assert registry.downloads == 0


async def test_passing_faults_are_tried_again(registry: Registry, tmp_path: Path) -> None:
    registry.faults = ["503", "cut"]
    bundle = await ensure_bundle(Toy(), cache_dir=tmp_path, backoff=(0.01, 0.01))
    assert registry.downloads == 4
    assert (bundle.path / "toy-cli/big.txt").stat().st_size == 200_000


async def test_a_lasting_fault_ends_after_the_last_attempt(registry: Registry, tmp_path: Path) -> None:
    registry.faults = ["503"] * 10
    with pytest.raises(AgentInstallFailed, match=r"npm could not fetch @scope/toy-cli@1\.0\.0: 503"):
        await ensure_bundle(Toy(), cache_dir=tmp_path, backoff=(0.01,))
    assert registry.downloads == 2
    assert left_in(tmp_path) == []


async def test_an_unreachable_registry_is_infrastructure(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    with pytest.raises(AgentInstallFailed, match="ECONNREFUSED"):
        await ensure_bundle(Toy(), cache_dir=tmp_path, backoff=())


async def test_running_out_of_time_leaves_nothing(registry: Registry, tmp_path: Path) -> None:
    registry.faults = ["hang"]
    with pytest.raises(AgentInstallFailed, match=r"took more than 0\.5 s"):
        await ensure_bundle(Toy(), cache_dir=tmp_path, seconds=0.5)
    assert left_in(tmp_path) == []


async def test_a_cancelled_download_leaves_nothing_and_ends_npm(registry: Registry, tmp_path: Path) -> None:
    registry.faults = ["hang"]
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: ensure_bundle(Toy(), cache_dir=tmp_path))
        await to_thread.run_sync(registry.hanging.wait, 20)
        assert _children() != []
        group.cancel_scope.cancel()
    assert left_in(tmp_path) == []
    assert _children() == []


async def test_after_a_killed_run_the_next_one_starts_clean(registry: Registry, tmp_path: Path) -> None:
    registry.faults = ["hang"]
    script = (
        "import sys; from pathlib import Path; import anyio; from test_bundle import Toy; "
        "from rollwright.harnesses.bundle import ensure_bundle; "
        "anyio.run(lambda: ensure_bundle(Toy(), cache_dir=Path(sys.argv[1])))"
    )
    argv = [sys.executable, "-c", script, str(tmp_path)]
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": str(here.parents[1])}
    async with await anyio.open_process(argv, cwd=here, env=env, start_new_session=True) as killed:
        await to_thread.run_sync(registry.hanging.wait, 20)
        os.killpg(killed.pid, signal.SIGKILL)
        await killed.wait()
    assert [name for name in left_in(tmp_path) if name.endswith(".part")] != []
    bundle = await ensure_bundle(Toy(), cache_dir=tmp_path)
    assert left_in(tmp_path) == [bundle.path.name]


async def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "bundles").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="cannot be written"):
        await ensure_bundle(Toy(), cache_dir=tmp_path)


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


async def test_tarballs_of_this_machine_need_no_registry_and_are_their_own_pins(tmp_path: Path) -> None:
    """A Node.js distribution is an xz archive with links in it, which are not kept."""
    node = tmp_path / "node-v22.0.0-linux-x64.tar.xz"
    with tarfile.open(node, "w:xz") as archive:
        for name, data in (("bin/node", b"\x7fELF"), ("LICENSE", b"MIT")):
            member = tarfile.TarInfo(f"node-v22.0.0-linux-x64/{name}")
            member.size, member.mode = len(data), 0o755
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("node-v22.0.0-linux-x64/bin/npm")
        link.type, link.linkname = tarfile.SYMTYPE, "../lib/node_modules/npm/bin/npm-cli.js"
        archive.addfile(link)
    toy = Toy()
    toy.artifacts = (local_tarball(toy.artifacts[1], node, "harness.toy.node_tarball"),)
    bundle = await ensure_bundle(toy, cache_dir=tmp_path / "cache", npm="/no/npm")
    assert (bundle.path / "toy-node" / "bin" / "node").read_bytes() == b"\x7fELF"
    assert not (bundle.path / "toy-node" / "bin" / "npm").exists()
    first = locate(toy, tmp_path).digest
    node.write_bytes(node.read_bytes() + b"\0")
    toy.artifacts = (local_tarball(toy.artifacts[0], node, "harness.toy.node_tarball"),)
    assert locate(toy, tmp_path).digest != first


async def test_a_tarball_that_is_not_there_names_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"harness\.toy\.tarball: .*missing\.tgz cannot be read"):
        local_tarball(Toy().artifacts[0], tmp_path / "missing.tgz", "harness.toy.tarball")
