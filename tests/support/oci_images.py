"""Image files made by hand: layers of tar entries, in the OCI layout or as `docker save` writes it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BUSYBOX = shutil.which("busybox")
"""A static one is all that a small image needs."""

_APPLETS = ("sh", "cat", "ls", "id", "stat", "env", "test", "rm", "touch", "mkdir", "readlink", "find", "ln")


def entry(name: str, content: bytes | str = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One file of a layer; `more` are attributes of the `TarInfo` (`type`, `mode`, `uid`, `linkname`, ...)."""
    data = content.encode() if isinstance(content, str) else content
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for attribute, value in more.items():
        setattr(info, attribute, value)
    return info, data


def folder(name: str, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=more.pop("mode", 0o755), **more)


def link(name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=to)


def layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """The tar of a layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def busybox_layer() -> bytes:
    """A root file system of busybox alone."""
    assert BUSYBOX is not None
    applets = [link(f"bin/{name}", "busybox") for name in _APPLETS]
    return layer(
        folder("bin"),
        entry("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755),
        *applets,
        folder("etc"),
        entry("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n", mode=0o644),
        entry("etc/group", "root:x:0:\n", mode=0o644),
        folder("usr"),
    )


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config_of(layers: Sequence[bytes], env: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": list(env), "WorkingDir": "/testbed", "User": "1000"},
        "rootfs": {"type": "layers", "diff_ids": [digest(tar) for tar in layers]},
    }


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def write_layout(
    path: Path,
    layers: Sequence[bytes],
    *,
    env: Sequence[str] = (),
    names: Iterable[str] = ("latest",),
    compress: Callable[[bytes], bytes] = gzipped,
    **changes: Any,
) -> Path:
    """A folder in the OCI layout, its layers compressed. `changes` replace parts of its configuration."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        (blobs / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(data), "size": len(data)}

    def put_json(data: Mapping[str, Any], kind: str) -> dict[str, Any]:
        return put(json.dumps(data).encode(), kind)

    packed = [put(compress(tar), "layer.v1.tar") for tar in layers]
    config = put_json(config_of(layers, env) | changes, "config.v1+json")
    manifest = put_json({"schemaVersion": 2, "config": config, "layers": packed}, "manifest.v1+json")
    manifests = [manifest | {"annotations": {"org.opencontainers.image.ref.name": name}} for name in names]
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return path


def write_archive(path: Path, images: Mapping[str, Sequence[bytes]], *, env: Sequence[str] = ()) -> Path:
    """A `docker save` archive with these images, by tag. A layer that comes again is a link, as from Docker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    with tarfile.open(path, "w") as tar:
        for number, (tag, layers) in enumerate(images.items()):
            config = json.dumps(config_of(layers, env)).encode()
            config_name = f"{digest(config).removeprefix('sha256:')}.json"
            names: list[str] = []
            for index, data in enumerate(layers):
                names.append(f"{number}-{index}/layer.tar")
                if digest(data) in seen:
                    info, content = link(names[-1], f"../{seen[digest(data)]}")
                else:
                    info, content = entry(names[-1], data)
                seen.setdefault(digest(data), names[-1])
                tar.addfile(info, io.BytesIO(content))
            info, content = entry(config_name, config)
            tar.addfile(info, io.BytesIO(content))
            manifest.append({"Config": config_name, "RepoTags": [tag], "Layers": names})
        info, content = entry("manifest.json", json.dumps(manifest))
        tar.addfile(info, io.BytesIO(content))
    return path
