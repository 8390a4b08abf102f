"""What an earlier process left and cannot be gone on with is begun again, whatever kept us from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rollwright.config import RunConfig
from rollwright.errors import ProvisionFailed, RollwrightError, SandboxGone, StoreError, UsageError
from rollwright.graders.patch import Baseline
from rollwright.rollout import Held, RolloutPlan, Toolbox
from rollwright.run import LocalExecutor, Silent
from rollwright.sandboxes import Sandbox, SandboxSpec
from rollwright.store import RolloutDir, RunWriter
from rollwright.testing.scripted_executor import plain_task
from support.scripted_provider import IdleBox, Script

pytestmark = pytest.mark.anyio

BASELINE = Baseline(workdir="/work", shadow="/s", nonce="n", base_tree="0" * 40)
HELD = Held(tries=1, lease=0, baseline=BASELINE, box="left")


class Left(Script):
    """A provider with a box that may be attached to, if nothing is raised."""

    attaching: RollwrightError | None = None

    def known_as(self, key: str) -> str:
        return key

    async def attach(self, key: str) -> Sandbox:
        assert key == HELD.box
        if self.attaching is not None:
            raise self.attaching
        box = IdleBox("left", SandboxSpec(image="host"))
        self.boxes.append(box)
        return box


class Logs:
    """A gateway whose turn log of the rollout is sealed: its session was over when its process was killed."""

    versions: tuple[str, ...] = ()

    def know(self, versions: list[str]) -> None:
        assert versions == []

    def __init__(self) -> None:
        self.reopened: list[Path] = []

    def reopen(self, log: Path) -> Any:
        self.reopened.append(log)
        raise StoreError(f"the turn log {log} is sealed")


def tools_of(provider: Script, folder: Path, capabilities: Any) -> Toolbox:
    data = {
        "run": {"retries": 0},
        "tasks": {"path": "rows.jsonl"},
        "policy": {"path": "policy"},
        "engine": {"kind": "scripted"},
    }
    return Toolbox(
        config=RunConfig.resolve(data, base=folder, where="run.toml"),
        provider=provider,
        capabilities=replace(capabilities, attach=True),
        engine=cast("Any", None),
        gateway=cast("Any", Logs()),
        max_context=1000,
        harness=cast("Any", type("Named", (), {"name": "cli"})),
        bundle=cast("Any", type("Empty", (), {"path": folder})),
        graders={},
    )


@pytest.mark.parametrize(
    ("held", "attaching"),
    [
        (HELD, None),
        (replace(HELD, gateway_url="http://where.it.was:1"), None),
        (HELD, UsageError("box left is in use")),
        (HELD, SandboxGone("no box is left")),
    ],
    ids=["sealed", "gateway elsewhere", "in use", "gone"],
)
async def test_it_is_begun_again_in_a_new_box(tmp_path: Path, held: Held, attaching: RollwrightError | None) -> None:
    provider = Left(failures=[ProvisionFailed("a new box was asked for")])
    provider.attaching = attaching
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={})
    left = RolloutDir(writer.run.work / "a.1")
    left.path.mkdir()
    left.write_json(left.held, held.to_json())
    assert Held.from_json(held.to_json()) == held
    plan = RolloutPlan(run="run", task_name="a", task=plain_task("a"), attempt=1)
    tools = tools_of(provider, tmp_path, await provider.probe())
    executor = LocalExecutor(tools, writer)
    attempt = await executor.run(plan, Silent())
    writer.close()
    assert attempt.record.failure is not None
    assert attempt.record.failure.error == "ProvisionFailed"
    assert [key for _, key in provider.boots] == ["run/a.1/1/1/agent"], "under a key of its own"
    assert provider.open == []
    untouched = attaching is not None or held != HELD
    assert cast("Any", tools.gateway).reopened == ([] if untouched else [left.turns])
    assert not left.path.exists()
