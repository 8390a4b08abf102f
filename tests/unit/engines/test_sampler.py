"""What is drawn, how often, and with which logprob."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.sampler import candidates, draw, uniform
from rollwright.errors import EngineProtocolError
from rollwright.types import Sampling

logits_lists = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


def logits(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


@given(
    values=logits_lists,
    temperature=st.floats(0.05, 3),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 50),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_the_distribution_sums_to_one_and_the_drawn_logprob_is_of_it(
    values: list[float], temperature: float, top_p: float, top_k: int, chance: float
) -> None:
    ids, logprobs = candidates(logits(values), Sampling(temperature=temperature, top_p=top_p, top_k=top_k))
    assert len(ids) == len(set(ids.tolist())) == len(logprobs)
    assert np.exp(logprobs).sum() == pytest.approx(1)
    token, logprob = draw((ids, logprobs), chance)
    assert logprob == logprobs[ids.tolist().index(token)]


@given(values=logits_lists, temperature=st.floats(0.05, 3))
def test_with_nothing_cut_it_is_the_softmax_at_the_temperature(values: list[float], temperature: float) -> None:
    ids, logprobs = candidates(logits(values), Sampling(temperature=temperature))
    scaled = [float(value) / temperature for value in logits(values)]
    whole = math.log(math.fsum(math.exp(value - max(scaled)) for value in scaled)) + max(scaled)
    assert ids.tolist() == list(range(len(values)))
    np.testing.assert_allclose(logprobs, [value - whole for value in scaled], atol=1e-9)


@given(values=logits_lists, top_p=st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_most_likely_ids_that_reach_the_share(values: list[float], top_p: float) -> None:
    ids, _ = candidates(logits(values), Sampling(top_p=top_p))
    every = np.exp(candidates(logits(values), Sampling())[1])
    kept = every[ids]
    assert kept.sum() >= top_p - 1e-9
    assert kept[:-1].sum() < top_p + 1e-9
    assert kept.min() >= np.delete(every, ids).max(initial=0.0)


def test_top_k_comes_before_top_p_and_the_lower_id_wins_a_tie() -> None:
    values = logits([math.log(0.4), math.log(0.2), math.log(0.2), math.log(0.2)])
    assert candidates(values, Sampling(top_k=2))[0].tolist() == [0, 1]
    # Of what top-k kept (2/3, 1/3) one id reaches 0.6; of all it would take two.
    assert candidates(values, Sampling(top_k=2, top_p=0.6))[0].tolist() == [0]
    assert candidates(values, Sampling(top_p=0.6))[0].tolist() == [0, 1]


def test_temperature_zero_is_certain_of_the_most_likely() -> None:
    ids, logprobs = candidates(logits([0.0, 3.0, 1.0]), Sampling(temperature=0.0))
    assert (ids.tolist(), logprobs.tolist()) == ([1], [0.0])


def test_draws_are_as_frequent_as_their_logprobs_say() -> None:
    choice = candidates(logits([1.0, 0.0, -1.0, 2.0]), Sampling(temperature=0.8, top_k=3))
    count = 20_000
    drawn = [draw(choice, uniform(b"frequency", position)) for position in range(count)]
    for token, logprob in zip(*choice, strict=True):
        share = sum(got == token for got, _ in drawn) / count
        assert share == pytest.approx(math.exp(logprob), abs=4 * math.sqrt(0.25 / count))
    assert {token for token, _ in drawn} == {3, 0, 1}


def test_a_chance_belongs_to_its_key_and_position() -> None:
    chances = {uniform(key, position) for key in (b"a", b"b") for position in range(1000)}
    assert len(chances) == 2000
    assert all(0 <= chance < 1 for chance in chances)
    assert uniform(b"a", 5) == uniform(b"a", 5)
    assert sum(chances) / 2000 == pytest.approx(0.5, abs=0.03)


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(EngineProtocolError, match="not finite"):
        candidates(logits([0.0, math.nan]), Sampling())
