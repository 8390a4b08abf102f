"""What other systems hear of a run, and that their trouble is theirs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import anyio
import orjson
import pytest

from rollwright.errors import ConfigError, PluginError
from rollwright.rollout import RolloutPlan
from rollwright.run import Silent
from rollwright.store import RolloutRecord, RunDir
from rollwright.telemetry import Listener, listening, make_listeners
from rollwright.telemetry.metrics import RunningNumbers, Tracker
from rollwright.testing.recorder import Recorder
from rollwright.testing.run_folder import build_run
from rollwright.types import AgentView, GraderView, Stage, Task

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return build_run(tmp_path_factory.mktemp("telemetry") / "run", tasks=10, attempts=4)


def plan_of(record: RolloutRecord) -> RolloutPlan:
    agent = AgentView(id=record.task_id, image="host", workdir="/w", prompt="Fix it.")
    task = Task(agent=agent, grader=GraderView(source_id=record.task, protocol="command", payload={}))
    return RolloutPlan(run="run", task_name=record.task, task=task, attempt=record.attempt)


async def tell(run: RunDir, *listeners: Listener) -> list[RolloutRecord]:
    """The story of a stored run, told again."""
    records = run.records()
    async with listening(Silent(), listeners) as observer:
        for record in records:
            plan = plan_of(record)
            observer.started(plan)
            for stage in Stage:
                if stage.value in record.seconds:
                    observer.entered(plan, stage)
            observer.entered(plan, Stage.STORED)
            observer.stored(plan, record)
    return records


def lines(recorder: Recorder) -> list[Mapping[str, float]]:
    return [orjson.loads(line) for line in recorder.path.read_bytes().splitlines()]


async def test_a_tracker_hears_every_stored_rollout_in_order(run: RunDir, tmp_path: Path) -> None:
    recorder = Recorder(run=RunDir(tmp_path))
    (tmp_path / "logs").mkdir()
    records = await tell(run, recorder)
    begin, *steps, end = lines(recorder)
    assert begin == {"begin": True}
    assert end == {"end": True}
    assert [step["step"] for step in steps] == list(range(1, len(records) + 1))
    assert [step["rollout/sampled_tokens"] for step in steps] == [r.sampled_tokens for r in records]
    rewards = [record.reward for record in records if record.reward is not None]
    assert steps[-1]["run/mean_reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_an_ungraded_rollout_has_no_reward_and_changes_no_mean(run: RunDir) -> None:
    records = run.records()
    graded = next(record for record in records if record.graded)
    lost = next(record for record in records if not record.graded)
    numbers = RunningNumbers()
    first = numbers.after(graded)
    second = numbers.after(lost)
    assert "rollout/reward" not in second
    assert second["run/mean_reward"] == first["run/mean_reward"] == graded.reward
    assert second["run/trained_share"] == first["run/trained_share"]
    assert (second["run/stored"], second["run/ungraded"]) == (2, 1)
    assert "run/mean_reward" not in RunningNumbers().after(lost)


async def test_a_tracker_that_fails_is_told_of_once_and_the_others_hear_all(
    run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("bad", "good"):
        (tmp_path / name / "logs").mkdir(parents=True)
    bad, good = Recorder(run=RunDir(tmp_path / "bad"), fail_at=3), Recorder(run=RunDir(tmp_path / "good"))
    with caplog.at_level(logging.WARNING, logger="rollwright"):
        records = await tell(run, bad, good)
    assert [line.get("step") for line in lines(bad)] == [None, 1, 2, None]
    assert len(lines(good)) == len(records) + 2
    said = [record.message for record in caplog.records]
    assert said == [
        "the recorder hears nothing more of this run: ConnectionError: the recorder fails, as it was asked to"
    ]


class Slow(Tracker):
    """Takes its time, until it is let go."""

    what = "the slow one"

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.heard = 0

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self.let_go.wait()
        self.heard = step


async def test_no_rollout_waits_for_a_slow_tracker_and_the_end_waits_for_what_is_under_way(run: RunDir) -> None:
    slow = Slow()
    records = run.records()
    async with listening(Silent(), [slow]) as observer:
        for record in records:
            observer.stored(plan_of(record), record)
        assert slow.heard == 0
        slow.let_go.set()
    assert slow.heard == len(records)


async def test_an_interrupted_run_still_hands_over_what_was_stored(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    recorder = Recorder(run=RunDir(tmp_path))
    with anyio.CancelScope() as scope:
        async with listening(Silent(), [recorder]) as observer:
            record = run.records()[0]
            observer.stored(plan_of(record), record)
            scope.cancel()
            await anyio.sleep_forever()
    assert [line.get("step") for line in lines(recorder)] == [None, 1, None]


def test_names_and_options_are_checked_before_anything_runs(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="otel"):
        make_listeners(["otell"], {}, run=run, base=tmp_path)
    with pytest.raises(ConfigError, match="endpoint"):
        make_listeners(["otel"], {"otel": {"endpont": "http://x"}}, run=run, base=tmp_path)
    ours = "rollwright.testing.recorder:Recorder"
    (made,) = make_listeners([ours], {ours: {"fail_at": 2}}, run=run, base=tmp_path)
    assert isinstance(made, Recorder)


@pytest.mark.parametrize("kind", ["trackio", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_says_what_to_install(kind: str, run: RunDir, tmp_path: Path) -> None:
    package = {"mlflow": "mlflow"}.get(kind, kind)
    try:
        __import__(package)
    except ImportError:
        with pytest.raises(ConfigError, match=f"pip install .*{kind}"):
            make_listeners([kind], {}, run=run, base=tmp_path)
    else:
        pytest.skip(f"{kind} is installed here")
