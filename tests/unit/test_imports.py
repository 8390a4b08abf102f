"""The layers of the picture hold: imports only point downwards, and heavy packages have one door each."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rollwright

SRC = Path(rollwright.__file__).parent

LAYERS = {
    "errors": 0,
    "messages": 0,
    "types": 0,
    "concurrency": 1,
    "responsive": 1,
    "groups": 1,
    "config": 1,
    "plugins": 1,
    "tokens": 2,
    "dialects": 2,
    "engines": 3,
    "sandboxes": 3,
    "harnesses": 4,
    "graders": 4,
    "gateway": 4,
    "e2b_server": 5,
    "lockfile": 4,
    "tasks": 5,
    "store": 5,
    "line": 5,
    "rollout": 6,
    "audit": 7,
    "rescore": 7,
    "quorum": 6,
    "export": 7,
    "run": 7,
    "regrade": 8,
    "validate": 8,
    "telemetry": 8,
    "testing": 9,
    "integrations": 9,
    "display": 9,
    "viewer": 9,
    "doctor": 9,
    "cli": 10,
}
"""Unit → height. A unit may import itself and lower ones; ports may import another port's contract only."""

PORTS = {"engines", "sandboxes", "harnesses", "graders", "gateway"}

DOORS = {
    "torch": {"engines/runtime_torch.py"},
    "pyarrow": {"export/parquet.py"},
    "renderers": {"tokens/render_renderers.py"},
    "rich": {"display.py", "cli/app.py", "cli/doctor.py"},
    "cyclopts": {f"cli/{path.name}" for path in (SRC / "cli").glob("*.py")},
    "httpx2": {"engines/remote.py", "gateway/shard_client.py"},
    "e2b": {"sandboxes/e2b/sdk.py"},
    "mlflow": {"telemetry/mlflow.py"},
    "opentelemetry": {"telemetry/otel.py"},
    "ray": {"integrations/ray/cluster.py"},
    "trackio": {"telemetry/trackio.py"},
    "wandb": {"telemetry/wandb.py"},
    "uvicorn": {"gateway/connection.py"},
}


AGENTS = Path(__file__).parents[2] / "AGENTS.md"


def test_agents_md_draws_these_layers() -> None:
    picture = AGENTS.read_text().partition("## Layers")[2].split("```")[1].strip("\n")
    drawn = [set(line[:49].split()) for line in reversed(picture.splitlines())]
    assert drawn == [{unit for unit in LAYERS if LAYERS[unit] == height} for height in range(len(drawn))]
    assert len(drawn) == max(LAYERS.values()) + 1


def modules() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path.name != "__init__.py" or path.parent != SRC)


def imports_of(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def unit_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_imports_only_point_downwards(path: Path) -> None:
    unit = unit_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "rollwright" or len(parts) == 1:
            continue
        other = parts[1]
        if other not in LAYERS:  # a public name of the package root
            continue
        assert other == unit or LAYERS[other] < LAYERS[unit], f"{unit} may not import {other}"
        if unit in PORTS and other in PORTS and other != unit and len(parts) > 2:
            door = SRC / other / f"{parts[2]}.py"
            assert not door.exists(), f"port {unit} may import the contract of {other}, not {name}"


@pytest.mark.parametrize("package", sorted(DOORS))
def test_a_heavy_package_has_one_door(package: str) -> None:
    doors = {
        str(path.relative_to(SRC))
        for path in modules()
        if unit_of(path) != "testing"
        and any(name == package or name.startswith(f"{package}.") for name in imports_of(path))
    }
    assert doors <= DOORS[package]


def test_importing_rollwright_is_fast_and_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "renderers", "starlette", "pydantic", "numpy", "rich", "httpx2", "anyio"]
    code = f"import rollwright, sys; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_below_the_edges_reads_the_environment_or_prints(path: Path) -> None:
    if unit_of(path) in {"cli", "integrations"}:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"environ", "getenv"} or not (
                isinstance(node.value, ast.Name) and node.value.id == "os"
            ), f"{path}:{node.lineno} reads the environment"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path}:{node.lineno} prints"
