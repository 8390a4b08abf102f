"""Build the image folders of the quickstart's tasks: `.cache/quickstart/images/quickstart/<name>/`.

    python examples/quickstart/prepare.py

An image is `layer/workspace/<name>` (the broken repository, one git commit) over the layer `_python` that all share: a
virtual environment with pytest, for the interpreter that this script runs under. What is there already is kept, so a
second run does nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache" / "quickstart"

VENV = "/opt/quickstart"
"""The shared layer's virtual environment, inside the box."""

LEFTOVERS = frozenset({"__pycache__", ".pytest_cache"})

FORMAT = 1
"""Raised when what this script builds changes, so that older image folders are built anew."""

PYTEST = """\
iniconfig==2.3.0 --hash=sha256:f631c04d2c48c52b84d0d0549c99ff3859c98df65b3101406327ecc7d53fbf12
packaging==25.0 --hash=sha256:29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484
pluggy==1.6.0 --hash=sha256:e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746
pygments==2.19.2 --hash=sha256:86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b
pytest==8.4.2 --hash=sha256:872f880de3fc3a5bdc88a11b39c9710c3497a547cfa9320bc3c5e62fbf272e79
"""


class PrepareError(Exception):
    """Something this machine lacks, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sdist:
    """One release of a package on the index."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One entry of tasks.toml."""

    name: str
    table: Mapping[str, Any]

    @property
    def base(self) -> Sdist | None:
        """The release with the bug; None for a repository of our own."""
        return self._release("base")

    @property
    def fixed(self) -> Sdist | None:
        """The release that fixed it; None for a repository of our own."""
        return self._release("fixed")

    def _release(self, key: str) -> Sdist | None:
        sdist = self.table.get("sdist")
        return None if sdist is None else Sdist(package=sdist["package"], **sdist[key])

    @property
    def workdir(self) -> str:
        return f"/workspace/{self.name}"


def sources() -> list[Source]:
    """The entries of tasks.toml, in order."""
    with (HERE / "tasks.toml").open("rb") as file:
        return [Source(name=table["name"], table=table) for table in tomllib.load(file)["task"]]


def say(text: str) -> None:
    print(f"prepare: {text}", file=sys.stderr, flush=True)


def run(argv: list[str], *, why: str, **keywords: Any) -> None:
    """Run a command; when it fails, the error is `why` and the end of what it wrote."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **keywords)
    except FileNotFoundError:
        raise PrepareError(f"{why}: the program {argv[0]!r} is not installed") from None
    if done.returncode != 0:
        output = done.stdout.decode(errors="replace").strip().splitlines()
        raise PrepareError(
            "\n".join([f"{why}: exit code {done.returncode} of {' '.join(argv[:4])} ...", *output[-15:]])
        )


def pip(*arguments: str, why: str) -> None:
    """pip of this interpreter, so that the user's index, proxy and certificate settings hold."""
    run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], why=why)


@contextmanager
def arriving(target: Path) -> Iterator[Path]:
    """A folder to fill; it appears at `target` in one step when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        new = Path(name) / "new"
        new.mkdir()
        yield new
        new.chmod(0o755)
        if target.exists():
            target.rename(Path(name) / "old")
        new.rename(target)


# --------------------------------------------------------------------------- source code


def fetch(sdist: Sdist, cache: Path) -> Path:
    """The archive of a release, from the cache or the index. Its digest is checked either way."""
    folder = cache / "sdists" / f"{sdist.package}-{sdist.version}"
    if not folder.is_dir():
        say(f"fetching {sdist.package} {sdist.version}")
        with arriving(folder) as new:
            pip(
                "download", "--quiet", "--no-deps", "--no-binary", sdist.package, "--dest", str(new),
                f"{sdist.package}=={sdist.version}",
                why=f"could not fetch the source of {sdist.package} {sdist.version}",
            )  # fmt: skip
    archives = list(folder.iterdir())
    found = hashlib.sha256(archives[0].read_bytes()).hexdigest() if len(archives) == 1 else "nothing"
    if found != sdist.sha256:
        shutil.rmtree(folder)
        raise PrepareError(f"{sdist.package} {sdist.version}: expected sha256 {sdist.sha256}, the index gave {found}")
    return archives[0]


def unpack(sdist: Sdist, target: Path, cache: Path) -> None:
    """The release's files, without the folder that every sdist has around them."""
    with tempfile.TemporaryDirectory() as name, tarfile.open(fetch(sdist, cache)) as archive:
        archive.extractall(name, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (top,) = Path(name).iterdir()
        shutil.copytree(top, target, dirs_exist_ok=True)


def check_out(source: Source, target: Path, cache: Path) -> None:
    """The repository as the agent finds it, not yet under version control."""
    if source.base is not None:
        unpack(source.base, target, cache)
    else:
        skip = shutil.ignore_patterns(*LEFTOVERS)
        shutil.copytree(HERE / "repos" / source.name, target, dirs_exist_ok=True, ignore=skip)


def commit(folder: Path) -> None:
    """One commit whose hash depends on the files alone."""
    who = {"NAME": "Quickstart", "EMAIL": "quickstart@example.invalid", "DATE": "2024-01-01T00:00:00+0000"}
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LC_ALL": "C",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()},
    }
    for arguments in (
        ["init", "--quiet", "--template=", "--initial-branch=main"],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--no-gpg-sign", "--message=Import"],
    ):
        run(["git", *arguments], why=f"could not make the repository {folder.name}", cwd=folder, env=env)


