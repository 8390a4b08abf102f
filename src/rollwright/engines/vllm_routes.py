"""vLLM's two ways to take token ids: what each is sent, and what its reply says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rollwright.engines.remote import NO_LOGPROB, Json, as_floats, as_ids, as_list, as_logprobs, as_mapping
from rollwright.errors import EngineProtocolError

__all__ = ["Completions", "Generate", "Sampled", "VllmRoute", "prompt_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One reply as told; `len(ids) == len(logprobs)`."""

    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    versions: object
    """`weight_versions`; None where the route does not tell them."""
    cached_tokens: int


class VllmRoute(Protocol):
    """Reading raises `EngineProtocolError`."""

    path: str
    abort_path: str

    def name(self, request_id: str) -> str:
        """How the server calls this request inside: the only id that an abort knows."""
        ...

    def body(self, model: str, ids: Sequence[int], parameters: Json, request_id: str) -> Json: ...

    def read(self, reply: Json, prompt: Sequence[int]) -> Sampled: ...

    def read_prompt(self, reply: Json) -> object:
        """`prompt_logprobs`, as they were told."""
        ...


class Generate:
    """`/inference/v1/generate`, of a server started with `--enable-scale-out` or `--tokens-only`."""

    path = "/inference/v1/generate"
    abort_path = "/inference/v1/abort_requests"

    def name(self, request_id: str) -> str:
        return f"generate-tokens-{request_id}"

    def body(self, model: str, ids: Sequence[int], parameters: Json, request_id: str) -> Json:
        return {
            "request_id": request_id,
            "model": model,
            # As an array: a list of a long prompt's ids costs milliseconds of the event loop to make and to write.
            "token_ids": np.asarray(ids, dtype=np.int32),
            "sampling_params": {**parameters, "detokenize": False},
            "stream": False,
        }

    def read(self, reply: Json, prompt: Sequence[int]) -> Sampled:
        choice = _choice(reply)
        ids = _ids(choice)
        told = as_mapping(choice.get("logprobs"), "logprobs").get("content")
        entries = [as_mapping(entry, "logprobs.content") for entry in as_list(told, "logprobs.content")]
        if [entry.get("token_id") for entry in entries] != ids:
            raise EngineProtocolError(f"vllm: token_ids ({len(ids)}) are not the ids of the logprobs ({len(entries)})")
        return Sampled(
            ids=ids,
            logprobs=_logprobs([entry.get("logprob") for entry in entries], len(ids)),
            finish=_finish(choice),
            versions=choice.get("weight_versions"),
            cached_tokens=_cached(reply),
        )

    def read_prompt(self, reply: Json) -> object:
        return reply.get("prompt_logprobs")


class Completions:
    """`/v1/completions`, of any server; it does not tell weight versions."""

    path = "/v1/completions"
    abort_path = "/abort_requests"

    def name(self, request_id: str) -> str:
        # One prompt a request: the server numbers the prompts of each.
        return f"cmpl-{request_id}-0"

    def body(self, model: str, ids: Sequence[int], parameters: Json, request_id: str) -> Json:
        return {
            "request_id": request_id,
            "model": model,
            "prompt": np.asarray(ids, dtype=np.int32),
            **parameters,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stream": False,
        }

    def read(self, reply: Json, prompt: Sequence[int]) -> Sampled:
        choice = _choice(reply)
        ids = _ids(choice)
        given = as_list(choice.get("prompt_token_ids"), "prompt_token_ids")
        if not np.array_equal(np.asarray(given), np.asarray(prompt)):
            raise EngineProtocolError(
                f"vllm: the prompt that was sampled from ({len(given)} tokens) is not the one sent"
            )
        told: object = choice.get("logprobs")
        nothing = told is None and not ids
        return Sampled(
            ids=ids,
            logprobs=[] if nothing else _logprobs(as_mapping(told, "logprobs").get("token_logprobs"), len(ids)),
            finish=_finish(choice),
            versions=None,
            cached_tokens=_cached(reply),
        )

    def read_prompt(self, reply: Json) -> object:
        return _choice(reply).get("prompt_logprobs")


def prompt_logprobs(told: object, ids: Sequence[int]) -> list[float]:
    """Of all of a prompt's tokens but the first. vLLM gives one table a token: its id, and no other, to its logprob."""
    tables = as_list(told, "prompt_logprobs")
    if len(tables) != len(ids):
        raise EngineProtocolError(f"vllm: prompt_logprobs of {len(tables)} tokens, the prompt has {len(ids)}")
    found: list[object] = []
    for token, table in zip(ids[1:], tables[1:], strict=True):
        entry = as_mapping(table, "prompt_logprobs").get(str(token))
        found.append(as_mapping(entry, f"prompt_logprobs of {token}").get("logprob"))
    return [-math.inf if logprob <= NO_LOGPROB else logprob for logprob in as_floats(found, "prompt_logprobs")]


def _choice(reply: Json) -> Json:
    choices = as_list(reply.get("choices"), "choices")
    if len(choices) != 1:
        raise EngineProtocolError(f"vllm: {len(choices)} choices where one was asked for")
    return as_mapping(choices[0], "choices[0]")


def _ids(choice: Json) -> list[int]:
    return as_ids(choice.get("token_ids"), "token_ids")


def _logprobs(told: object, count: int) -> list[float]:
    logprobs = as_logprobs(told, "logprobs")
    if len(logprobs) != count:
        raise EngineProtocolError(f"vllm: {count} tokens with {len(logprobs)} logprobs")
    return logprobs


def _finish(choice: Json) -> Literal["stop", "length", "abort"]:
    finish: Any = choice.get("finish_reason")
    if finish not in ("stop", "length", "abort"):
        raise EngineProtocolError(f"vllm: unknown finish_reason {finish!r}")
    return finish


def _cached(reply: Json) -> int:
    """Told only with `--enable-prompt-tokens-details`."""
    match reply.get("usage"):
        case {"prompt_tokens_details": {"cached_tokens": int() as cached}}:
            return cached
        case _:
            return 0
