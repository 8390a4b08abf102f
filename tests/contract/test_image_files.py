"""Image files (OCI layouts, `docker save` archives) as images of namespaces boxes, without a container daemon."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from rollwright.errors import ConfigError, PathNotFound
from rollwright.sandboxes import Mount, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.testing.sandbox_contract import shell_job
from support.oci_images import BUSYBOX, busybox_layer, entry, folder, layer, link, write_archive, write_layout

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(BUSYBOX is None, reason="needs a static busybox to make images of"),
]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
async def provider(images: Path, cache: Path, tmp_path: Path) -> AsyncIterator[NamespacesProvider]:
    async with NamespacesProvider(images=images, cache_dir=cache, state_dir=tmp_path / "state") as provider:
        yield provider


def unpacked(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("*/*") if path.is_dir())


async def seen(provider: NamespacesProvider, image: str, script: str, *, user: str = "root") -> str:
    box = await provider.create(SandboxSpec(image=image, disk_mb=64), key=image)
    result = await box.exec(["sh", "-c", script], user=user)
    await box.close()
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


LOWER = layer(
    folder("opt"),
    folder("opt/gone"),
    entry("opt/gone/file", "x"),
    folder("opt/hollow"),
    entry("opt/hollow/old", "x"),
    folder("opt/again"),
    entry("opt/again/old", "x"),
    entry("opt/kept", "kept"),
    entry("opt/changed", "old"),
    entry("opt/hidden", "x"),
    folder("testbed", uid=1000, gid=1000),
    entry("testbed/code.py", "print()\n", uid=1000, gid=1000, mode=0o640, mtime=1_000_000_000),
    entry("opt/other-name", type=tarfile.LNKTYPE, linkname="opt/kept"),
    entry("usr/bin/tool", "#!/bin/sh\necho tool $GREETING\n", mode=0o755),
)
UPPER = layer(
    entry("opt/.wh.gone"),
    entry("opt/.wh.hidden"),
    folder("opt/hollow"),
    entry("opt/hollow/.wh..wh..opq"),
    entry("opt/hollow/new", "new"),
    # The mark for what was there before may also come after what is there now.
    folder("opt/again"),
    entry("opt/again/new", "new"),
    entry("opt/.wh.again"),
    entry("opt/changed", "new"),
    entry("opt/.wh.never-there"),
)
LOOK = "cd /opt && ls && cat hollow/* again/* kept changed other-name && ls hollow again"
SHOWN = "again\nchanged\nhollow\nkept\nother-name\nnewnewkeptnewkeptagain:\nnew\n\nhollow:\nnew\n"


async def test_layers_of_a_layout_show_as_one_file_system_and_are_shared(
    provider: NamespacesProvider, images: Path, cache: Path
) -> None:
    base = busybox_layer()
    env = ["PATH=/usr/bin:/bin", "GREETING=hello", "HOME=/root", "not an assignment"]
    write_layout(images / "swebench" / "a.tar-less", [base, LOWER, UPPER], env=env)
    write_layout(images / "swebench" / "b", [base, LOWER])
    await provider.check_image("swebench/a.tar-less:latest")
    assert len(unpacked(cache)) == 3
    assert await seen(provider, "swebench/a.tar-less:latest", LOOK) == SHOWN
    assert await seen(provider, "swebench/a.tar-less", "tool; echo $PATH $HOME; id -un", user="agent") == (
        "tool hello\n/usr/bin:/bin /home/agent\nagent\n"
    )
    told = (await seen(provider, "swebench/b", "stat -c '%u %a %Y' /testbed/code.py; cat /opt/hidden")).split("\n")
    if (await provider.probe()).users:
        assert told[0] == "1000 640 1000000000"
    assert told[1] == "x"
    assert len(unpacked(cache)) == 3, "the same layers serve both"


async def test_what_a_box_writes_stays_in_it(provider: NamespacesProvider, images: Path) -> None:
    write_layout(images / "a", [busybox_layer(), LOWER])
    first = await provider.create(SandboxSpec(image="a", disk_mb=64), key="first")
    second = await provider.create(SandboxSpec(image="a", disk_mb=64), key="second")
    change = "echo mine >/opt/kept && rm -r /opt/gone && mkdir /opt/gone && rm /bin/stat"
    assert (await first.exec(["sh", "-c", change])).exit_code == 0
    assert await second.get("/opt/kept") == b"kept"
    assert await second.get("/opt/gone/file") == b"x"
    assert (await second.exec(["stat", "/"])).exit_code == 0
    job = await first.run(shell_job("ls /opt/gone; cat /opt/kept"))
    assert (job.exit_code, job.stdout.data()) == (0, b"mine\n")


async def test_a_saved_archive_is_read_in_place_and_found_by_its_setting_or_its_name(
    images: Path, cache: Path, tmp_path: Path
) -> None:
    base = busybox_layer()
    names = {"x/sweb.eval:1": [base, LOWER], "x/sweb.eval:latest": [base, LOWER, UPPER, LOWER]}
    elsewhere = write_archive(tmp_path / "elsewhere" / "two.tar", names, env=["GREETING=saved"])
    write_archive(images / "x_named_v1.tar", {"whatever:latest": [base, LOWER]})
    archives = {"x/sweb.eval:1": elsewhere, "x/sweb.eval": elsewhere, "x/third": elsewhere}
    async with NamespacesProvider(
        images=images, archives=archives, cache_dir=cache, state_dir=tmp_path / "state"
    ) as provider:
        assert await seen(provider, "x/sweb.eval:1", "cat /opt/changed; tool") == "oldtool saved\n"
        assert await seen(provider, "x/sweb.eval", "cat /opt/changed; ls /opt/gone") == "oldfile\n"
        assert await seen(provider, "x/named:v1", "cat /opt/kept") == "kept"
        assert await provider.image_digest("x/sweb.eval") != await provider.image_digest("x/sweb.eval:1")
        with pytest.raises(ConfigError, match=r"x/third.*2 images.*x/sweb\.eval:1"):
            await provider.check_image("x/third")


async def test_an_image_that_is_not_there_says_where_it_was_looked_for(provider: NamespacesProvider) -> None:
    with pytest.raises(ConfigError, match=r"no/such.*images/no/such"):
        await provider.check_image("no/such")


async def test_links_and_names_of_a_layer_lead_nowhere(
    provider: NamespacesProvider, images: Path, cache: Path, tmp_path: Path
) -> None:
    """Everything here would reach this machine's files if a layer were just unpacked into a folder."""
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0:secret:/root:/bin/sh\n")
    target = tmp_path / "target"
    target.mkdir()
    mean = layer(
        folder("etc"),
        link("etc/passwd", str(secret)),
        link("out", str(target)),
        entry("out/through-a-link", "x"),
        link("up", "../../../../../../../.." + str(target)),
        entry("up/through-dots", "x"),
        entry(str(target) + "/absolute", "x"),
        link("opt", str(target)),
        entry("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0, mode=0o666),
        entry("pipe", type=tarfile.FIFOTYPE, mode=0o644),
        entry("usr/bin/setuid", "x", mode=0o4755, uid=4_000_000_000),
    )
    write_layout(images / "mean", [busybox_layer(), mean])
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "file").write_text("bundle")
    mounts = (Mount(source=tmp_path / "bundle", target="/opt/bundle"),)
    box = await provider.create(SandboxSpec(image="mean", disk_mb=64, mounts=mounts), key="mean")
    told = await box.exec(["sh", "-c", "cat /etc/passwd; ls -l /disk; cat /opt/bundle/file"])
    assert b"secret" not in told.stdout
    assert told.stdout.endswith(b"bundle")
    assert list(target.iterdir()) == []
    with pytest.raises(PathNotFound):
        await box.get("/disk")
    if (await provider.probe()).users:
        assert (await box.exec(["stat", "-c", "%u", "/usr/bin/setuid"])).stdout == b"65534\n"
    # On the host nobody else may run what an image brings.
    assert {path.parent.stat().st_mode & 0o777 for path in unpacked(cache)} == {0o700}
    assert (await box.exec(["cat", "/proc/self/mountinfo"])).stdout.count(str(tmp_path / "bundle").encode()) == 0


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry("../outside", "x")], "outside"),
        ([entry("a/../../outside", "x")], "outside"),
        ([entry("hard", type=tarfile.LNKTYPE, linkname="../../etc/passwd")], "passwd"),
        ([entry("hard", type=tarfile.LNKTYPE, linkname="nowhere")], "hard"),
        ([entry("file", "x"), entry("file/below", "x")], "file/below"),
        ([entry("a/.wh...")], "whiteout"),
        ([entry("n" * 300, "x")], "n" * 300),
    ],
)
async def test_a_layer_that_cannot_be_meant_well_is_refused_and_leaves_nothing(
    provider: NamespacesProvider, images: Path, cache: Path, entries: list[tuple[tarfile.TarInfo, bytes]], said: str
) -> None:
    write_layout(images / "bad", [layer(folder("a"), entry("a/first", "x"), *entries)])
    with pytest.raises(ConfigError, match=rf"image 'bad'.*{said}"):
        await provider.check_image("bad")
    assert not any(path.name != "a" and any(path.iterdir()) for path in unpacked(cache))
    assert not (cache / "outside").exists()


