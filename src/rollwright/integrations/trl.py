"""TRL: a batch for `GRPOTrainer(rollout_func=...)`, and `RolloutSample`s and a worker for `AsyncGRPOTrainer`.

With `rollout_func` TRL makes the advantages itself: give it `reward` as a reward function, which says None for what
does not count, and TRL leaves that out of the group. The asynchronous trainer is given advantages, so a rollout that
does not count gives it no row at all.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rollwright.errors import InfraError, RolloutOverdue
from rollwright.groups import Estimator, GroupAdvantages
from rollwright.integrations.arrays import response_lists, views
from rollwright.integrations.classes import module
from rollwright.integrations.record import Rollout, comparable, group_advantages, longest, parts_by_group, steps

__all__ = ["REWARD", "GroupWorker", "reward", "rollout_batch", "rollout_samples", "sample_fields"]

REWARD = "rollwright_reward"
"""The field of the batch that `reward` reads."""


def rollout_batch(rollouts: Iterable[Rollout], *, filler: int, quorum: int | None = None) -> dict[str, list[Any]]:
    """What `rollout_func` returns for one rollout per prompt it was given, in that order.

    TRL has one row a prompt: of several samples the one that trains the most tokens is taken, and
    `rollwright_dropped_tokens` counts the trained tokens of the others. A rollout that trains nothing is a row whose
    `env_mask` is 0 throughout. `filler`: the token of such a row where the rollout has none, e.g. the end token.

    The rollouts of a prompt are to be of one group, which is looked at as a whole (`quorum`: see `record.parts`; 1 for
    an evaluation). Raises `UsageError` for logprobs that `record.comparable` refuses.
    """
    batch: dict[str, list[Any]] = {
        name: []
        for name in (
            "prompt_ids",
            "completion_ids",
            "env_mask",
            "logprobs",
            REWARD,
            "rollwright_rollout",
            "rollwright_dropped_tokens",
            "rollwright_temperature",
            "rollwright_logprob_kind",
        )
    }
    for part in parts_by_group(rollouts, quorum=quorum):
        record = part.rollout.record
        sample = longest(part.rows(filler=filler))
        values = (
            *response_lists(sample),
            record.reward if part.counts else None,
            record.rollout,
            sum(end - start for each in part.samples if each is not sample for start, end in each.trained_spans()),
            sample.temperature,
            sample.logprob_kind,
        )
        for name, value in zip(batch, values, strict=True):
            batch[name].append(value)
    return batch


def reward(completions: Sequence[Any], **fields: Any) -> list[float | None]:
    """The reward function that goes with `rollout_batch`: the grader's reward, None for what does not count."""
    rewards: list[float | None] = fields[REWARD]
    return rewards


def sample_fields(
    group: Sequence[Rollout],
    advantages: GroupAdvantages,
    *,
    number: int,
    step_of: Callable[[str], int] = int,
) -> Iterator[dict[str, Any]]:
    """The arguments of each `RolloutSample` of a group. `number` is its group id.

    Arrays are in full length: ids int64, mask int64, logprobs float32. `model_version` is that of the oldest trained
    token, so that TRL's staleness limit holds for all of them. `prompt` and `completion` are empty: TRL shows them
    only. `step_of` makes TRL's model version of a weight version. Raises `UsageError` where it cannot, and for logprobs
    that `record.comparable` refuses.
    """
    for rollout in group:
        for sample in comparable(rollout):
            advantage = advantages.of(sample)
            if advantage is None:
                continue
            tokens, mask, logprobs = views(sample)
            oldest, _ = steps([sample], step_of) or (0, 0)
            yield {
                "prompt": [],
                "completion": [],
                "input_ids": tokens.astype(np.int64),
                "completion_mask": mask.astype(np.int64),
                "old_log_probs": logprobs.astype(np.float32),
                "advantage": advantage,
                "model_version": oldest,
                "group_id": number,
                "metrics": {
                    "reward": sample.reward,
                    "reward_std": advantages.deviation,
                    "rollwright/ungraded": float(advantages.total - advantages.counted),
                    "rollwright/temperature": sample.temperature,
                },
            }


def rollout_samples(
    group: Sequence[Rollout],
    *,
    number: int,
    estimator: Estimator = "grpo",
    quorum: int | None = None,
    step_of: Callable[[str], int] = int,
) -> list[Any]:
    """The `RolloutSample`s of a group; none when it teaches nothing. `quorum`: see `record.parts`. Needs TRL."""
    trl = module("trl.experimental.async_grpo.async_rollout_worker")
    found = group_advantages(group, estimator=estimator, quorum=quorum)
    if not found.informative:
        return []
    return [trl.RolloutSample(**fields) for fields in sample_fields(group, found, number=number, step_of=step_of)]


class GroupWorker:
    """TRL's `RolloutWorkerProtocol` over any stream of groups: `AsyncGRPOTrainer(rollout_worker=GroupWorker(...))`.

    A thread of its own pulls groups and waits while `ahead` rows are untaken. `convert` makes the rows of a group and
    its number; without it they are `rollout_samples` with its defaults. `new_version` is called with TRL's model
    version after each weight update, in TRL's thread.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[Rollout]],
        *,
        ahead: int = 1024,
        convert: Callable[[Sequence[Rollout], int], Iterable[Any]] | None = None,
        new_version: Callable[[int], None] | None = None,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._groups = groups
        self._convert = convert or _defaults
        self._new_version = new_version
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._pull, daemon=True, name="rollwright-groups")
        self._error: BaseException | None = None
        self._heard = time.monotonic()

    def start(self) -> None:
        self._heard = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Hand over no more rows. A thread that waits for its stream ends with the stream: close that afterwards."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def update_model_version(self, model_version: int) -> None:
        if self._new_version is not None:
            self._new_version(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the stream, or `RolloutOverdue` when no group has come for too long."""
        if self._error is not None:
            raise InfraError(f"the stream of groups ended with {self._error!r}") from self._error
        waited = time.monotonic() - self._heard
        if waited > stale_after_s and self.rollout_buffer.empty():
            raise RolloutOverdue(f"no group for {waited:.0f} s")

    def _pull(self) -> None:
        try:
            for number, group in enumerate(self._groups):
                samples = list(self._convert(group, number))
                self.metrics_queue.put({"rollwright/rows": float(len(samples))})
                for sample in samples:
                    self._put(sample)
                self._heard = time.monotonic()
                if self._stopped.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - the trainer's thread is told in check_health
            self._error = error

    def _put(self, sample: Any) -> None:
        while not self._stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=0.2)
            except queue.Full:
                self._heard = time.monotonic()
            else:
                return


def _defaults(group: Sequence[Rollout], number: int) -> Iterable[Any]:
    return rollout_samples(group, number=number)
