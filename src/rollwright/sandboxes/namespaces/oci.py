"""What an image file says of itself: its configuration and where its layers lie. Nothing is unpacked here.

    a folder or tar archive in the OCI layout     skopeo copy docker://NAME oci:FOLDER, or oci-archive:FILE
    a `docker save` archive                       docker save NAME -o FILE, or skopeo copy ... docker-archive:FILE

Runs in a lean process of its own (see `unpack`), because all of it is untrusted.
"""

# A lean process, which does not load pathlib.
# ruff: noqa: PTH112, PTH113, PTH118, PTH123, PTH202

from __future__ import annotations

import contextlib
import hashlib
import json
import os.path
import posixpath
import re
import tarfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

_JSON_LIMIT = 8 << 20
_MEMBERS_LIMIT = 20_000
"""Files of an archive: a few for each layer."""
_LAYERS_LIMIT = 400
"""What one overlay can be made of, and some for our own."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COMPRESSIONS = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ": "unxz", b"BZh": "bunzip2"}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OF_THE_USER = ("HOME", "USER", "LOGNAME")
"""What an image sets for its own user is not true of the users of a box."""
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


class ImageError(Exception):
    """The image cannot be used; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A range of a file."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: the (possibly compressed) tar, and the digest of the tar itself."""

    blob: Blob
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One image."""

    digest: str
    """Of the configuration, which has the digests of all layers in it: what Docker calls the image's id."""
    layers: tuple[Layer, ...]
    """Lowest first."""
    env: Mapping[str, str]


def describe(path: str, name: str, machine: str) -> Description:
    """Read the image of this name, for this machine (as `uname -m` calls it). Raises `ImageError`, `OSError`."""
    with _opened(path) as files:
        try:
            if files.has("manifest.json"):
                return _of_docker(files, name)
            if files.has("index.json"):
                return _of_layout(files, name, machine)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as e:
            raise ImageError(f"its description is malformed ({type(e).__name__}: {e})") from e
    raise ImageError("it is neither an OCI layout (index.json) nor a `docker save` archive (manifest.json)")


# ----------------------------------------------------------------------------- files


class _Files(Protocol):
    """A folder or an archive."""

    def has(self, name: str) -> bool: ...

    def blob(self, name: str) -> Blob:
        """Raises `ImageError` when it is not there."""
        ...


@contextlib.contextmanager
def _opened(path: str) -> Generator[_Files]:
    if os.path.isdir(path):
        yield _Folder(path)
        return
    with open(path, "rb") as file:
        start = file.read(8)
        for magic, tool in _COMPRESSIONS.items():
            if start.startswith(magic):
                raise ImageError(f"it is compressed, but is read in place; decompress it first with `{tool}`")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
                yield _Archive(path, tar)
        except tarfile.TarError as e:
            raise ImageError(f"it is neither a folder nor a readable tar archive ({e})") from e


class _Folder:
    def __init__(self, path: str) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        return os.path.isfile(os.path.join(self._path, _inner(name)))

    def blob(self, name: str) -> Blob:
        path = os.path.join(self._path, _inner(name))
        if not os.path.isfile(path):
            raise ImageError(f"it is incomplete: there is no {name}")
        return Blob(path=path, offset=0, size=os.path.getsize(path))


class _Archive:
    def __init__(self, path: str, tar: tarfile.TarFile) -> None:
        self._path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        for member in tar:
            if len(self._members) >= _MEMBERS_LIMIT:
                raise ImageError(f"the archive has more than {_MEMBERS_LIMIT} files; is it a root file system?")
            self._members[_inner(member.name)] = member

    def _find(self, name: str) -> tarfile.TarInfo | None:
        found = self._members.get(_inner(name))
        if found is not None and found.issym():
            # Older Dockers save a layer that is there twice as a link.
            found = self._members.get(_inner(posixpath.join(posixpath.dirname(name), found.linkname)))
        return found

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def blob(self, name: str) -> Blob:
        found = self._find(name)
        if found is None or not found.isreg() or found.issparse():
            raise ImageError(f"it is incomplete: there is no plain file {name}")
        return Blob(path=self._path, offset=found.offset_data, size=found.size)


def _inner(name: str) -> str:
    """A name inside the image, made plain. Raises `ImageError` for one that leads out."""
    plain = posixpath.normpath(name)
    if plain.startswith(("/", "..")) or "\0" in plain:
        raise ImageError(f"it names a file outside of itself: {name!r}")
    return plain


def _read(blob: Blob) -> bytes:
    if blob.size > _JSON_LIMIT:
        raise ImageError("one of its descriptions is too big")
    with open(blob.path, "rb") as file:
        file.seek(blob.offset)
        return file.read(blob.size)


