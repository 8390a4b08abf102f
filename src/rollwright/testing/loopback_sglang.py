"""A real HTTP server that speaks SGLang's native contract over any engine of ours, and goes wrong on request."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollwright.engines import Engine, Generation, Scorer
from rollwright.engines.local import LocalEngine
from rollwright.errors import EngineError
from rollwright.testing.loopback_http import (
    HalfResponse,
    json_response,
    serving,
    spans_as_told,
    tokens_of,
    until_disconnect,
)
from rollwright.tokens import Renderer
from rollwright.types import Sampling, VersionSpan

__all__ = ["Fault", "LoopbackSglang", "Received", "loopback_sglang"]

Fault = Literal[
    "drop",
    "error_500",
    "truncated_json",
    "not_an_object",
    "no_logprobs",
    "null_logprob",
    "clamped_logprob",
    "null_logprobs",
    "short_logprobs",
    "other_ids",
    "no_id",
    "abort",
    "abort_in_queue",
    "version_change",
    "versions_with_gap",
    "one_version",
    "no_version",
    "foreign_stop",
]
"""What happens to one `/generate`. drop: the connection closes in the middle of the body. abort: as if the server had
been told to after the first token. version_change: new weights after the first token. one_version: a server too old
to have `weight_versions`. foreign_stop: it stopped at an id nobody asked for."""

_BODY_FIELDS = {
    "rid",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "stream",
    "return_sampling_mask",
    "sampling_logprobs_mode",
}
_SAMPLING_FIELDS = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_token_ids",
    "skip_special_tokens",
    "no_stop_trim",
    "sampling_seed",
}


@dataclass(frozen=True, slots=True)
class Received:
    """One `/generate` as it came."""

    body: Mapping[str, Any]
    routing_key: str


@dataclass(slots=True, kw_only=True)
class LoopbackSglang:
    """The running server. Change its fields between calls."""

    engine: Engine
    renderer: Renderer
    url: str = ""
    weight_version: str = "default"
    """What `/model_info` says."""
    server_info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Overrides of `/server_info`."""
    tells: bool = True
    """Whether `/server_info` and `/model_info` exist."""
    tokenize: bool = True
    """Whether `/v1/tokenize` exists."""
    faults: deque[Fault] = field(default_factory=deque[Fault])
    """Of the next calls to `/generate`, one each."""
    received: list[Received] = field(default_factory=list[Received])
    aborted: list[str] = field(default_factory=list[str])
    """Ids that `/abort_request` named."""
    disconnected: list[str] = field(default_factory=list[str])
    """Ids whose caller left before the reply."""
    _flying: list[str] = field(default_factory=list[str])

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort_request", self._abort_request, methods=["POST"]),
                Route("/v1/tokenize", self._tokenize, methods=["POST"]),
                Route("/update_weights_from_disk", self._update_weights, methods=["POST"]),
                Route("/server_info", self._server_info),
                Route("/model_info", self._model_info),
                Route("/health", self._health),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _server_info(self, request: Request) -> Response:
        if not self.tells:
            return Response(status_code=404)
        context = self.engine.capabilities.max_context
        told: dict[str, Any] = {
            "context_length": context,
            "max_total_num_tokens": 4 * context,
            "max_req_input_len": context,
            "enable_deterministic_inference": True,
            "version": "0.5.23",
            "internal_states": [{}],
        }
        return json_response(told | self.server_info)

    async def _model_info(self, request: Request) -> Response:
        if not self.tells:
            return Response(status_code=404)
        return json_response(
            {
                "model_path": "loopback",
                "tokenizer_path": f"loopback/{self.renderer.name}",
                "is_generation": True,
                "weight_version": self.weight_version,
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        if not self.tokenize:
            return json_response({"detail": "Not Found"}, 404)
        tokens = tokens_of(await request.json(), self.renderer)
        return json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.capabilities.max_context}
        )

    async def _abort_request(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        # Every request whose id begins so, as SGLang's scheduler has it.
        for each in [sent for sent in self._flying if sent.startswith(rid)]:
            await self.engine.abort(each)
        return Response()

    async def _update_weights(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(self.engine, LocalEngine):
            return json_response({"success": False, "message": "this engine has no weights"}, 400)
        await self.engine.load_weights(Path(body["model_path"]), body["weight_version"])
        self.weight_version = body["weight_version"]
        return json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _generate(self, request: Request) -> Response:
        body: dict[str, Any] = orjson.loads(await request.body())
        self.received.append(Received(body, request.headers.get("x-smg-routing-key", "")))
        parameters: dict[str, Any] = body.get("sampling_params", {})
        unknown = (body.keys() - _BODY_FIELDS) | (parameters.keys() - _SAMPLING_FIELDS)
        if unknown:
            return json_response({"error": f"unknown field {sorted(unknown)[0]}"}, 400)
        too_long = self._too_long(body["input_ids"], parameters["max_new_tokens"])
        if too_long:
            return json_response({"error": {"message": too_long}}, 400)
        if body.get("return_sampling_mask") and parameters["temperature"] > 0 and not 1 < parameters["top_k"] <= 4096:
            return json_response({"error": {"message": "return_sampling_mask requires finite 1 < top_k <= 4096"}}, 400)
        if parameters["max_new_tokens"] == 0 and body.get("logprob_start_len", -1) >= 0:
            return await self._score(body)
        fault = self.faults.popleft() if self.faults else None
        if fault == "error_500":
            return json_response({"error": {"message": "CUDA error: an illegal memory access " + "x" * 5000}}, 500)
        self._flying.append(body["rid"])
        try:
            generation = await self._sample(request, body, parameters)
        except EngineError as error:
            return json_response({"error": {"message": str(error)}}, 400)
        finally:
            self._flying.remove(body["rid"])
        if generation is None:
            return Response(status_code=499)
        reply = self._reply(body["rid"], len(body["input_ids"]), generation)
        if body.get("return_sampling_mask"):
            reply["meta_info"]["output_token_sampling_logprobs"] = generation.logprobs
        return self._spoil(fault, reply)

    async def _score(self, body: dict[str, Any]) -> Response:
        """A prefill alone: logprobs of unscaled logits from `logprob_start_len` on, the first of them null."""
        ids, start = body["input_ids"], body["logprob_start_len"]
        if not isinstance(self.engine, Scorer):
            raise AssertionError(f"{self.engine.capabilities.name} cannot score")
        scores = await self.engine.score(
            ids, [(start + 1, len(ids))], Sampling(), request_id=body["rid"], session_key="score"
        )
        rows = [[None, ids[start], None]]
        rows += [[value, token, None] for value, token in zip(scores.logprobs, ids[start + 1 :], strict=True)]
        meta = {"id": body["rid"], "weight_version": scores.version, "input_token_logprobs": rows}
        return json_response({"text": "", "output_ids": [], "meta_info": meta})

    def _too_long(self, ids: list[int], max_new_tokens: int) -> str:
        context = self.engine.capabilities.max_context
        if len(ids) >= context:
            return f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens)."
        if len(ids) + max_new_tokens > context:
            return (
                f"Requested token count exceeds the model's maximum context length of {context} tokens. "
                f"You requested a total of {len(ids) + max_new_tokens} tokens."
            )
        return ""

    async def _sample(self, request: Request, body: dict[str, Any], parameters: dict[str, Any]) -> Generation | None:
        """None when the caller left: then the generation was cancelled."""
        sampling = Sampling(
            temperature=parameters["temperature"],
            top_p=parameters["top_p"],
            top_k=max(parameters["top_k"], 0),
            max_new_tokens=parameters["max_new_tokens"],
            seed=parameters.get("sampling_seed"),
        )
        work = partial(
            self.engine.generate,
            body["input_ids"],
            sampling,
            stop_ids=frozenset(parameters["stop_token_ids"]),
            request_id=body["rid"],
            session_key=request.headers.get("x-smg-routing-key", ""),
        )
        return await until_disconnect(request, work, partial(self.disconnected.append, body["rid"]))

    def _reply(self, rid: str, prompt_tokens: int, generation: Generation) -> dict[str, Any]:
        ids = generation.ids
        finish: dict[str, Any] = {
            "stop": {"type": "stop", "matched": ids[-1] if ids else None},
            "length": {"type": "length", "length": len(ids)},
            "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        }[generation.finish]
        return {
            "text": self.renderer.decode(ids),
            "output_ids": ids,
            "meta_info": {
                "id": rid,
                "finish_reason": finish,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(ids),
                "cached_tokens": generation.cached_tokens,
                "weight_version": self.weight_version,
                "weight_versions": spans_as_told(generation.versions),
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(generation.logprobs, ids, strict=True)
                ],
                "input_token_logprobs": [],
            },
        }

    def _spoil(self, fault: Fault | None, reply: dict[str, Any]) -> Response:
        match fault:
            case "drop":
                return HalfResponse(orjson.dumps(reply))
            case "truncated_json":
                return Response(orjson.dumps(reply)[:-20], media_type="application/json")
            case "not_an_object":
                return json_response([reply])
            case "version_change":
                meta = reply["meta_info"]
                old, self.weight_version = meta["weight_versions"][0]["version"], "changed"
                meta["weight_versions"] = spans_as_told(
                    (VersionSpan(old, 0, 1), VersionSpan("changed", 1, meta["completion_tokens"]))
                )
            case None:
                pass
            case _:
                _alter(fault, reply)
        return json_response(reply)


@contextlib.asynccontextmanager
async def loopback_sglang(engine: Engine, renderer: Renderer) -> AsyncGenerator[LoopbackSglang]:
    """Serve `engine` (already open) on a free port of 127.0.0.1 until the block ends."""
    loopback = LoopbackSglang(engine=engine, renderer=renderer)
    async with serving(loopback.app()) as url:
        loopback.url = url
        yield loopback


def _alter(fault: Fault, reply: dict[str, Any]) -> None:
    meta: dict[str, Any] = reply["meta_info"]
    match fault:
        case "no_logprobs":
            del meta["output_token_logprobs"]
        case "null_logprob" | "clamped_logprob":
            meta["output_token_logprobs"][-1][0] = None if fault == "null_logprob" else -9999.0
        case "null_logprobs":
            for row in meta["output_token_logprobs"]:
                row[0] = None
        case "short_logprobs":
            meta["output_token_logprobs"].pop()
        case "other_ids":
            reply["output_ids"] = [token + 1 for token in reply["output_ids"]]
        case "no_id":
            reply["output_ids"][-1] = meta["output_token_logprobs"][-1][1] = -1
        case "abort":
            meta["finish_reason"] = {"type": "abort", "message": "Aborted"}
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:1]
            meta["weight_versions"] = [meta["weight_versions"][0] | {"end": 1}]
            meta["completion_tokens"] = 1
            reply["output_ids"] = reply["output_ids"][:1]
        case "abort_in_queue":
            reply["output_ids"] = []
            reply["meta_info"] = {"id": meta["id"], "finish_reason": {"type": "abort", "message": "Abort in queue"}}
        case "versions_with_gap":
            meta["weight_versions"][0]["start"] = 1
        case "one_version":
            del meta["weight_versions"]
        case "no_version":
            del meta["weight_versions"], meta["weight_version"]
        case "foreign_stop":
            meta["finish_reason"] = {"type": "stop", "matched": reply["output_ids"][-1]}
        case _:
            raise AssertionError(f"{fault} is not a change of the reply")
