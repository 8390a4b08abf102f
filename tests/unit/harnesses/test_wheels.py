"""Bundles of wheels, fetched with the machine's own pip from a loopback index; and what a wheel may not do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollwright.errors import AgentInstallFailed, ConfigError
from rollwright.harnesses import AgentReport, DialectName, Endpoint, Launch, Wheels
from rollwright.harnesses.bundle import ensure_bundle
from rollwright.harnesses.unpack import unpack_wheel
from rollwright.sandboxes import JobResult
from support.pypi_index import Index, serve_index, sha256, wheel

pytestmark = pytest.mark.anyio

CLI = "toy_cli-1.0-py3-none-any.whl"
FAST = [f"fast-2.0-cp3{minor}-cp3{minor}-manylinux_2_17_x86_64.manylinux2014_x86_64.whl" for minor in (10, 11)]
WHEELS = {
    CLI: wheel(CLI, {"toy/__init__.py": b"x = 1", "toy_cli-1.0.data/scripts/toy": b"#!python"}),
    **{name: wheel(name, {"fast.so": name.encode()}) for name in FAST},
}


class Toy:
    """A harness of one pure package and one that is built for each Python."""

    name = "toy"
    dialect: DialectName = "openai_chat"

    def __init__(self, requirements: Path) -> None:
        self.artifacts = (
            Wheels(package="toy-cli", version="1.0", requirements=requirements, pythons=("3.10", "3.11")),
        )

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return ("true",)

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        return Launch(argv=("true",), env={})

    def report(self, result: JobResult) -> AgentReport:
        return AgentReport(ok=True, reason="completed")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The user's pip settings point at it, through the variables pip itself reads."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable, raising=False)
    with serve_index() as served:
        served.wheels = dict(WHEELS)
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
        yield served


@pytest.fixture
def requirements(tmp_path: Path) -> Path:
    file = tmp_path / "requirements.txt"
    fast = " ".join(f"--hash=sha256:{sha256(WHEELS[name])}" for name in FAST)
    file.write_text(f"toy-cli==1.0 --hash=sha256:{sha256(WHEELS[CLI])}\nfast==2.0 {fast}\n")
    return file


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "bundles").iterdir() if path.suffix != ".lock")


async def test_what_serves_every_python_is_kept_once(index: Index, requirements: Path, tmp_path: Path) -> None:
    bundle = await ensure_bundle(Toy(requirements), cache_dir=tmp_path)
    files = sorted(str(path.relative_to(bundle.path)) for path in bundle.path.rglob("*") if path.is_file())
    assert [name for name in files if "dist-info" not in name] == [
        "toy-cli/cp310/fast.so",
        "toy-cli/cp311/fast.so",
        "toy-cli/site/toy/__init__.py",
    ]
    assert (bundle.path / "toy-cli/cp311/fast.so").read_bytes() == FAST[1].encode()
    assert left_in(tmp_path) == [bundle.path.name]
    index.wheels.clear()
    assert await ensure_bundle(Toy(requirements), cache_dir=tmp_path) == bundle


async def test_a_wheel_that_is_not_the_pinned_one_is_refused(index: Index, requirements: Path, tmp_path: Path) -> None:
    index.wheels[CLI] = wheel(CLI, {"toy/__init__.py": b"evil()"})
    with pytest.raises(ConfigError, match=r"toy-cli==1\.0 is not what is pinned: .*Expected sha256"):
        await ensure_bundle(Toy(requirements), cache_dir=tmp_path, backoff=(0.01,))
    assert left_in(tmp_path) == []


async def test_a_requirement_without_a_checksum_is_refused(index: Index, tmp_path: Path) -> None:
    (tmp_path / "loose.txt").write_text("toy-cli==1.0\n")
    with pytest.raises(AgentInstallFailed, match="toy-cli"):
        await ensure_bundle(Toy(tmp_path / "loose.txt"), cache_dir=tmp_path)
    assert left_in(tmp_path) == []


async def test_a_version_that_is_not_published_is_the_users_to_fix(
    index: Index, requirements: Path, tmp_path: Path
) -> None:
    del index.wheels[FAST[1]]
    with pytest.raises(ConfigError, match=r"has not all that toy-cli==1\.0 needs for Python 3\.11"):
        await ensure_bundle(Toy(requirements), cache_dir=tmp_path)


async def test_passing_faults_are_tried_again(index: Index, requirements: Path, tmp_path: Path) -> None:
    index.faults = ["503", "503", "cut"]
    await ensure_bundle(Toy(requirements), cache_dir=tmp_path, backoff=(0.01, 0.01))
    assert index.faults == []
    assert len(left_in(tmp_path)) == 1


async def test_an_unreachable_index_is_infrastructure(
    index: Index, requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(AgentInstallFailed, match="pip could not reach the index"):
        await ensure_bundle(Toy(requirements), cache_dir=tmp_path, backoff=())
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil.py", "toy/../../evil.py", "toy\\evil.py", "."])
def test_a_wheel_cannot_write_outside_its_folder(name: str, tmp_path: Path) -> None:
    path = tmp_path / CLI
    path.write_bytes(wheel(CLI, {name: b"x"}))
    with pytest.raises(ConfigError, match="outside its folder"):
        unpack_wheel(path, tmp_path / "out" / "site")
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file != path] == []


def test_a_wheel_that_is_too_much_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / CLI
    path.write_bytes(WHEELS[CLI])
    for limits in ({"max_files": 2}, {"max_bytes": 3}):
        with pytest.raises(ConfigError, match="holds more than"):
            unpack_wheel(path, tmp_path / "out", **limits)
    path.write_bytes(WHEELS[CLI][:60])
    with pytest.raises(ConfigError, match="not a readable wheel"):
        unpack_wheel(path, tmp_path / "out")


def test_two_wheels_with_one_file_do_not_go_together(tmp_path: Path) -> None:
    path = tmp_path / CLI
    path.write_bytes(WHEELS[CLI])
    unpack_wheel(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="does not go with the others"):
        unpack_wheel(path, tmp_path / "out")


def test_libraries_of_a_wheels_data_folder_are_on_the_path_and_all_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / CLI
    data = "toy_cli-1.0.data"
    path.write_bytes(wheel(CLI, {f"{data}/purelib/toy/a.py": b"1", f"{data}/headers/toy.h": b"2", "toy/b.py": b"3"}))
    old = os.umask(0o077)
    try:
        unpack_wheel(path, tmp_path / "out")
    finally:
        os.umask(old)
    files = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.?*") if file.is_file()}
    assert {name for name in files if "dist-info" not in name} == {"toy/a.py", "toy/b.py"}
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").rglob("*") if file.is_dir()} == {0o755}
