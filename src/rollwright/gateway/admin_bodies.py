"""What callers of the admin routes send, checked before anything is done."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from rollwright.config import SamplingTable
from rollwright.errors import MalformedRequest
from rollwright.gateway.gate import PauseMode
from rollwright.gateway.settings import SessionSettings
from rollwright.types import HistoryPolicy, TrafficClass

__all__ = [
    "ROLLOUT_NAME",
    "BenchBody",
    "Body",
    "CloseBody",
    "LimitsBody",
    "NoBody",
    "OpenBody",
    "PauseBody",
    "ResumeBody",
    "SettingsBody",
    "read_body",
    "what_is_wrong",
]

ROLLOUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What a rollout may be called: its log is a file of that name."""

_SHOWN = 100
"""Characters of a wrong value."""

BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    """A JSON object. Nothing is converted: text that looks like a number is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _number_as_name(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Name = Annotated[str, BeforeValidator(_number_as_name)]
"""Trainers count versions and groups, too."""


def _rollout_name(name: str) -> str:
    if not ROLLOUT_NAME.fullmatch(name):
        raise ValueError("letters, digits, dot, dash and underscore, at most 128")
    return name


class NoBody(Body):
    """Of routes to which nothing is said."""


class LimitsBody(Body):
    """See `SessionLimits`."""

    turns: PositiveInt | None = None
    sampled_tokens: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    failures: PositiveInt | None = None


class SettingsBody(Body):
    """What of a session's settings is another than the gateway's."""

    sampling: SamplingTable | None = None
    limits: LimitsBody | None = None
    history: HistoryPolicy | None = None
    trained: frozenset[TrafficClass] | None = None

    def over(self, given: SessionSettings) -> SessionSettings:
        """`given`, with what is named here in its place."""
        sampling = {} if self.sampling is None else self.sampling.model_dump(exclude_unset=True)
        limits = {} if self.limits is None else self.limits.model_dump(exclude_unset=True)
        return SessionSettings(
            sampling=replace(given.sampling, **sampling),
            limits=replace(given.limits, **limits),
            history=self.history or given.history,
            trained=given.trained if self.trained is None else self.trained,
        )


class OpenBody(SettingsBody):
    rollout_id: Annotated[str, AfterValidator(_rollout_name)]
    seed: int | None = None
    one_program: bool = False

    def over(self, given: SessionSettings) -> SessionSettings:
        """Also with a seed of its own, where the gateway has one: rollouts with the same would be the same."""
        made = super().over(given)
        seed = self.seed
        if seed is None and made.sampling.seed is not None:
            digest = blake2b(f"{made.sampling.seed}/{self.rollout_id}".encode(), digest_size=6)
            seed = int.from_bytes(digest.digest())
        return replace(made, sampling=replace(made.sampling, seed=seed))


class CloseBody(Body):
    reward: float | None = None
    task_id: Name | None = None
    group_id: Name | None = None
    max_sample_tokens: PositiveInt | None = None
    accepted_versions: list[Name] | None = None


class PauseBody(Body):
    mode: PauseMode = "abort"


class ResumeBody(Body):
    version: Name | None = None


class BenchBody(Body):
    """Of `/_bench`: a session by the client's own id, which is also its key."""

    sid: Name
    tokens: bool = False
    """Whether the samples are wanted with their arrays."""


def read_body(kind: type[BodyT], data: bytes) -> BodyT:
    """No data is an empty object. Raises `MalformedRequest` naming the field."""
    try:
        return kind.model_validate_json(data or b"{}", strict=True)
    except ValidationError as error:
        field, wrong = what_is_wrong(error)
        raise MalformedRequest(wrong, field=field) from error


def what_is_wrong(error: ValidationError) -> tuple[str, str]:
    """The first field, dotted, and a sentence that begins with it."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    match first["type"]:
        case "extra_forbidden":
            return field, f"{field}: there is no such field"
        case "missing":
            return field, f"{field}: is missing"
        case "json_invalid" | "model_type":
            return field, f"{field}: {first['msg']}"
        case _:
            said: Any = first["input"]
            wrong = first["msg"].removeprefix("Value error, ")
            return field, f"{field}: {wrong} (not {repr(said)[:_SHOWN]})"
