"""From logits to one sampled id and its logprob. Pure."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

from rollwright.engines.runtime import Logits
from rollwright.errors import EngineProtocolError
from rollwright.types import Sampling

__all__ = ["Candidates", "candidates", "draw", "logprob_of", "uniform"]

Candidates = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Ids that may be sampled, and their logprobs, in one order. The probabilities sum to one."""


def candidates(logits: Logits, sampling: Sampling) -> Candidates:
    """The distribution that is sampled from: logits / temperature, then top-k, then top-p, renormalised.

    top-k keeps the k largest logits (the lower id wins a tie). top-p then keeps the fewest most likely ids whose
    share of what top-k kept reaches `top_p`. Temperature 0 keeps the most likely id alone, with logprob 0.0: it is
    chosen with certainty. Raises `EngineProtocolError` for logits that are not finite.
    """
    if not np.isfinite(logits).all():
        raise EngineProtocolError("the model gave logits that are not finite; its weights are broken")
    if sampling.temperature == 0:
        return np.array([int(np.argmax(logits))]), np.zeros(1)
    scaled = logits.astype(np.float64) / sampling.temperature
    top_k = sampling.top_k if 0 < sampling.top_k < len(scaled) else 0
    if not top_k and sampling.top_p >= 1:
        return np.arange(len(scaled)), scaled - _log_sum_exp(scaled)
    # Stable, so that ties do not depend on the sort's inner ways.
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    kept = scaled[order]
    if sampling.top_p < 1:
        mass = np.cumsum(np.exp(kept - _log_sum_exp(kept)))
        kept = kept[: int(np.searchsorted(mass, sampling.top_p)) + 1]
    return order[: len(kept)], kept - _log_sum_exp(kept)


def draw(choice: Candidates, chance: float) -> tuple[int, float]:
    """The id at `chance` (in [0, 1)) of the cumulative distribution, and its logprob."""
    ids, logprobs = choice
    mass: NDArray[np.float64] = np.cumsum(np.exp(logprobs))
    index = min(int(np.searchsorted(mass, chance * float(mass[-1]), side="right")), len(ids) - 1)
    return int(ids[index]), float(logprobs[index])


def logprob_of(choice: Candidates, token: int) -> float:
    """Of a token that was not drawn; -inf when it could not have been."""
    ids, logprobs = choice
    found = np.flatnonzero(ids == token)
    return float(logprobs[found[0]]) if len(found) else -np.inf


def uniform(key: bytes, position: int) -> float:
    """A number in [0, 1) that depends on `key` and `position` alone.

    One draw per absolute position, not one generator per request: a reply that was aborted and is sampled on from
    `prompt + partial` under the same seed goes on as if it had not been interrupted.
    """
    digest = hashlib.blake2b(struct.pack("<q", position), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _log_sum_exp(values: NDArray[np.float64]) -> np.float64:
    top = values.max()
    return top + np.log(np.add.reduce(np.exp(values - top)))
