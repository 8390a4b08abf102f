"""OpenRLHF: the rollouts of one prompt as the results of `AgentExecutorBase.execute`.

OpenRLHF makes its baseline by position: every prompt has `n_samples_per_prompt` results, and there is no way to say
that one is missing. So this takes whole groups. The place of a rollout that was not graded is held by a result without
actions, which trains nothing, and whose reward is the mean of the graded ones: that leaves the group's mean as it is.
Where none was graded it is the mean of what was graded before: no reward (OpenRLHF takes None for a reward model's
matter, and NaN into the loss) and no 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from math import fsum, nan
from typing import Any, TypeAlias

import anyio

from rollwright.errors import InfraError
from rollwright.integrations.arrays import logprob_list
from rollwright.integrations.classes import module
from rollwright.integrations.gathered import Gathered
from rollwright.integrations.record import Part, Rollout, counts, longest, parts

__all__ = ["agent_executor", "responses"]


def responses(
    group: Sequence[Rollout],
    *,
    prompt: str,
    label: str,
    filler: int = 0,
    quorum: int | None = None,
    neutral: float | None = None,
) -> list[dict[str, Any]]:
    """One result per rollout, in order. `prompt` and `label` are what `execute` was called with.

    OpenRLHF has one row a rollout: of several samples the one that trains the most tokens is taken, and
    `extra_logs["dropped_tokens"]` counts the trained tokens of the others. Of a group below its quorum (`record.parts`)
    nothing is trained, and what was graded keeps its reward. `filler` is the token of a row that stands in for a
    rollout without one.

    `neutral`: the reward in the places of a group of which nothing counts; their score is NaN, which OpenRLHF's dynamic
    filtering filters out. Raises `InfraError` where it is needed and not given, and `UsageError` for logprobs that
    `record.comparable` refuses.
    """
    rewards = _rewards(group)
    mean = fsum(rewards) / len(rewards) if rewards else neutral
    if mean is None:
        raise InfraError(f"none of {len(group)} rollouts was graded, and there is no reward to hold their places with")
    score = mean if rewards else nan
    return [
        _response(part, mean, score, filler) | {"prompt": prompt, "label": label}
        for part in parts(group, quorum=quorum)
    ]


def _rewards(group: Sequence[Rollout]) -> list[float]:
    """Of those that count."""
    return [each.record.reward for each in group if counts(each) and each.record.reward is not None]


def _response(part: Part, mean: float, score: float, filler: int) -> dict[str, Any]:
    sample = longest(part.rows(filler=filler))
    graded = counts(part.rollout)
    dropped = sum(end - start for each in part.samples if each is not sample for start, end in each.trained_spans())
    return {
        "reward": part.rollout.record.reward if graded else mean,
        "scores": part.rollout.record.reward if graded else score,
        "observation_tokens": sample.tokens.tolist(),
        "action_ranges": sample.trained_spans(),
        "rollout_log_probs": logprob_list(sample),
        "truncated": sample.truncated,
        "extra_logs": {
            "ungraded": float(not graded),
            "below_quorum": float(graded and not part.counts),
            "dropped_tokens": float(dropped),
            "temperature": sample.temperature,
        },
        "images": None,
        "mm_train_inputs": None,
    }


RollOut: TypeAlias = Callable[[str, str, int], Awaitable[Sequence[Rollout]]]
"""Prompt, label and how many → that many rollouts, graded or not."""


def agent_executor(roll_out: RollOut, *, filler: int = 0) -> type[Any]:
    """The class that the file of `--train.agent_func_path` has to call `AgentExecutor`. Needs OpenRLHF.

    OpenRLHF calls `execute` for each sample of a prompt, all at once; `roll_out` is called once for all of them.
    """
    base: Any = module("openrlhf.utils.agent").AgentExecutorBase
    return type("AgentExecutor", (_Executor, base), {"roll_out": staticmethod(roll_out), "filler": filler})


class _Executor:
    roll_out: RollOut
    filler: int

    def __init__(self) -> None:
        self._gathered: Gathered[dict[str, Any]] = Gathered()
        self._rewards = _Rewards()

    async def execute(self, prompt: str, label: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Raises `InfraError` when the group could not be rolled out, and when nothing was graded yet at all."""

        async def group(count: int) -> list[dict[str, Any]]:
            rollouts = await self.roll_out(prompt, label, count)
            found = _rewards(rollouts)
            self._rewards.add(found)
            neutral = None if found else await self._rewards.mean(count)
            return responses(rollouts, prompt=prompt, label=label, filler=self.filler, neutral=neutral)

        with self._rewards.call():
            return await self._gathered.one((prompt, label), group)


class _Rewards:
    """The mean of all rewards so far: in a place that OpenRLHF wants filled it says nothing."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._calls = 0
        self._waiting = 0
        """Calls of groups that wait in `mean`."""
        self._changed = anyio.Event()

    @contextmanager
    def call(self) -> Generator[None]:
        """Around what may add a reward."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._tell()

    def add(self, rewards: Sequence[float]) -> None:
        self._sum += fsum(rewards)
        self._count += len(rewards)
        self._tell()

    async def mean(self, calls: int) -> float | None:
        """For a group of so many calls. Waits for the first reward; None: no other call is on the way to one."""
        self._waiting += calls
        self._tell()
        try:
            while not self._count and self._calls > self._waiting:
                await self._changed.wait()
        finally:
            self._waiting -= calls
        return self._sum / self._count if self._count else None

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