async def test_layers_may_be_compressed_with_zstd_or_not_at_all(provider: NamespacesProvider, images: Path) -> None:
    write_layout(images / "plain", [busybox_layer(), LOWER], compress=bytes)
    assert await seen(provider, "plain", "cat /opt/kept") == "kept"

    def zstd(data: bytes) -> bytes:
        return subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True).stdout

    other = layer(entry("opt/other", "other"))
    if shutil.which("zstd") is None:
        # Its first bytes are enough to say what is missing.
        write_layout(images / "zstd", [other], compress=lambda data: b"\x28\xb5\x2f\xfd" + data)
        with pytest.raises(ConfigError, match="zstd program"):
            await provider.check_image("zstd")
        return
    write_layout(images / "zstd", [busybox_layer(), other], compress=zstd)
    assert await seen(provider, "zstd", "cat /opt/other") == "other"


async def test_a_damaged_layer_is_refused(provider: NamespacesProvider, images: Path, cache: Path) -> None:
    write_layout(images / "torn", [LOWER], rootfs={"type": "layers", "diff_ids": ["sha256:" + "0" * 64]})
    with pytest.raises(ConfigError, match=r"torn.*damaged.*sha256:0000"):
        await provider.check_image("torn")
    short = write_archive(images / "short.tar", {"short:latest": [LOWER]})
    os.truncate(short, 1024)
    with pytest.raises(ConfigError, match="short"):
        await provider.check_image("short")


