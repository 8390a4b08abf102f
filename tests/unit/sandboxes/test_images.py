"""Images of the namespaces backend: what a name resolves to, and what a box then shows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollwright.errors import ConfigError
from rollwright.sandboxes import Mount, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider, idmap
from rollwright.sandboxes.namespaces.idmap import AGENT_ID
from rollwright.sandboxes.namespaces.images import Images
from rollwright.sandboxes.namespaces.layers import Layers

pytestmark = pytest.mark.anyio


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
async def provider(images: Path, tmp_path: Path) -> AsyncIterator[NamespacesProvider]:
    rootfs = (str(tmp_path / "root"),)
    async with NamespacesProvider(images=images, rootfs=rootfs, state_dir=tmp_path / "state") as provider:
        yield provider


def resolver(images: Path, tmp_path: Path, **more: Any) -> Images:
    layers = Layers(tmp_path / "layers", maps=idmap.find)
    return Images(images, skeletons=tmp_path / "s", layers=layers, **more)


def write(folder: Path, path: str, text: str, mode: int = 0o644) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    (folder / path).chmod(mode)


def describe(images: Path, name: str, **fields: Any) -> None:
    write(images, f"{name}/image.json", json.dumps({"schema": 1, "base": "host"} | fields))


async def test_layers_lie_on_the_host_topmost_first(provider: NamespacesProvider, images: Path) -> None:
    write(images, "shared/opt/both", "lower")
    write(images, "shared/opt/deep/low", "low")
    write(images, "a/b/own/opt/both", "upper")
    write(images, "a/b/own/usr/local/bin/tool", "#!/bin/sh\necho tool $GREETING\n", 0o755)
    write(images, "a/b/own/testbed/code.py", "print()")
    describe(images, "a/b", layers=["own", "../../shared"], env={"GREETING": "hello", "PATH": "/usr/local/bin:/bin"})
    await provider.check_image("a/b")
    box = await provider.create(SandboxSpec(image="a/b", env={"MORE": "1"}), key="a")
    script = "cat /opt/both; echo; cat /opt/deep/low; echo; tool; echo $PATH $MORE; stat -c %U /testbed"
    seen = await box.exec(["sh", "-c", script], user="agent")
    assert seen.stdout == b"upper\nlow\ntool hello\n/usr/local/bin:/bin 1\nroot\n"
    # What a box writes stays in it; the layers are shared.
    await box.exec(["sh", "-c", "echo changed >/opt/both; rm -r /opt/deep; mkdir /opt/deep; chown agent /testbed"])
    assert (images / "shared/opt/deep/low").read_text() == "low"
    other = await provider.create(SandboxSpec(image="a/b"), key="b")
    assert await other.get("/opt/both") == b"upper"
    assert (await box.exec(["ls", "/opt/deep"])).stdout == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount an overlay that keeps a file's number")
async def test_a_repository_of_the_image_can_be_cloned(provider: NamespacesProvider, images: Path) -> None:
    """Git compares the number of a file with that of the hard link it made, which copies the file up."""
    script = """
        git init -q . && echo a >a && git add a && git -c user.name=n -c user.email=e commit -qm m
    """
    (images / "repo/layer/testbed").mkdir(parents=True)
    await anyio.run_process(["sh", "-ec", script], cwd=images / "repo/layer/testbed")
    describe(images, "repo", layers=["layer"])
    box = await provider.create(SandboxSpec(image="repo", disk_mb=64), key="clone")
    cloned = await box.exec(["git", "clone", "-q", "/testbed", "/tmp/clone"])
    assert (cloned.exit_code, cloned.stderr) == (0, b"")
    same = "ln /testbed/a /testbed/b; stat -c %d:%i /testbed/a; stat -c %d:%i /testbed/b"
    first, second = (await box.exec(["sh", "-c", same])).stdout.split()
    assert first == second


async def test_mounts_show_host_folders_read_only(provider: NamespacesProvider, images: Path, tmp_path: Path) -> None:
    write(tmp_path, "tools/bin/python", "#!/bin/sh\necho a python\n", 0o755)
    write(tmp_path, "bundle/file", "bundle")
    describe(images, "mounted", mounts=[{"source": str(tmp_path / "tools"), "target": "/root/.tools"}])
    mount = Mount(source=tmp_path / "bundle", target="/opt/bundle")
    box = await provider.create(SandboxSpec(image="mounted", mounts=(mount,)), key="m")
    assert (await box.exec(["/root/.tools/bin/python"], user="agent")).stdout == b"a python\n"
    assert await box.get("/opt/bundle/file") == b"bundle"
    for path in ("/root/.tools/bin/python", "/opt/bundle/file", "/opt/bundle/new"):
        assert (await box.exec(["sh", "-c", f"echo x >{path}"])).exit_code != 0
    assert (tmp_path / "bundle/file").read_text() == "bundle"


@pytest.mark.skipif(shutil.which("busybox") is None, reason="needs a static busybox to make a root file system of")
async def test_a_listed_folder_can_be_the_root_file_system(provider: NamespacesProvider, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, "etc/passwd", "root:x:0:0::/root:/bin/sh\nagent:x:1234:1234::/home/dev:/bin/sh")
    write(root, "etc/group", "root:x:0:\nagent:x:1234:\n")
    write(root, "etc/motd", "hello")
    (root / "bin").mkdir()
    (root / "usr").mkdir()
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    for name in ("sh", "cat", "id", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    await provider.check_image(str(root))
    box = await provider.create(SandboxSpec(image=str(root)), key="root")
    assert await box.get("/etc/motd") == b"hello"
    seen = await box.exec(["sh", "-c", "id -un; echo $HOME; echo x >$HOME/mine && cat $HOME/mine"], user="agent")
    assert seen.stdout == b"agent\n/home/dev\nx\n"
    assert (await box.exec(["ls", "/usr"])).stdout == b""


async def test_tools_of_the_host_run_as_usual(provider: NamespacesProvider) -> None:
    box = await provider.create(SandboxSpec(image="host"), key="tools")
    script = """
        set -e
        git init -q /srv/repo; cd /srv/repo
        echo a >a; git add a; git -c user.name=n -c user.email=e commit -qm m
        su_like=$(stat -c %U /srv/repo); echo $su_like
    """
    made = await box.exec(["sh", "-c", script])
    assert (made.exit_code, made.stdout) == (0, b"root\n"), made.stderr
    log = await box.exec(["git", "-C", "/srv/repo", "log", "--format=%s"], user="agent")
    assert log.stdout == b"m\n", log.stderr
    assert (await box.exec(["getent", "passwd", "agent"])).stdout.startswith(b"agent:x:")
    assert (await box.exec(["sh", "-c", "echo x >/dev/shm/a && echo y >/dev/tty; test -c /dev/null"])).exit_code == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"schema": 2}, "schema"),
        ({"base": 1}, "base"),
        ({"base": "nowhere"}, "base"),
        ({"layers": ["nowhere"]}, "layers"),
        ({"layers": "x"}, "layers"),
        ({"env": {"A": 1}}, "env"),
        ({"mounts": [{"source": "/usr"}]}, "mounts"),
        ({"mounts": [{"source": "/no/such", "target": "/x"}]}, "mounts"),
        ({"entrypoint": []}, "entrypoint"),
    ],
)
def test_a_wrong_description_names_the_field(images: Path, tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    describe(images, "wrong", **fields)
    with pytest.raises(ConfigError, match=rf"wrong.*image\.json.*{named}"):
        resolver(images, tmp_path).resolve("wrong")


@pytest.mark.parametrize("name", ["", "../host", "a/../b", "/", "/no/such", "a//b", "none", "a\nb"])
def test_a_name_that_is_no_image_is_an_error(images: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="image"):
        resolver(images, tmp_path).resolve(name)


def test_only_listed_folders_of_this_machine_are_images(images: Path, tmp_path: Path) -> None:
    (tmp_path / "secret" / "usr").mkdir(parents=True)
    with pytest.raises(ConfigError, match="rootfs"):
        resolver(images, tmp_path, rootfs=[str(tmp_path / "other")]).resolve(str(tmp_path / "secret"))


def test_broken_json_is_named(images: Path, tmp_path: Path) -> None:
    write(images, "broken/image.json", "{")
    with pytest.raises(ConfigError, match=r"broken/image\.json is not JSON"):
        resolver(images, tmp_path).resolve("broken")


def test_the_same_image_has_one_skeleton_and_the_agent_in_it(images: Path, tmp_path: Path) -> None:
    found = resolver(images, tmp_path)
    first, second = found.resolve("host"), found.resolve("host")
    assert first == second
    assert [p.name for p in (tmp_path / "s").iterdir()] == [Path(first.overlays[0].lowers[0]).name]
    passwd = (Path(first.overlays[0].lowers[0]) / "etc/passwd").read_text()
    assert f"agent:x:{AGENT_ID}:{AGENT_ID}:" in passwd
    assert "/private" not in "".join(str(p) for p in Path(first.overlays[0].lowers[0]).rglob("*"))
