"""From an image name to the folders a box's root is put together from.

    host                         the host's own /usr with a small /etc of our own
    /absolute/folder             a root file system
    NAME                         IMAGES/NAME/image.json (see docs/sandboxes.md), or an image file: an OCI layout or a
                                 `docker save` archive, IMAGES/NAME, IMAGES/NAME.tar, or as `archives` says

A small *skeleton* of generated files lies on top: users, hosts, resolver, git's safe.directory.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from rollwright.errors import ConfigError
from rollwright.sandboxes import Mount
from rollwright.sandboxes.namespaces.idmap import AGENT_ID
from rollwright.sandboxes.namespaces.layers import Layers

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SCHEMA = 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*(/[A-Za-z0-9_][A-Za-z0-9_.:@+-]*)*")
_TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
_HOST_ETC = (
    "alternatives",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "debian_version",
    "perl",
    "pki",
    "protocols",
    "services",
    "ssl",
    "terminfo",
    "timezone",
)
_PLACES = ("etc", "home", "mnt", "opt", "srv", "root", "run", "tmp", "var", "dev", "proc", "sys")
_ID = re.compile(r"[0-9]{1,5}")
_MOST_ID = 65535
_HOME = re.compile(r"/[^:\0\n]*")
_TEXT_LIMIT = 1 << 20
_SAFE_DIRECTORY = "[safe]\n\tdirectory = *\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user inside the box."""

    name: str
    uid: int
    gid: int
    home: str

    def env(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "PATH": DEFAULT_PATH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """One writable view inside the box over read-only folders of the host, topmost first."""

    target: str
    lowers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A resolved image."""

    name: str
    overlays: tuple[Overlay, ...]
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]
    users: Mapping[str, User]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    base: Path | None
    """None: the host."""
    layers: tuple[Path, ...]
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]


class Images:
    """The images under `folder`, and the image files of `archives` by name. Skeletons are kept under `skeletons`.

    Everything here blocks, so it is called in a thread.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        skeletons: Path,
        layers: Layers,
        rootfs: Sequence[str] = (),
        archives: Mapping[str, Path] | None = None,
    ) -> None:
        self._folder = folder
        self._skeletons = skeletons
        self._layers = layers
        self._rootfs = frozenset(rootfs)
        self._archives = dict(archives or {})

    def ready(self, name: str) -> bool:
        """Whether `resolve` has nothing to unpack. Raises `ConfigError`."""
        file = self._image_file(name)
        return file is None or self._layers.ready(self._layers.describe(file, name))

    def resolve(self, name: str) -> Image:
        """Raises `ConfigError` that names the image, the field, and where it was looked for."""
        parts = self._parts(name)
        files = dict(_users_of(parts))
        agent = _find_user(files["etc/passwd"], "agent")
        if agent is None:
            agent = User(name="agent", uid=AGENT_ID, gid=AGENT_ID, home="/home/agent")
            files = {path: _without("agent", text) for path, text in files.items()}
            files["etc/passwd"] += f"agent:x:{AGENT_ID}:{AGENT_ID}::/home/agent:/bin/sh\n"
            files["etc/group"] += f"agent:x:{AGENT_ID}:\n"
        files["etc/hosts"] = "127.0.0.1 localhost box\n::1 localhost\n"
        files["etc/hostname"] = "box\n"
        files["etc/resolv.conf"] = ""
        files["etc/gitconfig"] = _SAFE_DIRECTORY
        skeleton = self._skeleton(files, of_host=parts.base is None)
        root = User(name="root", uid=0, gid=0, home="/root")
        return Image(
            name=name,
            overlays=_overlays(parts, skeleton),
            env=parts.env,
            mounts=parts.mounts,
            users={"root": root, "agent": agent},
        )

    def digest(self, name: str) -> str:
        """Of the image.json or the image file's configuration; empty for an image without. Raises `ConfigError`."""
        file = self._image_file(name)
        if file is not None:
            return self._layers.describe(file, name).digest
        self._parts(name)
        if name == "host" or name.startswith("/") or self._folder is None:
            return ""
        data = (self._folder / name / "image.json").read_bytes()
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def _parts(self, name: str) -> _Parts:
        if name == "host":
            return _Parts(base=None, layers=(), env={}, mounts=())
        if name.startswith("/"):
            if name not in self._rootfs:
                raise ConfigError(
                    f"image {name!r} is not one of the root file systems of sandbox.namespaces.rootfs", image=name
                )
            if not (Path(name) / "usr").is_dir():
                raise ConfigError(f"image {name!r}: no root file system there (it has no usr folder)", image=name)
            if Path(name).samefile("/"):
                raise ConfigError(f"image {name!r} would show all files of this machine; use 'host'", image=name)
            return _Parts(base=Path(name), layers=(), env={}, mounts=())
        file = self._image_file(name)
        if file is not None:
            image = self._layers.describe(file, name)
            # Of a layer that is there twice the upper place says it all, and an overlay takes a folder once only.
            layers = tuple(dict.fromkeys(reversed(self._layers.unpacked(image, name))))
            return _Parts(base=layers[-1], layers=layers[:-1], env=image.env, mounts=())
        if self._folder is None:
            raise ConfigError(
                f"image {name!r}: no folder of images is set (sandbox.namespaces.images), and "
                "sandbox.namespaces.archives does not name it",
                image=name,
            )
        return _read(name, self._folder / name / "image.json")

    def _image_file(self, name: str) -> Path | None:
        """The image file of this name. None: it is another kind of image, or there is none."""
        if name == "host" or name.startswith("/"):
            return None
        if name in self._archives:
            return self._archives[name]
        if not _NAME.fullmatch(name) or ".." in name.split("/"):
            raise ConfigError(f"image {name!r} is not a usable name", image=name)
        if self._folder is None or (self._folder / name / "image.json").exists():
            return None
        plain = name.removesuffix(":latest")
        for form in dict.fromkeys((name, plain, *(n.replace("/", "_").replace(":", "_") for n in (name, plain)))):
            for place in (self._folder / form, self._folder / f"{form}.tar"):
                if place.is_file() if place.suffix == ".tar" else (place / "index.json").is_file():
                    return place
        return None

    def _skeleton(self, files: Mapping[str, str], *, of_host: bool) -> Path:
        """The folder with these files; made once, found again by its content."""
        sources: list[tuple[str, int]] = []
        if of_host:
            for entry in _host_etc():
                sources.append((str(entry), entry.lstat().st_mtime_ns))
        digest = hashlib.sha256(repr((sorted(files.items()), sources, _TOP_FOLDERS, _PLACES)).encode())
        final = self._skeletons / digest.hexdigest()[:24]
        if final.is_dir():
            return final
        self._skeletons.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=self._skeletons))
        fresh.chmod(0o755)
        (fresh / "etc").mkdir(mode=0o755)
        if of_host:
            _copy_host(fresh)
        for path, text in files.items():
            (fresh / path).write_text(text)
            (fresh / path).chmod(0o644)
        try:
            fresh.rename(final)
        except OSError:
            # Somebody else made the same one in the meantime.
            shutil.rmtree(fresh)
        return final


