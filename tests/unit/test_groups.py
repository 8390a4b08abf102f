"""Advantages are made of one value per rollout, and of nothing that was not judged."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import UsageError
from rollwright.groups import Estimator, Member, advantages, members_of, rollout_weights
from rollwright.types import Sample

ESTIMATORS: list[Estimator] = ["grpo", "dr_grpo", "rloo"]

rewards = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=12)
estimators = st.sampled_from(ESTIMATORS)


def group(values: list[float | None]) -> list[Member]:
    return [Member(rollout_id=f"a.{n}", reward=value) for n, value in enumerate(values, start=1)]


def sample(rollout: int, *, trained: int = 1, reward: float | None = 1.0, group: str = "a") -> Sample:
    return Sample(
        task_id="t", group_id=group, rollout_id=f"{group}.{rollout}", segment_index=0, n_segments=1, role="main",
        tokens=[7] * (trained + 1), loss_mask=[0] + [1] * trained, logprobs=[0.0] + [-0.1] * trained, versions=[],
        prompt_length=1, reward=reward, weight=1.0, trainable=trained > 0 and reward is not None,
        counts_in_baseline=reward is not None,
    )  # fmt: skip


# ------------------------------------------------------------------ advantages


def test_grpo_divides_by_the_sample_deviation() -> None:
    found = advantages(group([1.0, 0.0, 0.0, 1.0]), epsilon=0.0)
    assert (found.status, found.mean, found.counted, found.total) == ("ok", 0.5, 4, 4)
    assert found.deviation == pytest.approx(math.sqrt(1 / 3))
    assert list(found.advantages.values()) == pytest.approx([0.5 / math.sqrt(1 / 3) * sign for sign in (1, -1, -1, 1)])


def test_dr_grpo_subtracts_the_mean_only() -> None:
    assert list(advantages(group([1.0, 0.0, 0.5]), estimator="dr_grpo").advantages.values()) == [0.5, -0.5, 0.0]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    found = advantages(group([1.0, 0.0, 0.0]), estimator="rloo").advantages
    assert list(found.values()) == pytest.approx([1.0, -0.5, -0.5])


@given(rewards, estimators)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(values: list[float], estimator: Estimator) -> None:
    found = advantages(group(values), estimator=estimator)
    largest = max(abs(value) for value in found.advantages.values())
    assert abs(math.fsum(found.advantages.values())) <= 1e-9 * max(1.0, largest) * len(values)
    by_reward = sorted(zip(values, found.advantages.values(), strict=True))
    assert [advantage for _, advantage in by_reward] == sorted(found.advantages.values())


@given(rewards, estimators, st.randoms(use_true_random=False))
def test_the_order_of_the_rollouts_changes_nothing(values: list[float], estimator: Estimator, random: object) -> None:
    members = group(values)
    shuffled = list(members)
    random.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    assert advantages(shuffled, estimator=estimator) == advantages(members, estimator=estimator)


@given(rewards, estimators, st.lists(st.sampled_from(["ungraded", "does not count"]), max_size=5))
def test_what_does_not_count_never_changes_anything(
    values: list[float], estimator: Estimator, others: list[str]
) -> None:
    healthy = group(values)
    lost = [
        Member(rollout_id=f"x.{n}", reward=None if kind == "ungraded" else 1e6, counts=kind == "ungraded")
        for n, kind in enumerate(others)
    ]
    alone, together = advantages(healthy, estimator=estimator), advantages([*lost, *healthy], estimator=estimator)
    assert together == replace(alone, total=len(values) + len(others))
    assert not set(together.advantages) & {member.rollout_id for member in lost}


@given(rewards, st.floats(-50, 50), st.floats(0.5, 20))
def test_grpo_does_not_care_about_the_scale_of_rewards(values: list[float], shift: float, scale: float) -> None:
    found = advantages(group(values), epsilon=0.0)
    moved = advantages(group([value * scale + shift for value in values]), epsilon=0.0)
    if found.informative and found.deviation > 1e-3:
        assert list(moved.advantages.values()) == pytest.approx(list(found.advantages.values()), abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(2, 9), estimators)
def test_a_constant_group_teaches_nothing(value: float, count: int, estimator: Estimator) -> None:
    found = advantages(group([value] * count), estimator=estimator)
    assert (found.status, found.deviation, found.informative) == ("constant", 0.0, False)
    assert list(found.advantages.values()) == [0.0] * count


def test_lost_rollouts_can_leave_a_group_constant() -> None:
    assert advantages(group([1.0, None, 1.0, None])).status == "constant"


@pytest.mark.parametrize("values", [[], [None, None], [1.0, None]])
def test_below_the_quorum_there_are_no_advantages(values: list[float | None]) -> None:
    found = advantages(group(values))
    assert (found.status, dict(found.advantages), found.total) == ("below_quorum", {}, len(values))


def test_a_rollout_alone_is_no_better_than_itself() -> None:
    found = advantages(group([0.7, None]), quorum=1)
    assert (found.status, dict(found.advantages)) == ("constant", {"a.1": 0.0})


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(UsageError, match=r"reward of rollout a\.2"):
        advantages(group([1.0, reward]))


def test_a_rollout_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a\.1 is in the group twice"):
        advantages([*group([1.0, 0.0]), *group([1.0])])


def test_a_quorum_of_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="quorum is 0"):
        advantages(group([1.0, 0.0]), quorum=0)


# ------------------------------------------------------------------ samples


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, None]), st.integers(1, 6)), min_size=2, max_size=8))
def test_how_often_a_rollout_was_cut_changes_nothing(rollouts: list[tuple[float | None, int]]) -> None:
    samples = [sample(n, reward=reward) for n, (reward, segments) in enumerate(rollouts, 1) for _ in range(segments)]
    assert advantages(members_of(samples)) == advantages(group([reward for reward, _ in rollouts]))


def test_every_segment_gets_the_advantage_of_its_rollout() -> None:
    samples = [sample(1, reward=1.0), sample(1, reward=1.0), sample(2, reward=0.0), sample(3, reward=None)]
    found = advantages(members_of(samples), estimator="dr_grpo")
    assert [found.of(each) for each in samples] == [0.5, 0.5, -0.5, None]


def test_a_sample_that_trains_nothing_has_no_advantage() -> None:
    found = advantages(group([1.0, 0.0]))
    assert found.of(sample(1, trained=0)) is None


def test_segments_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="disagree"):
        members_of([sample(1, reward=1.0), sample(1, reward=0.0)])


def test_samples_of_two_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="samples of 2 groups"):
        members_of([sample(1), sample(1, group="b")])


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=5))
def test_each_rollout_weighs_one(rollouts: list[list[int]]) -> None:
    samples = [sample(n, trained=count) for n, counts in enumerate(rollouts, 1) for count in counts]
    weights = rollout_weights(samples)
    for n, counts in enumerate(rollouts, 1):
        own = [w for each, w in zip(samples, weights, strict=True) if each.rollout_id == f"a.{n}"]
        assert math.fsum(own) == pytest.approx(1.0 if any(counts) else 0.0)
        assert own == pytest.approx([count / max(1, sum(counts)) for count in counts])


def test_a_sample_left_out_is_made_up_for_by_its_siblings() -> None:
    assert rollout_weights([sample(1, trained=3), sample(1, trained=1)]) == [0.75, 0.25]
    assert rollout_weights([sample(1, trained=1)]) == [1.0]


def test_a_result_can_be_sent_to_another_process() -> None:
    found = advantages(group([1.0, 0.0, None]))
    assert pickle.loads(pickle.dumps(found)) == found


def test_importing_groups_loads_no_numpy() -> None:
    code = "import rollwright.groups, sys; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
