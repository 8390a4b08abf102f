"""Runs a harness's launch as a plain process on this machine and gives the job's result, as a sandbox would."""

from __future__ import annotations

import subprocess
import time
from functools import partial
from pathlib import Path

import anyio
import pytest

from rollwright.errors import AgentInstallFailed, ConfigError
from rollwright.harnesses import Endpoint, Harness
from rollwright.harnesses.bundle import Bundle, ensure_bundle, locate
from rollwright.sandboxes import Captured, JobResult

CACHE = Path("~/.cache/rollwright").expanduser()


def bundle_of(harness: Harness) -> Bundle:
    """From the cache, or fetched once; skips where neither is to be had."""
    bundle = locate(harness, CACHE)
    if bundle.path.is_dir():
        return bundle
    try:
        return anyio.run(partial(ensure_bundle, harness, cache_dir=CACHE))
    except AgentInstallFailed as error:
        pytest.skip(error.message)
    except ConfigError as error:
        if "is needed to fetch" in error.message:  # no npm, no pip
            pytest.skip(error.message)
        raise


def run(
    harness: Harness,
    folder: Path,
    prompt: str,
    base_url: str,
    *,
    model: str = "policy",
    secret: str = "secret",
    seconds: float = 60,
) -> JobResult:
    """Fresh home and workdir below `folder`, nothing of our own environment but a plain PATH."""
    home, workdir = folder / "home", folder / "workdir"
    home.mkdir()
    workdir.mkdir()
    (workdir / "a.py").write_text("def f():\n    return 1\n")
    launch = harness.launch(
        bundle=str(bundle_of(harness).path),
        home=str(home),
        workdir=str(workdir),
        prompt=prompt,
        endpoint=Endpoint(base_url=base_url, api_key=secret, model=model, context_window=32768, max_output_tokens=512),
    )
    for path, content in launch.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    begin = time.monotonic()
    done = subprocess.run(
        launch.argv,
        env={"PATH": "/usr/bin:/bin", **launch.env},
        input=launch.stdin,
        cwd=workdir,
        capture_output=True,
        timeout=seconds,
        check=False,
    )
    return result_of(done.stdout, done.stderr, done.returncode, seconds=time.monotonic() - begin)


def result_of(stdout: bytes, stderr: bytes, returncode: int, *, seconds: float = 1.0) -> JobResult:
    return JobResult(
        id="0" * 32,
        state="exited",
        exit_code=returncode if returncode >= 0 else None,
        signal=-returncode if returncode < 0 else None,
        seconds=seconds,
        stdout=Captured(head=stdout, tail=b"", total=len(stdout)),
        stderr=Captured(head=stderr, tail=b"", total=len(stderr)),
    )
