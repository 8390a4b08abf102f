"""slime's log hooks, called as slime calls them: what was not graded is in no mean."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError, SandboxGone
from rollwright.integrations.slime import log_eval_rollout, log_rollout
from rollwright.integrations.slime.samples import KEY, Filler
from rollwright.rollout import RolloutPlan
from rollwright.testing.scripted_executor import plain_task, scripted_attempt
from support.commandline import QUICKSTART
from support.slime import Sample, arguments

CHARTS = """
logged = []
def log(args, metrics, step_key):
    assert step_key in metrics
    logged.append(metrics)
"""
METRICS = """
def compute_metrics_from_samples(args, samples):
    lengths = [sample.response_length for sample in samples]
    rewards = [round(sample.get_reward_value(args), 1) for sample in samples]
    return {"response_len/mean": sum(lengths) / len(lengths), "rewards": rewards}
"""
LAYOUTS = {
    "new": ("slime/observability/logging_utils.py", "slime/observability/rollout_metrics.py"),
    "old": ("slime/utils/logging_utils.py", "slime/ray/rollout.py"),
}


class Slime:
    """A slime that can be imported, with what its charts were given."""

    def __init__(self, charts: str) -> None:
        self._charts = charts

    @property
    def logged(self) -> list[dict[str, Any]]:
        return importlib.import_module(self._charts).logged


@pytest.fixture(params=sorted(LAYOUTS))
def slime(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slime]:
    charts, metrics = LAYOUTS[request.param]
    for name, text in ((charts, CHARTS), (metrics, METRICS)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield Slime(charts.removesuffix(".py").replace("/", "."))
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


def args(**more: Any) -> Namespace:
    given = {"log_passrate": False, "n_samples_per_eval_prompt": 1, "wandb_always_use_train_step": False}
    return arguments(QUICKSTART, **(given | more))


def evaluated(asked: Namespace, *rewards: float | None, attempts: int = 1) -> dict[str, dict[str, Any]]:
    """An evaluation's data as slime's `eval_rollout` makes it of what `generate` returns; None: not graded."""
    filler = Filler(decode=str, reward_key=asked.reward_key, eval_reward_key=asked.eval_reward_key)
    samples: list[Sample] = []
    for index, reward in enumerate(rewards):
        plan = RolloutPlan(
            run="run", task_name=f"eval-{index // attempts}", task=plain_task("t"), attempt=1 + index % attempts
        )
        ended = scripted_attempt(plan, reward=reward, failure="SandboxGone" if reward is None else None)
        samples += filler.samples(Sample(index=index), ended, evaluation=True)
    key = asked.eval_reward_key or asked.reward_key
    return {
        "swe": {
            "rewards": [sample.get_reward_value(Namespace(reward_key=key)) for sample in samples],
            "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    }


def test_an_evaluations_mean_is_of_what_was_graded(slime: Slime) -> None:
    """slime's own makes 0.25 of it."""
    assert log_eval_rollout(7, args(), evaluated(args(), 1.0, None, 0.0, None, 1.0, None, 0.0, None)) is True
    (metrics,) = slime.logged
    assert metrics["eval/swe"] == 0.5
    assert (metrics["eval/swe-graded"], metrics["eval/swe-excluded"]) == (4, 4)
    assert metrics["eval/swe-excluded/SandboxGone"] == 4
    assert metrics["eval/step"] == 7
    assert metrics["eval/swe-truncated_ratio"] == 0.0
    assert metrics["eval/swe/rewards"] == [1.0, 0.0, 1.0, 0.0], "slime's own metrics are of the graded, too"


def test_an_evaluation_of_which_nothing_was_graded_has_no_mean(slime: Slime) -> None:
    data = evaluated(args(), None, None) | {"other": evaluated(args(), 1.0)["swe"]}
    assert log_eval_rollout(0, args(log_passrate=True), data, {"eval/more": 3}) is True
    (metrics,) = slime.logged
    assert not {"eval/swe", "eval/swe-truncated_ratio"} & metrics.keys()
    assert (metrics["eval/swe-graded"], metrics["eval/swe-excluded"]) == (0, 2)
    assert (metrics["eval/other"], metrics["eval/more"]) == (1.0, 3)


@pytest.mark.parametrize("keys", [("score", None), (None, "solved"), ("score", "solved")])
def test_reward_keys_are_kept(slime: Slime, keys: tuple[str | None, str | None]) -> None:
    asked = args(reward_key=keys[0], eval_reward_key=keys[1])
    log_eval_rollout(0, asked, evaluated(asked, 1.0, None, 0.0))
    (metrics,) = slime.logged
    assert (metrics["eval/swe"], metrics["eval/swe/rewards"]) == (0.5, [1.0, 0.0])


def test_a_cut_answer_is_in_the_truncated_ratio(slime: Slime) -> None:
    data = evaluated(args(), 1.0, 0.0, None)
    data["swe"]["samples"][1].status = Sample.Status.TRUNCATED
    log_eval_rollout(0, args(), data)
    assert slime.logged[0]["eval/swe-truncated_ratio"] == 0.5


