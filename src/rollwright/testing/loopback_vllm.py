"""A real HTTP server that speaks vLLM's contract over any engine of ours, with its traps, and goes wrong on request."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import anyio
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollwright.engines import Engine, Generation, Scorer
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

__all__ = ["LoopbackVllm", "VllmFault", "VllmReceived", "loopback_vllm"]

VllmFault = Literal[
    "drop",
    "error_500",
    "truncated_json",
    "not_an_object",
    "no_choices",
    "no_logprobs",
    "null_logprob",
    "clamped_logprob",
    "null_logprobs",
    "short_logprobs",
    "other_ids",
    "other_prompt",
    "abort",
    "abort_in_queue",
    "version_change",
    "versions_with_gap",
    "no_versions",
    "foreign_stop",
    "cut_short",
]
"""What happens to one generation. clamped_logprob: -9999.0, vLLM's word for a logprob it does not have. other_prompt:
the prompt was not the one sent (`/v1/completions` alone says which it was). version_change: new weights after the
first token. cut_short: it ended for its length a token early."""


@dataclass(frozen=True, slots=True)
class VllmReceived:
    """One generation as it was asked for."""

    path: str
    body: Mapping[str, Any]
    session: str
    """`X-Session-ID`."""


@dataclass(slots=True, kw_only=True)
class LoopbackVllm:
    """The running server. Change its fields between calls."""

    engine: Engine
    renderer: Renderer
    url: str = ""
    model: str = "loopback"
    scale_out: bool = True
    """Whether the token route is enabled; else it answers 403."""
    development: bool = True
    """`VLLM_SERVER_DEV_MODE=1`: `/abort_requests`, `/pause`, `/weight_info` and `/server_info` exist."""
    logprobs_mode: str = "processed_logprobs"
    weight_version: str = "default"
    faults: deque[VllmFault] = field(default_factory=deque[VllmFault])
    """Of the next generations, one each."""
    received: list[VllmReceived] = field(default_factory=list[VllmReceived])
    aborted: list[str] = field(default_factory=list[str])
    """Ids that abort requests named."""
    disconnected: list[str] = field(default_factory=list[str])
    """Inner ids of requests whose caller left before the reply."""
    _running: dict[str, str] = field(default_factory=dict[str, str])
    """Inner id (`generate-tokens-...`) to the engine's."""
    _open: anyio.Event = field(default_factory=anyio.Event)
    """Set while the server is not paused."""

    def __post_init__(self) -> None:
        self._open.set()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self._abort_scale_out, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/abort_requests", self._abort_development, methods=["POST"]),
                Route("/pause", self._pause, methods=["POST"]),
                Route("/resume", self._resume, methods=["POST"]),
                Route("/weight_info", self._weight_info),
                Route("/server_info", self._server_info),
            ]
        )

    # ----------------------------------------------------------------------- what it says of itself

    async def _models(self, request: Request) -> Response:
        context = self.engine.capabilities.max_context
        return json_response({"object": "list", "data": [{"id": self.model, "max_model_len": context}]})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        if body.get("model", self.model) != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        tokens = tokens_of(body, self.renderer)
        return json_response({"count": len(tokens), "tokens": tokens, "token_strs": None})

    async def _weight_info(self, request: Request) -> Response:
        return json_response({"weight_version": self.weight_version}) if self.development else _missing()

    async def _server_info(self, request: Request) -> Response:
        told = {"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}}
        return json_response(told) if self.development else _missing()

    # ----------------------------------------------------------------------- control

    async def _abort_scale_out(self, request: Request) -> Response:
        if not self.scale_out:
            return _error(403, "Scale-out endpoints are disabled.")
        await self._abort((await request.json())["request_ids"])
        return Response()

    async def _abort_development(self, request: Request) -> Response:
        if not self.development:
            return _missing()
        await self._abort((await request.json()).get("request_ids") or list(self._running))
        return json_response({"aborted": 1})

    async def _abort(self, names: list[str]) -> None:
        """A name that no request has is ignored without a word, the caller's own id included."""
        for name in names:
            self.aborted.append(name)
            if name in self._running:
                await self.engine.abort(self._running[name])

    async def _pause(self, request: Request) -> Response:
        if not self.development:
            return _missing()
        self._open = anyio.Event()
        if request.query_params.get("mode", "abort") == "abort":
            await self._abort(list(self._running))
        return json_response({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self._open.set()
        return json_response({"status": "resumed"})

    # ----------------------------------------------------------------------- generations

    async def _generate(self, request: Request) -> Response:
        if not self.scale_out:
            return _error(403, "Scale-out endpoints are disabled.")
        body: dict[str, Any] = orjson.loads(await request.body())
        for name in ("token_ids", "sampling_params"):
            if name not in body:
                return _error(400, f"1 validation error: body.{name} Field required")
        name = f"generate-tokens-{body['request_id']}"
        served = await self._served(request, body, name, body["token_ids"], body["sampling_params"])
        if isinstance(served, Response):
            return served
        fault, generation = served
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(generation.ids, generation.logprobs, strict=True)
        ]
        choice = _choice(generation) | {
            "weight_versions": spans_as_told(generation.versions),
            "logprobs": {"content": content},
        }
        reply = {"request_id": name, **self._said(len(body["token_ids"]), generation, choice)}
        prompt = await self._scored(body["token_ids"], body["sampling_params"])
        return self._spoil(fault, reply | {"prompt_logprobs": prompt})

    async def _completions(self, request: Request) -> Response:
        body: dict[str, Any] = orjson.loads(await request.body())
        served = await self._served(request, body, f"cmpl-{body['request_id']}-0", body["prompt"], body)
        if isinstance(served, Response):
            return served
        fault, generation = served
        choice = _choice(generation) | {
            "text": self.renderer.decode(generation.ids),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": list(generation.logprobs)},
            "prompt_logprobs": await self._scored(body["prompt"], body),
        }
        reply = {"id": f"cmpl-{body['request_id']}", **self._said(len(body["prompt"]), generation, choice)}
        return self._spoil(fault, reply)

    async def _served(
        self, request: Request, body: Mapping[str, Any], name: str, ids: list[int], parameters: Mapping[str, Any]
    ) -> Response | tuple[VllmFault | None, Generation]:
        self.received.append(VllmReceived(request.url.path, body, request.headers.get("x-session-id", "")))
        if body.get("model", self.model) != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        context = self.engine.capabilities.max_context
        if len(ids) >= context:
            return _error(400, f"The decoder prompt (length {len(ids)}) is longer than the maximum model length.")
        fault = self.faults.popleft() if self.faults else None
        if fault == "error_500":
            return _error(500, "EngineCore encountered an issue. " + "x" * 5000)
        sampling = Sampling(
            temperature=parameters["temperature"],
            top_p=parameters["top_p"],
            top_k=parameters["top_k"],
            # Too many are not refused, only never sampled.
            max_new_tokens=min(parameters["max_tokens"], context - len(ids)),
            seed=parameters.get("seed"),
        )
        engine_id = f"{name}-{len(self.received)}"
        self._running[name] = engine_id

        async def work() -> Generation:
            await self._open.wait()
            return await self.engine.generate(
                ids,
                sampling,
                stop_ids=frozenset(parameters["stop_token_ids"]),
                request_id=engine_id,
                session_key=request.headers.get("x-session-id", ""),
            )

        try:
            generation = await until_disconnect(request, work, partial(self.disconnected.append, name))
        except EngineError as error:
            return _error(400, str(error))
        finally:
            del self._running[name]
        if generation is None:
            return Response(status_code=499)
        return fault, _altered(fault, generation)

    async def _scored(self, ids: list[int], parameters: Mapping[str, Any]) -> list[Any] | None:
        """`prompt_logprobs` where they are asked for: of unscaled logits."""
        if parameters.get("prompt_logprobs") is None:
            return None
        if not isinstance(self.engine, Scorer):
            raise AssertionError(f"{self.engine.capabilities.name} cannot score")
        scores = await self.engine.score(ids, [(1, len(ids))], Sampling(), request_id="prompt", session_key="prompt")
        tables = [
            {str(token): {"logprob": max(logprob, -9999.0), "rank": 1, "decoded_token": None}}
            for token, logprob in zip(ids[1:], scores.logprobs, strict=True)
        ]
        return [None, *tables]

    def _said(self, prompt_tokens: int, generation: Generation, choice: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(generation.ids),
                "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
            },
            "choices": [choice],
        }

    def _spoil(self, fault: VllmFault | None, reply: dict[str, Any]) -> Response:
        if fault == "drop":
            return HalfResponse(orjson.dumps(reply))
        if fault == "truncated_json":
            return Response(orjson.dumps(reply)[:-20], media_type="application/json")
        if fault == "not_an_object":
            return json_response([reply])
        if fault == "version_change":
            self.weight_version = "changed"
        _change(fault, reply)
        return json_response(reply)


@contextlib.asynccontextmanager
async def loopback_vllm(engine: Engine, renderer: Renderer) -> AsyncGenerator[LoopbackVllm]:
    """Serve `engine` (already open) on a free port of 127.0.0.1 until the block ends."""
    loopback = LoopbackVllm(engine=engine, renderer=renderer)
    async with serving(loopback.app()) as url:
        loopback.url = url
        yield loopback


def _missing() -> Response:
    return json_response({"detail": "Not Found"}, 404)


def _error(status: int, message: str) -> Response:
    return json_response({"error": {"message": message, "code": status}}, status)


def _choice(generation: Generation) -> dict[str, Any]:
    return {"index": 0, "finish_reason": generation.finish, "stop_reason": None, "token_ids": list(generation.ids)}


def _altered(fault: VllmFault | None, generation: Generation) -> Generation:
    """Faults of what was sampled."""
    match fault:
        case "abort":
            kept, finish = 1, "abort"
        case "abort_in_queue":
            kept, finish = 0, "abort"
        case "cut_short":
            kept, finish = len(generation.ids) - 1, "length"
        case _:
            return generation
    first = generation.versions[0]
    return replace(
        generation,
        ids=generation.ids[:kept],
        logprobs=generation.logprobs[:kept],
        versions=(VersionSpan(first.version, 0, kept),) if kept else (),
        finish=finish,
    )


def _change(fault: VllmFault | None, reply: dict[str, Any]) -> None:
    """Faults of how it is told."""
    choice: dict[str, Any] = reply["choices"][0]
    logprobs: dict[str, Any] = choice["logprobs"]
    told: list[Any] = logprobs["content" if "content" in logprobs else "token_logprobs"]
    match fault:
        case "no_choices":
            reply["choices"] = []
        case "no_logprobs":
            choice["logprobs"] = None
        case "null_logprob" | "clamped_logprob":
            value = None if fault == "null_logprob" else -9999.0
            told[-1] = told[-1] | {"logprob": value} if isinstance(told[-1], dict) else value
        case "null_logprobs":
            told[:] = [each | {"logprob": None} if isinstance(each, dict) else None for each in told]
        case "short_logprobs":
            told.pop()
        case "other_ids":
            choice["token_ids"] = [token + 1 for token in choice["token_ids"]]
        case "other_prompt":
            choice["prompt_token_ids"] = choice["prompt_token_ids"][1:]
        case "version_change" if "weight_versions" in choice:
            old = choice["weight_versions"][0]["version"]
            count = len(choice["token_ids"])
            choice["weight_versions"] = spans_as_told((VersionSpan(old, 0, 1), VersionSpan("changed", 1, count)))
        case "versions_with_gap":
            choice["weight_versions"][0]["start"] = 1
        case "no_versions":
            choice["weight_versions"] = None
        case "foreign_stop":
            choice["finish_reason"] = "stop"
        case _:
            pass
