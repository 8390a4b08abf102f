"""slime's `sampling_params` as ours.

What cannot be honoured is refused: tokens that are sampled in another way than the trainer believes have another
probability than it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollwright.errors import ConfigError
from rollwright.types import Sampling

__all__ = ["check_sampling", "sampling_of"]

_HONOURED = ("temperature", "top_p", "top_k", "max_new_tokens", "sampling_seed", "stop_token_ids")
_OF_THE_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
"""They change the text of a reply, which nothing is made of: samples are made of its ids."""
_OFF = {"repetition_penalty": 1, "n": 1}
"""What means nothing, besides what is empty, 0 or false."""


def sampling_of(parameters: Mapping[str, Any], default: Sampling, stop_ids: Collection[int]) -> Sampling:
    """slime's `sampling_params`; what is absent or None is as `default` says. Its `top_k = -1` is our 0: off.

    `stop_ids`: the ids that end a turn, whatever slime says. Raises `ConfigError` naming what cannot be honoured.
    """
    for name, value in parameters.items():
        if name not in _HONOURED and name not in _OF_THE_TEXT and value and value != _OFF.get(name):
            raise ConfigError(
                f"slime's sampling_params ask for {name} = {value!r}, which cannot be honoured: of them are "
                f"{', '.join(_HONOURED)}",
                field=name,
            )
    given = {name: value for name, value in parameters.items() if value is not None}
    try:
        foreign = sorted({int(each) for each in given.get("stop_token_ids", ())} - set(stop_ids))
        sampling = Sampling(
            temperature=float(given.get("temperature", default.temperature)),
            top_p=float(given.get("top_p", default.top_p)),
            top_k=max(0, int(given.get("top_k", default.top_k))),
            max_new_tokens=int(given.get("max_new_tokens", default.max_new_tokens)),
            seed=given.get("sampling_seed", default.seed),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"slime's sampling_params cannot be used: {error}", field="sampling_params") from error
    if foreign:
        raise ConfigError(
            f"slime's sampling_params ask for stop_token_ids {foreign}, which end no turn of this policy: that do "
            f"{sorted(stop_ids)}, at which the engine always stops",
            field="stop_token_ids",
        )
    return sampling


def check_sampling(args: Any, default: Sampling, stop_ids: Collection[int]) -> None:
    """The same of slime's arguments, before the first rollout. Raises `ConfigError`."""
    asked = {name: getattr(args, f"rollout_{name}", None) for name in ("stop", "stop_token_ids")}
    sampling_of(asked, default, stop_ids)