def _json(data: bytes) -> Any:
    return json.loads(data)


# ----------------------------------------------------------------------------- docker save


def _of_docker(files: _Files, name: str) -> Description:
    entries: list[dict[str, Any]] = _json(_read(files.blob("manifest.json")))
    tags = [list[str](entry.get("RepoTags") or []) for entry in entries]
    entry = entries[_choose(name, tags)]
    config = _read(files.blob(entry["Config"]))
    return _description(config, [files.blob(layer) for layer in entry["Layers"]])


# ----------------------------------------------------------------------------- OCI layout


def _of_layout(files: _Files, name: str, machine: str) -> Description:
    index = _json(_read(files.blob("index.json")))
    manifests: list[dict[str, Any]] = list(index["manifests"])
    found = manifests[_choose(name, [_names_of(manifest) for manifest in manifests])]
    manifest = _json(_get(files, found["digest"]))
    if "manifests" in manifest:
        manifest = _json(_get(files, _for_machine(manifest["manifests"], machine)["digest"]))
    config = _get(files, manifest["config"]["digest"])
    return _description(config, [files.blob(_place(layer["digest"])) for layer in manifest["layers"]])


def _names_of(manifest: Mapping[str, Any]) -> list[str]:
    annotations: Mapping[str, str] = manifest.get("annotations") or {}
    return [annotations[name] for name in _NAMES if name in annotations]


def _for_machine(manifests: Sequence[Mapping[str, Any]], machine: str) -> Mapping[str, Any]:
    wanted = _ARCHITECTURES.get(machine, machine)
    there: list[str] = []
    for manifest in manifests:
        platform: Mapping[str, str] = manifest.get("platform") or {}
        there.append(f"{platform.get('os')}/{platform.get('architecture')}")
        if there[-1] == f"linux/{wanted}":
            return manifest
    raise ImageError(f"it is not for linux/{wanted}, but for {', '.join(there)}")


def _place(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ImageError(f"it names content by {digest!r}; only sha256 digests are known")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _get(files: _Files, digest: str) -> bytes:
    data = _read(files.blob(_place(digest)))
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise ImageError(f"it is damaged: the content of {digest} is another")
    return data


# ----------------------------------------------------------------------------- both


def _choose(name: str, names: Sequence[Sequence[str]]) -> int:
    """Which one is meant: the only one, or the one of that name."""
    if len(names) == 1:
        return 0
    wanted = _plain_name(name)
    for number, own in enumerate(names):
        if wanted in {_plain_name(n) for n in own} or wanted.rpartition(":")[2] in own:
            return number
    there = ", ".join(n for own in names for n in own) or "none with a name"
    raise ImageError(f"it holds {len(names)} images, and none is called {name!r} ({there})")


def _plain_name(name: str) -> str:
    name = name.removeprefix("docker.io/").removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _description(config: bytes, blobs: Sequence[Blob]) -> Description:
    data = _json(config)
    settings: dict[str, Any] = data.get("config") or {}
    digests: list[str] = list(data["rootfs"]["diff_ids"])
    if len(digests) != len(blobs):
        raise ImageError(f"it has {len(blobs)} layers, but its configuration speaks of {len(digests)}")
    if not digests or len(digests) > _LAYERS_LIMIT:
        raise ImageError(f"it has {len(digests)} layers; there must be 1 to {_LAYERS_LIMIT}")
    for digest in digests:
        _place(digest)
    return Description(
        digest=f"sha256:{hashlib.sha256(config).hexdigest()}",
        layers=tuple(Layer(blob=blob, digest=digest) for blob, digest in zip(blobs, digests, strict=True)),
        env=_env(settings.get("Env") or []),
    )


def _env(entries: Sequence[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if name and equals and "\0" not in entry and name not in _OF_THE_USER:
            env[name] = value
    return env


def to_json(image: Description) -> dict[str, Any]:
    """For `from_json`, in another process."""
    layers = [
        {"path": layer.blob.path, "offset": layer.blob.offset, "size": layer.blob.size, "digest": layer.digest}
        for layer in image.layers
    ]
    return {"digest": image.digest, "env": dict(image.env), "layers": layers}


def from_json(data: Mapping[str, Any]) -> Description:
    layers = tuple(
        Layer(blob=Blob(path=entry["path"], offset=entry["offset"], size=entry["size"]), digest=entry["digest"])
        for entry in cast("list[dict[str, Any]]", data["layers"])
    )
    return Description(digest=data["digest"], env=data["env"], layers=layers)