def _host_etc() -> list[Path]:
    etc = Path("/etc")
    names = [*_HOST_ETC, *(p.name for p in etc.glob("python3*")), *(p.name for p in etc.glob("java*"))]
    return [etc / name for name in sorted(names) if os.path.lexists(etc / name)]


def _copy_host(skeleton: Path) -> None:
    for place in _PLACES:
        (skeleton / place).mkdir(mode=0o755, exist_ok=True)
    for name in _TOP_FOLDERS:
        source = Path("/") / name
        if source.is_symlink():
            (skeleton / name).symlink_to(source.readlink())
        elif source.is_dir():
            (skeleton / name).mkdir(mode=0o755)
    for source in _host_etc():
        target = skeleton / "etc" / source.name
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=_unreadable)
        elif os.access(source, os.R_OK):
            shutil.copy(source, target)


def _unreadable(folder: str, names: list[str]) -> list[str]:
    """Private keys stay on the host, as does what we may not read anyway."""
    paths = {name: Path(folder) / name for name in names}
    return [
        name for name, path in paths.items() if name == "private" or not (path.is_symlink() or os.access(path, os.R_OK))
    ]


def _overlays(parts: _Parts, skeleton: Path) -> tuple[Overlay, ...]:
    layers = [str(layer) for layer in parts.layers]
    if parts.base is not None:
        return (Overlay(target="/", lowers=(str(skeleton), *layers, str(parts.base))),)
    overlays = [Overlay(target="/", lowers=(str(skeleton), *layers))]
    for name in _TOP_FOLDERS:
        source = Path("/") / name
        if source.is_dir() and not source.is_symlink():
            above = [str(layer / name) for layer in parts.layers if (layer / name).is_dir()]
            overlays.append(Overlay(target=f"/{name}", lowers=(*above, str(source))))
    return tuple(overlays)