async def test_two_that_need_a_layer_at_once_unpack_it_once(images: Path, cache: Path, tmp_path: Path) -> None:
    """One of them in another process."""
    many = layer(*(entry(f"many/{n}", b"x" * 100) for n in range(600)))
    write_layout(images / "many", [busybox_layer(), many])
    script = """
import anyio, sys
from rollwright.sandboxes.namespaces import NamespacesProvider
async def main():
    async with NamespacesProvider(images=sys.argv[1], cache_dir=sys.argv[2], state_dir=sys.argv[3]) as provider:
        await provider.check_image("many")
anyio.run(main)
"""
    argv = [sys.executable, "-c", script, str(images), str(cache), str(tmp_path / "other")]
    async with NamespacesProvider(images=images, cache_dir=cache, state_dir=tmp_path / "state") as provider:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.run_process, argv)
            for _ in range(3):
                tasks.start_soon(provider.check_image, "many")
        assert (
            await seen(provider, "many", "ls /many | while read f; do echo; done | find /many -type f | ls /many") != ""
        )
        assert len((await seen(provider, "many", "find /many -type f")).split()) == 600
    assert len(unpacked(cache)) == 2
    assert await anyio.to_thread.run_sync(lambda: list(cache.glob("*/*.lock"))) == []


async def test_an_unpacking_that_was_killed_is_begun_again(
    provider: NamespacesProvider, images: Path, cache: Path
) -> None:
    write_layout(images / "a", [busybox_layer(), LOWER])
    await provider.check_image("a")
    # As a kill leaves it: everything there, but not under its name.
    for path in unpacked(cache):
        path.rename(path.with_suffix(".new"))
        (path.with_suffix(".new") / "stale").write_text("x")
    assert await seen(provider, "a", "cat /opt/kept; ls /") != ""
    assert "stale" not in await seen(provider, "a", "ls /")


