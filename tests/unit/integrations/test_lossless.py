"""Whatever a sample looks like, every converter says the same tokens, mask and logprobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.integrations import harbor, openrlhf, prime_rl, skyrl, tinker, trl, verl
from rollwright.integrations.record import StoredRollout, group_advantages
from rollwright.store import RolloutRecord
from rollwright.types import Sample, VersionSpan

Said = tuple[list[int], list[int], list[float]]
"""Tokens, mask, logprobs, in full length."""


@st.composite
def rollouts(draw: st.DrawFn) -> StoredRollout:
    """One rollout of several samples with any masks; each begins with a prompt and trains something."""
    samples: list[Sample] = []
    for index in range(draw(st.integers(1, 3))):
        prompt = draw(st.integers(1, 4))
        mask = [0] * prompt + draw(st.lists(st.integers(0, 1), min_size=1, max_size=20).filter(any))
        samples.append(
            Sample(
                task_id="t",
                group_id="g",
                rollout_id="g.1",
                segment_index=index,
                n_segments=3,
                role="main",
                tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask))),
                loss_mask=mask,
                logprobs=[bit * draw(st.floats(-50, -0.125, width=32)) for bit in mask],
                versions=[VersionSpan("3", 0, len(mask))],
                prompt_length=prompt,
                reward=1.0,
                weight=1.0,
                trainable=True,
                counts_in_baseline=True,
            )
        )
    return StoredRollout(record=record(1, 1.0), samples=samples)


def record(attempt: int, reward: float) -> RolloutRecord:
    return RolloutRecord(
        rollout=f"g.{attempt}", task="g", task_id="t", attempt=attempt, status="resolved", reward=reward,
        trainable=True, counts_in_baseline=True,
    )  # fmt: skip


OTHER = StoredRollout(record=record(2, 0.0), samples=())


def split(prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> Said:
    return prompt + response, [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs


def said_by_verl(rollout: StoredRollout) -> list[Said]:
    return [
        split(f["prompt_ids"], f["response_ids"], f["response_mask"], f["response_logprobs"])
        for f in verl.output_fields(rollout)
    ]


def said_by_skyrl(rollout: StoredRollout) -> list[Said]:
    output = skyrl.generator_output([("g", rollout)], quorum=1)
    columns = (output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"))
    return [split(*row) for row in zip(*columns, strict=True)]


def said_by_trl(rollout: StoredRollout) -> list[Said]:
    batch = trl.rollout_batch([rollout], filler=0, quorum=1)
    columns = (batch[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs"))
    return [split(*row) for row in zip(*columns, strict=True)]


def said_by_trl_async(rollout: StoredRollout) -> list[Said]:
    advantages = group_advantages([rollout, OTHER])
    return [
        (row["input_ids"].tolist(), row["completion_mask"].tolist(), row["old_log_probs"].tolist())
        for row in trl.sample_fields([rollout], advantages, number=0)
    ]


def said_by_prime_rl(rollout: StoredRollout) -> list[Said]:
    rows = prime_rl.training_samples([rollout], group_advantages([rollout, OTHER]), env_name="swe")
    return [(row["token_ids"], [int(bit) for bit in row["mask"]], row["logprobs"]) for row in rows]


def said_by_openrlhf(rollout: StoredRollout) -> list[Said]:
    found = openrlhf.responses([rollout, OTHER], prompt="", label="")[0]
    mask = np.zeros(len(found["observation_tokens"]), int)
    for start, end in found["action_ranges"]:
        mask[start:end] += 1
    return [(found["observation_tokens"], mask.tolist(), found["rollout_log_probs"])]


def said_by_tinker(rollout: StoredRollout) -> list[Said]:
    rows: list[Said] = []
    for tokens, inputs in tinker.datum_fields([rollout], group_advantages([rollout, OTHER])):
        targets: list[int] = inputs["target_tokens"].tolist()
        assert tokens[1:] == targets[:-1]
        mask = [0, *(int(bit) for bit in inputs["mask"])]
        rows.append(([*tokens, targets[-1]], mask, [0.0, *inputs["logprobs"].tolist()]))
    return rows


ALL: list[Callable[[StoredRollout], list[Said]]] = [
    said_by_verl,
    said_by_skyrl,
    said_by_trl_async,
    said_by_prime_rl,
    said_by_tinker,
]
ONE: list[Callable[[StoredRollout], list[Said]]] = [said_by_trl, said_by_openrlhf]


def said(sample: Sample) -> Said:
    return sample.tokens.tolist(), sample.loss_mask.tolist(), sample.logprobs.tolist()


@pytest.mark.parametrize("convert", ALL, ids=lambda convert: convert.__name__)
@given(rollout=rollouts())
def test_every_sample_arrives_whole(convert: Callable[[StoredRollout], list[Said]], rollout: StoredRollout) -> None:
    assert convert(rollout) == [said(sample) for sample in rollout.samples]


@pytest.mark.parametrize("convert", ONE, ids=lambda convert: convert.__name__)
@given(rollout=rollouts())
def test_where_one_sample_fits_it_is_whole(
    convert: Callable[[StoredRollout], list[Said]], rollout: StoredRollout
) -> None:
    (row,) = convert(rollout)
    assert row in [said(sample) for sample in rollout.samples]
    assert sum(row[1]) == max(sum(sample.loss_mask) for sample in rollout.samples)


@given(rollouts())
def test_harbor_completes_each_trained_token_once(rollout: StoredRollout) -> None:
    for detail, sample in zip(harbor.rollout_details(rollout), rollout.samples, strict=True):
        tokens, mask, logprobs = said(sample)
        again: list[Any] = [0] * len(tokens)
        turns = (detail[name] for name in ("prompt_token_ids", "completion_token_ids", "logprobs"))
        for prompt, completion, values in zip(*turns, strict=True):
            end = len(prompt) + len(completion)
            assert prompt + completion == tokens[:end]
            assert values == logprobs[len(prompt) : end]
            again[len(prompt) : end] = [bit + 1 for bit in again[len(prompt) : end]]
        assert again == mask
