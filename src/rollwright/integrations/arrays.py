"""Samples as numpy sees them: views of their buffers, and the split into prompt and response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rollwright.types import Sample

__all__ = ["Array", "Lists", "logprob_list", "response_lists", "spread", "views"]

T = TypeVar("T")

Array: TypeAlias = NDArray[Any]


class Views(NamedTuple):
    """[L] each; they share memory with the sample."""

    tokens: Array
    """int32"""
    mask: Array
    """int8"""
    logprobs: Array
    """float64"""


def views(sample: Sample) -> Views:
    return Views(np.asarray(sample.tokens), np.asarray(sample.loss_mask), np.asarray(sample.logprobs))


class Lists(NamedTuple):
    """A sample cut where its first reply begins, for trainers whose rows are Python lists."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    """Of `response`."""
    logprobs: list[float]
    """Of `response`; 0.0 where the mask is 0."""


def response_lists(sample: Sample) -> Lists:
    """Each token is copied once."""
    at = sample.prompt_length
    tokens = memoryview(sample.tokens)
    return Lists(
        tokens[:at].tolist(),
        tokens[at:].tolist(),
        spread(sample, lambda start, end: [1] * (end - start), 0, at=at),
        logprob_list(sample, at=at),
    )


def logprob_list(sample: Sample, *, at: int = 0) -> list[float]:
    """Of the tokens from `at` on. Only what is trained is made into new Python numbers."""
    values = memoryview(sample.logprobs)
    return spread(sample, lambda start, end: cast("list[float]", values[start:end].tolist()), 0.0, at=at)


def spread(sample: Sample, values: Callable[[int, int], list[T]], other: T, *, at: int = 0) -> list[T]:
    """One value per token from `at` on: `values(start, end)` where tokens are trained, `other` elsewhere."""
    spread = [other] * (len(sample.tokens) - at)
    for start, end in sample.trained_spans():
        spread[start - at : end - at] = values(start, end)
    return spread