def _users_of(parts: _Parts) -> dict[str, str]:
    """The image's own passwd and group, from the topmost folder that has them."""
    found = {
        "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": "root:x:0:\nnogroup:x:65534:\n",
    }
    folders = (*parts.layers, *((parts.base,) if parts.base else ()))
    for name in found:
        for folder in folders:
            text = _own_text(folder / "etc", name)
            if text:
                found[name] = text if text.endswith("\n") else text + "\n"
            if text is not None:
                break
    return {f"etc/{name}": text for name, text in found.items()}


def _own_text(folder: Path, name: str) -> str | None:
    """A plain file of an image, whose links would lead to files of ours. None: look further down; "": it has none."""
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return ""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        return "" if _is_opaque(at) else None
    except OSError:
        return ""
    finally:
        os.close(at)
    with os.fdopen(fd, "rb") as file:
        return file.read(_TEXT_LIMIT).decode(errors="replace") if stat.S_ISREG(os.fstat(fd).st_mode) else ""


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    except OSError:
        return False


def _find_user(passwd: str, name: str) -> User | None:
    """One with an id of its own and a home that is a plain path: what an image says may be anything."""
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) >= 6 and fields[0] == name and all(_ID.fullmatch(number) for number in fields[2:4]):
            uid, gid, home = int(fields[2]), int(fields[3]), fields[5] or "/"
            if 0 < uid <= _MOST_ID and gid <= _MOST_ID and _HOME.fullmatch(home) and ".." not in home.split("/"):
                return User(name=name, uid=uid, gid=gid, home=home)
    return None


def _without(name: str, text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"{name}:"))


# ----------------------------------------------------------------------------- image.json


def _read(name: str, path: Path) -> _Parts:
    def wrong(field: str, what: str) -> ConfigError:
        return ConfigError(f"image {name!r}: {path}: {field} {what}", image=name, field=field)

    try:
        raw: object = orjson.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"image {name!r}: no {path}: {e.strerror}", image=name) from e
    except ValueError as e:
        raise ConfigError(f"image {name!r}: {path} is not JSON: {e}", image=name) from e
    if not isinstance(raw, dict):
        raise ConfigError(f"image {name!r}: {path} is not an object", image=name)
    data = cast("dict[str, Any]", raw)
    unknown = set(data) - {"schema", "base", "layers", "env", "mounts"}
    if unknown:
        raise wrong(sorted(unknown)[0], "is not a field of an image")
    if data.get("schema") != _SCHEMA:
        raise wrong("schema", f"must be {_SCHEMA}")
    base = data.get("base")
    if not isinstance(base, str):
        raise wrong("base", 'must be "host" or a folder')
    env = data.get("env", {})
    if not _is_texts(env):
        raise wrong("env", "must map names to text")
    layers = [_folder(path, entry, "layers", wrong) for entry in _list(data, "layers", wrong)]
    mounts: list[Mount] = []
    for entry in _list(data, "mounts", wrong):
        if not _is_texts(entry) or set(entry) != {"source", "target"}:
            raise wrong("mounts", "must hold objects of source and target")
        source = Path(entry["source"])
        if not (source.is_absolute() and source.exists() and entry["target"].startswith("/")):
            raise wrong("mounts", f"needs an existing absolute source and an absolute target, not {entry}")
        mounts.append(Mount(source=source, target=entry["target"]))
    return _Parts(
        base=None if base == "host" else _folder(path, base, "base", wrong),
        layers=tuple(layers),
        env=env,
        mounts=tuple(mounts),
    )


def _is_texts(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    items = cast("dict[object, object]", value)
    return all(isinstance(k, str) and isinstance(v, str) for k, v in items.items())


def _list(data: Mapping[str, Any], field: str, wrong: Any) -> Sequence[Any]:
    value = data.get(field, [])
    if not isinstance(value, list):
        raise wrong(field, "must be a list")
    return cast("list[Any]", value)


def _folder(path: Path, entry: object, field: str, wrong: Any) -> Path:
    if not isinstance(entry, str):
        raise wrong(field, "must name folders")
    folder = (path.parent / entry).resolve()
    if not folder.is_dir():
        raise wrong(field, f"names {entry!r}, which is not a folder")
    return folder
