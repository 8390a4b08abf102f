"""slime's log hooks: means over what was graded, and how much was not.

An ABORTED sample has the reward 0.0 because slime needs a number. slime's own means count it.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb, fsum
from typing import Any

from rollwright.errors import ConfigError
from rollwright.integrations.slime.samples import failure_of, is_graded, note_of, rollout_of

__all__ = ["log_eval_rollout", "log_rollout"]

log = logging.getLogger(__name__)

_CHARTS = ("slime.observability.logging_utils", "slime.utils.logging_utils")
"""Where slime's own log function is, the newest first."""
_METRICS = ("slime.observability.rollout_metrics", "slime.ray.rollout")


def log_eval_rollout(
    rollout_id: int, args: Any, data: Mapping[str, Mapping[str, Any]], extra_metrics: Mapping[str, Any] | None = None
) -> bool:
    """slime's `--custom-eval-rollout-log-function-path`. True: it is logged, and slime does not log it again.

    The names are slime's (`eval/SET`, `eval/SET-truncated_ratio`, `eval/SET-pass@k`, `eval/SET/...`), the numbers those
    of the graded samples. `eval/SET-graded` and `eval/SET-excluded` say how many there are. A set of which nothing was
    graded has no mean. Raises `ConfigError` when slime keeps its log function elsewhere.
    """
    if any(len(found.get("samples") or ()) != len(found["rewards"]) for found in data.values()):
        return False  # another evaluation function than slime's, which does not say what was graded
    metrics = dict(extra_metrics or {})
    for name, found in data.items():
        metrics |= _of_set(args, name, found["rewards"], found["samples"])
    log.info("eval %d: %s", rollout_id, metrics)
    _to_charts(args, rollout_id, metrics, "eval/step")
    return True


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: Mapping[str, Any] | None = None,
    rollout_time: float = 0.0,
) -> bool:
    """slime's `--custom-rollout-log-function-path`. False: slime logs its own beside it.

    `rollout/graded_reward` counts each graded rollout once, into however many samples it was cut; `rollout/graded` and
    `rollout/excluded` say how many there are, `rollout/excluded/ERROR` why. Raises as `log_eval_rollout`.
    """
    if getattr(args, "load_debug_rollout_data", None):
        return False
    rollouts = list({rollout_of(sample): sample for sample in samples}.values())
    rewards = [float(sample.get_reward_value(args)) for sample in rollouts if is_graded(sample)]
    metrics: dict[str, Any] = {"rollout/graded": len(rewards), **_excluded("rollout/", rollouts)}
    if rewards:
        metrics["rollout/graded_reward"] = _mean(rewards)
    log.info("rollout %d: %s", rollout_id, metrics)
    _to_charts(args, rollout_id, metrics, "rollout/step")
    return False


def _of_set(args: Any, name: str, rewards: Sequence[float], samples: Sequence[Any]) -> dict[str, Any]:
    """The metrics of one evaluation set."""
    graded = [(sample, float(reward)) for sample, reward in zip(samples, rewards, strict=True) if is_graded(sample)]
    metrics: dict[str, Any] = {f"eval/{name}-graded": len(graded), **_excluded(f"eval/{name}-", samples)}
    if not graded:
        return metrics
    metrics |= {f"eval/{name}/{key}": value for key, value in _slimes_own(args, [sample for sample, _ in graded])}
    metrics[f"eval/{name}"] = _mean(reward for _, reward in graded)
    truncated = sum(sample.status is sample.Status.TRUNCATED for sample, _ in graded)
    metrics[f"eval/{name}-truncated_ratio"] = truncated / len(graded)
    if getattr(args, "log_passrate", False):
        group_size = int(args.n_samples_per_eval_prompt)
        groups: dict[Any, list[float]] = {}
        for sample, reward in graded:
            groups.setdefault(note_of(sample).get("group", sample.index // group_size), []).append(reward)
        for k, rate in _pass_rates(list(groups.values()), group_size):
            metrics[f"eval/{name}-pass@{k}"] = rate
    return metrics


def _excluded(prefix: str, samples: Iterable[Any]) -> dict[str, int]:
    """How many were not graded, and by which errors."""
    errors = Counter(failure_of(sample) for sample in samples if not is_graded(sample))
    return {f"{prefix}excluded": errors.total(), **{f"{prefix}excluded/{name}": n for name, n in errors.items()}}


def _pass_rates(groups: Sequence[Sequence[float]], group_size: int) -> Iterable[tuple[int, float]]:
    """pass@k for k = 1, 2, 4, ... as slime has it: of the groups with at least k graded samples, each without bias."""
    if group_size == 1:
        return
    k = 1
    while k <= group_size:
        rates = [
            1 - comb(sum(reward != 1 for reward in rewards), k) / comb(len(rewards), k)
            for rewards in groups
            if len(rewards) >= k
        ]
        if rates:
            yield k, _mean(rates)
        k *= 2


def _slimes_own(args: Any, samples: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    """What else slime logs of samples: lengths, repetitions, groups without spread, ..."""
    module = _first(_METRICS)
    compute = getattr(module, "compute_metrics_from_samples", None)
    if compute is None:
        return ()
    args = copy.copy(args)
    args.reward_key = getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
    try:
        return dict(compute(args, samples)).items()
    except Exception as error:  # noqa: BLE001 - a function private to slime; a chart less must not end a training
        log.warning("slime's own metrics of an evaluation are left out: %s: %s", type(error).__name__, error)
        return ()


def _to_charts(args: Any, rollout_id: int, metrics: dict[str, Any], step_key: str) -> None:
    charts = _first(_CHARTS)
    if charts is None:
        raise ConfigError(
            f"this slime has its log function in none of {', '.join(_CHARTS)}: leave the --custom-*-log-function-path "
            "of Rollwright away, and read success rates from the run folder"
        )
    charts.log(args, {**metrics, step_key: _step(args, rollout_id)}, step_key=step_key)


def _step(args: Any, rollout_id: int) -> int:
    """Where slime's charts are at."""
    if not getattr(args, "wandb_always_use_train_step", False):
        return rollout_id
    return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)


def _first(names: Sequence[str]) -> Any:
    """The first of these modules that there is."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return fsum(numbers) / len(numbers)