@pytest.mark.skipif(shutil.which("umoci") is None, reason="needs umoci (apt install umoci)")
async def test_an_image_made_by_umoci_is_one(provider: NamespacesProvider, images: Path, tmp_path: Path) -> None:
    def umoci(*arguments: str) -> None:
        subprocess.run(["umoci", *arguments], check=True, capture_output=True, cwd=tmp_path)

    layout, root = images / "made", tmp_path / "made-root"
    (root / "bin").mkdir(parents=True)
    (root / "usr").mkdir()
    shutil.copy(str(BUSYBOX), root / "bin/busybox")
    for name in ("sh", "cat", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "gone").write_text("x")
    umoci("init", "--layout", str(layout))
    for step in ("new", "insert", "rm"):
        match step:
            case "new":
                umoci("new", "--image", f"{layout}:latest")
            case "insert":
                umoci("insert", "--rootless", "--image", f"{layout}:latest", str(root), "/")
            case _:
                umoci("insert", "--rootless", "--image", f"{layout}:latest", "--whiteout", "/gone")
    umoci("config", "--image", f"{layout}:latest", "--config.env", "PATH=/bin", "--config.env", "MADE=by umoci")
    assert await seen(provider, "made", "echo $MADE; cat /gone || ls /gone 2>/dev/null || true") == "by umoci\n"


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo (apt install skopeo)")
@pytest.mark.parametrize("form", ["docker-archive:{}.tar:x/copied:latest", "oci:{}:latest", "oci-archive:{}.tar"])
async def test_what_skopeo_writes_can_be_used(
    provider: NamespacesProvider, images: Path, tmp_path: Path, form: str
) -> None:
    source = write_layout(tmp_path / "source", [busybox_layer(), LOWER, UPPER], env=["PATH=/bin", "A=b=c"])
    target = form.format(images / "copied")
    copy = ["skopeo", "--insecure-policy", "copy", f"oci:{source}:latest", target]
    done = await anyio.to_thread.run_sync(lambda: subprocess.run(copy, capture_output=True, check=False))
    assert done.returncode == 0, done.stderr
    assert await seen(provider, "copied", f"{LOOK}; echo $A") == SHOWN + "b=c\n"


async def test_an_image_for_another_machine_or_a_compressed_archive_is_named(
    provider: NamespacesProvider, images: Path
) -> None:
    layout = write_layout(images / "other", [LOWER])
    index = json.loads((layout / "index.json").read_text())
    nested = json.dumps(
        {"manifests": [index["manifests"][0] | {"platform": {"os": "linux", "architecture": "riscv64"}}]}
    ).encode()
    name = hashlib.sha256(nested).hexdigest()
    (layout / "blobs/sha256" / name).write_bytes(nested)
    (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{name}"}]}))
    with pytest.raises(ConfigError, match=r"not for linux/.*linux/riscv64"):
        await provider.check_image("other")
    (images / "packed.tar").write_bytes(gzip.compress(b"x" * 100))
    with pytest.raises(ConfigError, match=r"packed.*gunzip"):
        await provider.check_image("packed")
