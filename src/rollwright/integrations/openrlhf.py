"""OpenRLHF: the rollouts of one prompt as the results of `AgentExecutorBase.execute`.

OpenRLHF makes its baseline by position: every prompt has `n_samples_per_prompt` results, and there is no way to say
that one is missing. So this takes whole groups. The place of a rollout that was not graded is held by a result without
actions, which trains nothing, and whose reward is the mean of the graded ones: that leaves the group's mean as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel

from rollwright.errors import InfraError
from rollwright.integrations.arrays import logprob_list
from rollwright.integrations.classes import module
from rollwright.integrations.record import Rollout, baselined, longest, stand_in, trained

__all__ = ["agent_executor", "responses"]


def responses(group: Sequence[Rollout], *, prompt: str, label: str, filler: int = 0) -> list[dict[str, Any]]:
    """One result per rollout, in order. `prompt` and `label` are what `execute` was called with.

    OpenRLHF has one row a rollout: of several samples the one that trains the most tokens is taken, and
    `extra_logs["dropped_tokens"]` counts the trained tokens of the others. A group in which fewer than two rollouts
    count trains nothing. `filler` is the token of a row that stands in for a rollout without one.
    """
    counting = {each.record.rollout for each in baselined(group)}
    rewards = [each.record.reward or 0.0 for each in group if each.record.rollout in counting]
    mean = fsum(rewards) / len(rewards) if rewards else 0.0
    return [
        _response(each, each.record.rollout in counting, mean, filler) | {"prompt": prompt, "label": label}
        for each in group
    ]


def _response(rollout: Rollout, counts: bool, mean: float, filler: int) -> dict[str, Any]:
    samples = trained(rollout) if counts else []
    sample = longest(samples) if samples else stand_in(rollout, filler=filler)
    reward = rollout.record.reward if counts else mean
    spans = sample.trained_spans()
    dropped = sum(end - start for each in samples if each is not sample for start, end in each.trained_spans())
    return {
        "reward": reward,
        "scores": reward,
        "observation_tokens": sample.tokens.tolist(),
        "action_ranges": spans,
        "rollout_log_probs": logprob_list(sample),
        "truncated": sample.truncated,
        "extra_logs": {"ungraded": float(not counts), "dropped_tokens": float(dropped)},
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
        self._waiting: dict[tuple[str, str], _Group] = {}

    async def execute(self, prompt: str, label: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Raises `InfraError` when the group could not be rolled out."""
        group = self._waiting.setdefault((prompt, label), _Group())
        place = group.count
        group.count += 1
        if place == 0:
            await anyio.lowlevel.checkpoint()  # all others of this prompt have joined when we go on
            del self._waiting[prompt, label]
            try:
                rollouts = await self.roll_out(prompt, label, group.count)
                group.results = responses(rollouts, prompt=prompt, label=label, filler=self.filler)
            finally:
                group.done.set()
        await group.done.wait()
        if not group.results:
            raise InfraError("the group of this sample could not be rolled out; its first sample says why")
        return group.results[place]


@dataclass(slots=True)
class _Group:
    """The calls of `execute` for the samples of one prompt."""

    count: int = 0
    done: anyio.Event = field(default_factory=anyio.Event)
    results: Sequence[dict[str, Any]] = ()
