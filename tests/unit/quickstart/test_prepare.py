"""examples/quickstart/prepare.py: image folders that the namespaces backend reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import prepare
import pytest

from rollwright.sandboxes.namespaces import idmap
from rollwright.sandboxes.namespaces.images import Images
from rollwright.sandboxes.namespaces.layers import Layers

CART = next(source for source in prepare.sources() if source.name == "cart")
PACKAGE = prepare.Sdist(package="sqlparse", version="0.4.2", sha256="0" * 64)


def head(cache: Path) -> str:
    workdir = prepare.images(cache) / "cart" / "layer" / "workspace" / "cart"
    git = ["git", "-c", "safe.directory=*", "-C", str(workdir)]
    count = subprocess.check_output([*git, "rev-list", "--count", "--all"], text=True)
    assert count.strip() == "1"
    assert subprocess.check_output([*git, "status", "--porcelain", "--ignored"], text=True) == ""
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def test_the_repository_has_one_commit_and_always_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare.build_image(CART, tmp_path / name)
    assert head(tmp_path / "a") == head(tmp_path / "b")


def test_an_image_is_one_the_sandbox_backend_accepts(tmp_path: Path) -> None:
    prepare.build_image(CART, tmp_path)
    (prepare.images(tmp_path) / "_python" / "layer").mkdir(parents=True)
    layers = Layers(tmp_path / "layers", maps=idmap.find)
    images = Images(tmp_path / "images", skeletons=tmp_path / "skeletons", layers=layers)
    image = images.resolve("quickstart/cart")
    assert image.env["PATH"].startswith("/opt/quickstart/bin:")
    assert [str(mount.source) for mount in image.mounts] == prepare.outside_usr()


def test_what_is_built_already_is_kept_and_what_is_out_of_date_is_built_anew(tmp_path: Path) -> None:
    prepare.build_image(CART, tmp_path)
    folder = prepare.images(tmp_path) / "cart"
    first = (folder / "image.json").stat().st_ino
    prepare.build_image(CART, tmp_path)
    assert (folder / "image.json").stat().st_ino == first
    (folder / "built").write_text("by an older version")
    (folder / "layer" / "workspace" / "cart" / "left.txt").write_text("gone after the build")
    prepare.build_image(CART, tmp_path)
    assert not (folder / "layer" / "workspace" / "cart" / "left.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["cart"]


def test_an_interrupted_build_leaves_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(prepare.PrepareError, match="could not make the repository cart: the program 'git' is not"):
        prepare.build_image(CART, tmp_path)
    assert list(prepare.images(tmp_path).iterdir()) == []


def test_the_interpreter_and_its_folders_are_real_ones() -> None:
    assert not Path(prepare.interpreter()).is_symlink()
    version = subprocess.check_output([prepare.interpreter(), "-c", "import sys; print(sys.version)"], text=True)
    assert version.strip() == sys.version
    assert all(Path(folder).is_dir() for folder in prepare.outside_usr())
    shown = [Path("/usr"), *map(Path, prepare.outside_usr())]
    assert any(prepare.interpreter().is_relative_to(folder.resolve()) for folder in shown)


def test_an_archive_with_another_digest_is_refused_and_not_kept(tmp_path: Path) -> None:
    folder = tmp_path / "sdists" / "sqlparse-0.4.2"
    folder.mkdir(parents=True)
    (folder / "sqlparse-0.4.2.tar.gz").write_bytes(b"something else")
    with pytest.raises(prepare.PrepareError, match=r"sqlparse 0\.4\.2: expected sha256 000"):
        prepare.fetch(PACKAGE, tmp_path)
    assert not folder.exists()


def test_an_index_that_does_not_answer_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(prepare.PrepareError, match=r"could not fetch the source of sqlparse 0\.4\.2: exit code 1"):
        prepare.fetch(PACKAGE, tmp_path / "cache")
    assert list((tmp_path / "cache" / "sdists").iterdir()) == []


def test_the_program_ends_with_the_error_and_without_a_traceback(tmp_path: Path) -> None:
    """A copy of the example in an empty place, where pip cannot fetch anything."""
    place = tmp_path / "examples" / "quickstart"
    place.mkdir(parents=True)
    for name in ("prepare.py", "tasks.toml"):
        (place / name).write_bytes((prepare.HERE / name).read_bytes())
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run([sys.executable, place / "prepare.py"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "prepare: could not install pytest: exit code 1 of" in done.stderr
    assert "Traceback" not in done.stderr
