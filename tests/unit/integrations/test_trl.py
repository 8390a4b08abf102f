"""TRL: the batch of `rollout_func` and the fields of `RolloutSample` (TRL 1.16)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rollwright.errors import InfraError, RolloutOverdue
from rollwright.integrations.record import StoredRollout, group_advantages
from rollwright.integrations.trl import REWARD, GroupWorker, reward, rollout_batch, sample_fields


def test_a_batch_has_one_row_per_prompt(calc: list[StoredRollout]) -> None:
    batch = rollout_batch(calc, filler=9)
    assert {len(column) for column in batch.values()} == {5}
    assert {"prompt_ids", "completion_ids", "logprobs", "env_mask"} <= set(batch)
    for n, rollout in enumerate(calc):
        length = len(batch["completion_ids"][n])
        assert length == len(batch["logprobs"][n]) == len(batch["env_mask"][n]) > 0
        assert batch["rollwright_rollout"][n] == rollout.record.rollout


def test_of_a_fan_out_the_row_that_trains_most_is_taken_and_the_rest_counted(calc: list[StoredRollout]) -> None:
    batch = rollout_batch(calc, filler=9)
    counts = [sum(sample.loss_mask) for sample in calc[1].samples]
    assert sum(batch["env_mask"][1]) == max(counts)
    assert batch["rollwright_dropped_tokens"] == [0, sum(counts) - max(counts), 0, 0, 0]


def test_a_lost_rollout_has_no_reward_and_no_loss(calc: list[StoredRollout]) -> None:
    batch = rollout_batch(calc, filler=9)
    assert reward([None] * 5, **{REWARD: batch[REWARD]}) == [1.0, 0.0, None, 0.5, 0.0]
    assert [any(mask) for mask in batch["env_mask"]] == [True, True, False, True, False]
    assert (batch["prompt_ids"][2], batch["completion_ids"][2]) == ([9], [9])


def test_what_does_not_count_has_no_reward_and_no_loss(calc: list[StoredRollout]) -> None:
    aside = replace(calc[0], record=replace(calc[0].record, counts_in_baseline=False))
    batch = rollout_batch([aside, *calc], filler=9)
    assert batch[REWARD] == [None, 1.0, 0.0, None, 0.5, 0.0]
    assert not any(batch["env_mask"][0])


def test_a_group_below_its_quorum_has_no_rewards_and_no_loss(calc: list[StoredRollout]) -> None:
    other = [replace(each, record=replace(each.record, epoch=2, quorum=3)) for each in calc[:3]]
    batch = rollout_batch([*other, *calc], filler=9)
    assert batch[REWARD] == [None, None, None, 1.0, 0.0, None, 0.5, 0.0]
    assert [any(mask) for mask in batch["env_mask"]][:4] == [False, False, False, True]


def test_async_rows_have_full_length_and_the_rollouts_advantage(calc: list[StoredRollout]) -> None:
    advantages = group_advantages(calc)
    rows = list(sample_fields(calc, advantages, number=4))
    samples = [sample for rollout in calc for sample in rollout.samples]
    assert len(rows) == len(samples) == 5
    for row, sample in zip(rows, samples, strict=True):
        assert row["input_ids"].tolist() == sample.tokens.tolist()
        assert row["completion_mask"].tolist() == sample.loss_mask.tolist()
        assert np.allclose(row["old_log_probs"], sample.logprobs, atol=1e-6)
        assert [row[name].dtype.name for name in ("input_ids", "completion_mask", "old_log_probs")] == [
            "int64",
            "int64",
            "float32",
        ]
        assert row["advantage"] == advantages.advantages[sample.rollout_id]
        assert row["group_id"] == 4
    assert [row["model_version"] for row in rows] == [7, 7, 7, 8, 8]


def worker_of(groups: Iterator[list[StoredRollout]], *, ahead: int = 8) -> GroupWorker:
    """A worker whose rows are plain values, for machines without TRL."""
    return GroupWorker(
        groups,
        ahead=ahead,
        convert=lambda group, number: sample_fields(group, group_advantages(group), number=number),
    )


def test_a_worker_hands_over_every_row_and_waits_for_room(calc: list[StoredRollout]) -> None:
    worker = worker_of(iter([calc, calc]), ahead=2)
    worker.start()
    rows = [worker.rollout_buffer.get(timeout=60) for _ in range(10)]
    assert [row["group_id"] for row in rows] == [0] * 5 + [1] * 5
    assert worker.metrics_queue.get(timeout=60) == {"rollwright/rows": 5.0}
    worker.check_health(3600)
    worker.stop()


def test_a_stopped_worker_gives_up_waiting_for_room(calc: list[StoredRollout]) -> None:
    pulled = threading.Event()

    def endless() -> Iterator[list[StoredRollout]]:
        while True:
            pulled.set()
            yield calc

    worker = worker_of(endless(), ahead=1)
    worker.start()
    assert pulled.wait(60)
    worker.stop()
    assert worker.rollout_buffer.qsize() <= 1


def test_the_trainer_is_told_what_ended_the_stream(calc: list[StoredRollout]) -> None:
    def broken() -> Iterator[list[StoredRollout]]:
        yield calc
        raise OSError("disk full")

    worker = worker_of(broken())
    worker.start()
    for _ in range(5):
        worker.rollout_buffer.get(timeout=60)
    waiting = threading.Event()
    for _ in range(6000):
        try:
            worker.check_health(3600)
        except InfraError as error:
            assert "disk full" in str(error)  # noqa: PT017 - it is looked for until the thread has told it
            break
        waiting.wait(0.01)
    else:
        pytest.fail("the trainer was not told")


def test_silence_is_noticed(calc: list[StoredRollout]) -> None:
    holding = threading.Event()

    def stuck() -> Iterator[list[StoredRollout]]:
        holding.wait(60)
        yield calc

    worker = worker_of(stuck())
    worker.start()
    with pytest.raises(RolloutOverdue, match="no group for"):
        worker.check_health(-1.0)
    holding.set()
    worker.stop()


def test_a_new_version_is_passed_on() -> None:
    told: queue.Queue[int] = queue.Queue()
    GroupWorker(iter([]), new_version=told.put).update_model_version(7)
    assert told.get_nowait() == 7
