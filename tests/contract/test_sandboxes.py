"""Every sandbox backend we ship keeps the sandbox contract."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from rollwright.sandboxes import ExecResult, Provider, SandboxSpec
from rollwright.sandboxes.jobs import Jobs
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.sandboxes.namespaces.box import NamespacesSandbox
from rollwright.testing.sandbox_contract import JobContract, SandboxContract

NOBODY_ELSE = 54321
"""A uid that no user of this machine has."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
async def provider(state: Path) -> AsyncIterator[Provider]:
    async with NamespacesProvider(state_dir=state) as provider:
        yield provider


class TestNamespaces(SandboxContract):
    """With the fixtures above."""


def as_user(uid: int) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def python_for(uid: int) -> tuple[str, dict[str, str]] | None:
    """A Python of our version that this user can run, and the environment to find our packages."""
    modules = [str(Path(pytest.__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    env = {"PYTHONPATH": os.pathsep.join(modules), "PATH": "/usr/bin:/bin"}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin")):
        if python is None:
            continue
        # setpriv itself may start what its user cannot, so the Python has to start itself once more.
        script = (
            "import subprocess, sys, pytest, rollwright.sandboxes.jobs; subprocess.check_call([sys.executable, '-V'])"
        )
        check = [*as_user(uid), python, "-c", script]
        if subprocess.run(check, env=env, cwd="/", capture_output=True, check=False).returncode == 0:
            return python, env
    return None


@pytest.fixture(scope="module", autouse=True)
def ordinary_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str] | str]:
    """The suite as an ordinary user, beside the others; or why that cannot be."""
    found = python_for(NOBODY_ELSE) if os.geteuid() == 0 and shutil.which("setpriv") else None
    if found is None:
        yield "needs root, setpriv, and a Python of our version that another user may run"
        return
    python, env = found
    # Not below pytest's own folders: those are closed to others.
    where = Path(tempfile.mkdtemp(prefix="rollwright-contract-"))
    os.chown(where, NOBODY_ELSE, NOBODY_ELSE)
    here = Path(__file__).parent
    tests = [
        f"{__file__}::TestNamespaces",
        f"{here}/test_image_files.py::test_layers_of_a_layout_show_as_one_file_system_and_are_shared",
        f"{here}/test_image_files.py::test_links_and_names_of_a_layer_lead_nowhere",
        f"{here.parent}/faults/test_survive.py::test_another_process_takes_the_box_over_and_hears_the_jobs_end_once",
    ]
    arguments = ["-q", "-p", "no:cacheprovider", f"--basetemp={where}/tmp", *tests]
    with subprocess.Popen(
        [*as_user(NOBODY_ELSE), python, "-m", "pytest", *arguments],
        env=env | {"HOME": str(where), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        yield run
        run.kill()
    shutil.rmtree(where)


class PlainBox:
    """A box as a backend has it that knows nothing of jobs: `Jobs` over its `exec`, `put` and `get`."""

    def __init__(self, box: NamespacesSandbox, *, prefix: tuple[str, ...] = ()) -> None:
        self._box = box
        self._prefix = prefix
        self.put, self.get = box.put, box.get
        jobs = Jobs(self, folder="/var/lib/rollwright")
        self.start, self.run = jobs.start, jobs.run

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        return await self._box.exec([*self._prefix, *argv], user=user, cwd=cwd, input=input, seconds=seconds)


class TestJobsOverPlainExec(JobContract):
    """The supervisor on its own, with the environment scan for finding a job's processes."""

    @pytest.fixture
    async def box(self, provider: NamespacesProvider) -> AsyncIterator[PlainBox]:
        box = await provider.create(SandboxSpec(image="host", disk_mb=256), key="plain")
        yield PlainBox(box)
        await box.close()


@pytest.mark.skipif(shutil.which("busybox") is None, reason="needs busybox")
class TestJobsOverBusyboxAlone(JobContract):
    """The same where the only programs are those of busybox."""

    @pytest.fixture
    async def box(self, provider: NamespacesProvider) -> AsyncIterator[PlainBox]:
        box = await provider.create(SandboxSpec(image="host", disk_mb=256), key="busybox")
        install = "mkdir /opt/bin && cp $(command -v busybox) /opt/bin && /opt/bin/busybox --install -s /opt/bin"
        assert (await box.exec(["sh", "-c", install])).exit_code == 0
        yield PlainBox(box, prefix=("/opt/bin/env", "PATH=/opt/bin"))
        await box.close()


def test_the_contract_holds_for_an_ordinary_user_too(ordinary_run: subprocess.Popen[str] | str) -> None:
    if isinstance(ordinary_run, str):
        pytest.skip(ordinary_run)
    output, _ = ordinary_run.communicate(timeout=110)
    assert ordinary_run.returncode == 0, output[-5000:]
    assert " passed" in output