# --------------------------------------------------------------------------- images


def interpreter() -> Path:
    """The real interpreter behind the virtual environment this script runs in."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def images(cache: Path) -> Path:
    """The folder of this example's images: image `quickstart/<name>` is its folder `<name>`."""
    return cache / "images" / "quickstart"


def site_packages(python: Path) -> Path:
    """Where the packages of the shared layer's folder are on this machine."""
    inside = sysconfig.get_path("purelib", "venv", {"base": VENV, "platbase": VENV})
    return python / "layer" / inside.lstrip("/")


def outside_usr() -> list[str]:
    """Folders the box must be shown besides the host's /usr, so that the interpreter works in it."""
    prefixes = dict.fromkeys([sys.base_prefix, sys.base_exec_prefix, str(interpreter().parent.parent)])
    return [prefix for prefix in prefixes if not Path(prefix).resolve().is_relative_to("/usr")]


def fingerprint(*parts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts], default=str).encode()).hexdigest()


def is_built(folder: Path, mark: str) -> bool:
    stamp = folder / "built"
    return stamp.is_file() and stamp.read_text() == mark


def build_python(cache: Path) -> None:
    """The shared layer. The environment's files are written here, not by `venv`: they name paths inside the box."""
    folder = images(cache) / "_python"
    mark = fingerprint(sys.version, str(interpreter()), VENV, PYTEST)
    if is_built(folder, mark):
        return
    say(f"installing pytest for Python {sys.version.split()[0]}")
    with arriving(folder) as new:
        layer = new / "layer"
        venv = layer / VENV.lstrip("/")
        (venv / "bin").mkdir(parents=True)
        for name in ("python3", "python"):
            (venv / "bin" / name).symlink_to(interpreter())
        home = interpreter().parent
        (venv / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
        for prefix in outside_usr():
            (layer / prefix.lstrip("/")).mkdir(parents=True, exist_ok=True)
        requirements = new / "requirements.txt"
        requirements.write_text(PYTEST)
        pip(
            "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-user",
            "--target", str(site_packages(new)), "--requirement", str(requirements),
            why="could not install pytest",
        )  # fmt: skip
        shutil.rmtree(site_packages(new) / "bin", ignore_errors=True)
        (new / "built").write_text(mark)


def files_of(folder: Path) -> list[tuple[str, str]]:
    """(path, digest) of each file, for the fingerprint."""
    return [
        (str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not LEFTOVERS.intersection(path.parts)
    ]


def build_image(source: Source, cache: Path) -> None:
    """One task's image folder."""
    folder = images(cache) / source.name
    origin = source.base if source.base is not None else files_of(HERE / "repos" / source.name)
    image = {
        "schema": 1,
        "base": "host",
        "layers": ["layer", "../_python/layer"],
        "env": {"PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        "mounts": [{"source": path, "target": path} for path in outside_usr()],
    }
    mark = fingerprint(origin, image)
    if is_built(folder, mark):
        return
    say(f"building the image quickstart/{source.name}")
    with arriving(folder) as new:
        workdir = new / "layer" / source.workdir.lstrip("/")
        workdir.mkdir(parents=True)
        check_out(source, workdir, cache)
        commit(workdir)
        (new / "image.json").write_text(json.dumps(image, indent=2) + "\n")
        (new / "built").write_text(mark)


def prepare(cache: Path) -> None:
    """All images. Raises `PrepareError`."""
    images(cache).mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_python(cache)
        for source in sources():
            build_image(source, cache)


def main() -> int:
    os.umask(0o022)
    try:
        prepare(CACHE)
    except (PrepareError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
