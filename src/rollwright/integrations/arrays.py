"""Samples as numpy sees them: views of their buffers, and the split into prompt and response."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollwright.types import Sample

__all__ = ["Array", "Lists", "dense", "response_lists", "views"]

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
    mask, logprobs = dense(sample, start=at)
    return Lists(tokens[:at].tolist(), tokens[at:].tolist(), mask, logprobs)


def dense(sample: Sample, *, start: int = 0) -> tuple[list[int], list[float]]:
    """Mask and logprobs of the tokens from `start` on. Only what is trained is made into new Python numbers."""
    length = len(sample.tokens) - start
    mask, logprobs = [0] * length, [0.0] * length
    values = memoryview(sample.logprobs)
    for begin, end in sample.trained_spans():
        mask[begin - start : end - start] = [1] * (end - begin)
        logprobs[begin - start : end - start] = values[begin:end].tolist()
    return mask, logprobs