def test_pass_at_k_leaves_out_what_was_not_graded(slime: Slime) -> None:
    asked = args(log_passrate=True, n_samples_per_eval_prompt=2)
    log_eval_rollout(0, asked, evaluated(asked, 1.0, 0.0, None, 1.0, 0.0, 0.0, None, None, attempts=2))
    (metrics,) = slime.logged
    assert metrics["eval/swe-pass@1"] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert metrics["eval/swe-pass@2"] == pytest.approx((1.0 + 0.0) / 2), "of the tasks with two verdicts"


def test_steps_are_those_of_slimes_other_charts(slime: Slime) -> None:
    asked = args(wandb_always_use_train_step=True, rollout_batch_size=8, n_samples_per_prompt=8, global_batch_size=32)
    log_eval_rollout(3, asked, evaluated(asked, 1.0))
    log_rollout(3, asked, evaluated(asked, 1.0)["swe"]["samples"], {}, 1.0)
    assert [metrics.get("eval/step", metrics.get("rollout/step")) for metrics in slime.logged] == [6, 6]


def test_an_evaluation_that_does_not_say_what_was_graded_is_left_to_slime(slime: Slime) -> None:
    samples = evaluated(args(), 1.0)["swe"]["samples"]
    for said in ({}, {"samples": None}, {"samples": samples}):
        assert log_eval_rollout(0, args(), {"aime": {"rewards": [1.0, 0.0], **said}}) is False
    assert slime.logged == []


def test_slimes_own_metrics_that_fail_end_no_training(slime: Slime, caplog: pytest.LogCaptureFixture) -> None:
    data = evaluated(args(), 1.0)
    data["swe"]["samples"][0].reward = {"of": "another shape"}
    assert log_eval_rollout(0, args(), data) is True
    assert slime.logged[0]["eval/swe"] == 1.0
    assert "left out" in caplog.text


def step_of(*rollouts: tuple[float | None, int]) -> list[Sample]:
    """A training step as slime hands it to its log hook: flat, each rollout with its reward in so many samples."""
    made: list[Sample] = []
    for index, (reward, segments) in enumerate(rollouts):
        note: dict[str, Any] = {"rollout": f"t.{index}"} | ({"failure": "EngineUnreachable"} if reward is None else {})
        status = Sample.Status.ABORTED if reward is None else Sample.Status.COMPLETED
        made += [
            Sample(index=index, group_index=0, reward=reward or 0.0, status=status, metadata={KEY: note})
            for _ in range(segments)
        ]
    return made


def test_a_training_steps_mean_counts_each_graded_rollout_once(slime: Slime) -> None:
    samples = step_of((1.0, 3), (0.0, 1), (None, 1), (0.0, 1))
    samples.append(Sample(index=9, status=Sample.Status.ABORTED))
    assert log_rollout(5, args(), samples, None, 12.5) is False, "slime logs its own beside it"
    (metrics,) = slime.logged
    assert metrics == {
        "rollout/graded_reward": pytest.approx(1 / 3),
        "rollout/graded": 3,
        "rollout/excluded": 2,
        "rollout/excluded/EngineUnreachable": 1,
        "rollout/excluded/aborted": 1,
        "rollout/step": 5,
    }


def test_a_step_that_is_only_read_again_is_not_logged(slime: Slime) -> None:
    assert log_rollout(5, args(load_debug_rollout_data="x"), step_of((1.0, 1)), {}, 1.0) is False
    assert slime.logged == []


def test_a_rollout_that_could_not_begin_says_by_which_error(slime: Slime) -> None:
    samples = Filler(decode=str).aborted(Sample(index=1), SandboxGone("it died"), evaluation=False)
    log_rollout(0, args(), samples, {}, 1.0)
    assert slime.logged[0]["rollout/excluded/SandboxGone"] == 1


def test_a_slime_that_logs_elsewhere_is_said_so() -> None:
    with pytest.raises(ConfigError, match="log function"):
        log_eval_rollout(0, args(), evaluated(args(), 1.0))


@given(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=12))
def test_what_was_not_graded_moves_no_number(rewards: list[float | None]) -> None:
    from rollwright.integrations.slime.logs import _of_set  # pyright: ignore[reportPrivateUsage]

    asked = args(log_passrate=True, n_samples_per_eval_prompt=4)
    data = evaluated(asked, *rewards, attempts=4)["swe"]
    kept = [at for at, reward in enumerate(rewards) if reward is not None]
    less = {name: [data[name][at] for at in kept] for name in data}
    whole, alone = (_of_set(asked, "swe", each["rewards"], each["samples"]) for each in (data, less))
    numbers = {name: value for name, value in whole.items() if "excluded" not in name}
    assert numbers == {name: value for name, value in alone.items() if "excluded" not in name}
