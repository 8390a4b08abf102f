"""An SGLang server (or its router) over its native `/generate`: ids in, ids and logprobs out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast

import anyio
import numpy as np

from rollwright.engines import EngineCapabilities, Generation, Scores
from rollwright.engines.remote import (
    PROBE,
    EngineServer,
    Json,
    as_floats,
    as_ids,
    as_list,
    as_logprobs,
    as_mapping,
    as_spans,
)
from rollwright.errors import ConfigError, EngineError, EngineProtocolError, EngineUnreachable
from rollwright.messages import Message
from rollwright.tokens import Renderer
from rollwright.types import LogprobKind, Sampling, VersionSpan

__all__ = ["SglangEngine"]

ABORT_SECONDS = 5.0


class SglangEngine:
    """Talks to SGLang ≥ 0.5.

    Logprob kind is `temperature` as SGLang is by default: log_softmax(logits / T) over the full vocabulary, also where
    top-k or top-p cut (greedy: of the unscaled logits). Say `raw` for a server started with
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1`, which no reply tells. With `behaviour` the server is asked for the logprobs of
    the distribution it sampled from (`return_sampling_mask`) where that is cut; SGLang 0.5.23 refuses that for a top-p
    without a top-k of 2 to 4096.

    The seed is sent only to a server that runs with `--enable-deterministic-inference`: others ignore it, and the
    flashinfer backend dies of it.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        url: str,
        logprob_kind: LogprobKind = "temperature",
        max_context: int | None = None,
        version: str | None = None,
        api_key: str | None = None,
        connect_seconds: float = 10.0,
        reply_seconds: float = 3600.0,
        max_connections: int = 1024,
    ) -> None:
        """`url`: of the server or its router. `max_context`, `version`: for servers that do not tell them (a router),
        or to lower the context. `reply_seconds`: how long one reply may take, its wait in the queue included.

        Raises `ConfigError`; the server is first asked by `__aenter__`.
        """
        self._renderer = renderer
        self._server = EngineServer(
            "sglang",
            url,
            api_key=api_key,
            connect_seconds=connect_seconds,
            reply_seconds=reply_seconds,
            max_connections=max_connections,
        )
        self._logprob_kind: LogprobKind = logprob_kind
        self._max_context = max_context
        self._version = version
        self._capabilities: EngineCapabilities | None = None
        self._deterministic = False
        self._tokenizer = ""

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine is not open")
        return self._capabilities

    async def __aenter__(self) -> Self:
        self._server.open()
        try:
            server = await self._server.told("/server_info")
            model = await self._server.told("/model_info")
            self._deterministic = bool(server.get("enable_deterministic_inference"))
            self._tokenizer = str(model.get("tokenizer_path") or model.get("model_path") or "?")
            if self._version is None and isinstance(model.get("weight_version"), str):
                self._version = model["weight_version"]
            self._capabilities = EngineCapabilities(
                name="sglang", max_context=self._context(server), logprob_kind=self._logprob_kind
            )
        except BaseException:  # also cancelled, whoever opened the client closes it
            with anyio.CancelScope(shield=True):
                await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    async def check(self) -> None:
        """Samples one token, and has both tokenizers split one text where the server offers `/v1/tokenize`.

        Raises `ConfigError` naming both when they differ.
        """
        text = PROBE + self._renderer.decode(sorted(self._renderer.stop_ids))
        ours = self._renderer.encode(text)
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        told = await self._server.post_if_there("/v1/tokenize", body)
        theirs = ours if told is None else told.get("tokens")
        if theirs != ours:
            raise ConfigError(
                f"the engine at {self._server.url} uses the tokenizer {self._tokenizer}, which does not split text as "
                f"policy.path's {self._renderer.name} does: they are not of one policy",
                field="policy.path",
            )
        await self.generate(
            ours[:8],
            Sampling(max_new_tokens=1),
            stop_ids=self._renderer.stop_ids,
            request_id=f"rollwright-check-{uuid.uuid4().hex}",
            session_key="rollwright-check",
        )

    async def rendered(self, messages: Sequence[Message]) -> list[int] | None:
        return await self._server.rendered("/v1/tokenize", messages, model="default", add_special_tokens=False)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        session_key: str,
    ) -> Generation:
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": sorted(stop_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.seed is not None and self._deterministic:
            parameters["sampling_seed"] = sampling.seed
        body: dict[str, Any] = {
            "rid": request_id,
            # As an array: a list of a long prompt's ids costs milliseconds of the event loop to make and to write.
            "input_ids": np.asarray(ids, dtype=np.int32),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        masked = self._logprob_kind == "behaviour" and _cuts(sampling)
        if masked:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        try:
            reply = await self._server.post("/generate", body, {"x-smg-routing-key": session_key})
        except (anyio.get_cancelled_exc_class(), EngineUnreachable):
            await self._abort_quietly(request_id)
            raise
        return self._generation(reply, stop_ids, masked=masked)

    async def score(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        sampling: Sampling,
        *,
        request_id: str,
        session_key: str,
    ) -> Scores:
        """One prefill. SGLang gives log_softmax(logits) of prompt tokens, whatever the temperature."""
        if not spans:
            return Scores(logprobs=[], kind="raw", version=self._version or "")
        first = spans[0][0]
        body: dict[str, Any] = {
            "rid": request_id,
            "input_ids": np.asarray(ids, dtype=np.int32),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
            "return_logprob": True,
            # Of the first token it tells none.
            "logprob_start_len": first - 1,
            "stream": False,
        }
        reply = await self._server.post("/generate", body, {"x-smg-routing-key": session_key})
        meta = as_mapping(reply.get("meta_info"), "meta_info")
        rows = as_list(meta.get("input_token_logprobs"), "input_token_logprobs")
        told: list[object] = []
        for token, row in zip(ids[first - 1 :], rows, strict=False):
            match row:
                case [logprob, int() as own, *_] if own == token:
                    told.append(logprob)
                case _:
                    raise EngineProtocolError(f"sglang: input_token_logprobs has {row!r} where the prompt has {token}")
        if len(told) != len(ids) - first + 1:
            raise EngineProtocolError(f"sglang: logprobs of {len(told)} of {len(ids) - first + 1} prompt tokens")
        wanted = [told[at - first + 1] for start, end in spans for at in range(start, end)]
        version = meta.get("weight_version", self._version)
        return Scores(
            logprobs=as_floats(wanted, "input_token_logprobs"),
            kind="raw",
            version=version if isinstance(version, str) else "",
        )

    async def abort(self, request_id: str) -> None:
        await self._server.request("POST", "/abort_request", {"rid": request_id})

    async def _abort_quietly(self, request_id: str) -> None:
        """A reply nobody waits for any more is not worth an error of its own, only the engine's time."""
        with anyio.move_on_after(ABORT_SECONDS, shield=True):
            try:
                await self.abort(request_id)
            except EngineError:
                return

    # ----------------------------------------------------------------------- reading what the server says

    def _context(self, server: Json) -> int:
        """The server's own limit: its context length, or less where its key-value memory is smaller."""
        told = [server.get("context_length"), server.get("max_req_input_len"), self._max_context]
        known = [size for size in told if isinstance(size, int) and size > 0]
        if not known:
            raise ConfigError(
                f"the engine at {self._server.url} does not say how long its context is; set engine.sglang.max_context",
                field="engine.sglang.max_context",
            )
        return min(known)

    def _generation(self, reply: Json, stop_ids: frozenset[int], *, masked: bool) -> Generation:
        meta = as_mapping(reply.get("meta_info"), "meta_info")
        finish = _finish(meta.get("finish_reason"))
        ids, logprobs = _sampled(reply, meta, finish)
        if masked:
            logprobs = as_logprobs(
                meta.get("output_token_sampling_logprobs", [] if not ids else None), "output_token_sampling_logprobs"
            )
            if len(logprobs) != len(ids):
                raise EngineProtocolError(f"sglang: {len(ids)} tokens with {len(logprobs)} sampling logprobs")
        if finish == "stop" and (not ids or ids[-1] not in stop_ids):
            raise EngineProtocolError(
                f"sglang stopped at id {ids[-1] if ids else None}, which ends no turn of {self._renderer.name} "
                f"({sorted(stop_ids)}): the model's own eos and the chat template differ",
            )
        cached = meta.get("cached_tokens", 0)
        return Generation(
            ids=ids,
            logprobs=logprobs,
            finish=finish,
            versions=self._versions(meta, len(ids)),
            cached_tokens=cached if isinstance(cached, int) else 0,
        )

    def _versions(self, meta: Json, count: int) -> tuple[VersionSpan, ...]:
        if not count:
            return ()
        told = meta.get("weight_versions")
        if told is None:
            version = meta.get("weight_version", self._version)
            if not isinstance(version, str):
                raise EngineProtocolError(
                    "sglang does not say which weights a reply came from; set engine.sglang.version"
                )
            return (VersionSpan(version, 0, count),)
        return as_spans(told, count)


def _cuts(sampling: Sampling) -> bool:
    """Whether tokens are left out: elsewhere the logprobs over the full vocabulary are those of the behaviour."""
    return sampling.temperature == 0 or sampling.top_k > 0 or sampling.top_p < 1


def _finish(value: object) -> Literal["stop", "length", "abort"]:
    kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else value
    if kind not in ("stop", "length", "abort"):
        raise EngineProtocolError(f"sglang: unknown finish_reason {value!r}")
    return kind


def _sampled(reply: Json, meta: Json, finish: str) -> tuple[list[int], list[float]]:
    """Ids and logprobs of `output_token_logprobs`, checked against every other count in the reply."""
    rows = meta.get("output_token_logprobs")
    if rows is None and finish == "abort" and not reply.get("output_ids"):
        return [], []
    sampled: list[object] = []
    logprobs: list[object] = []
    for row in as_list(rows, "output_token_logprobs"):
        match row:
            case [logprob, token, *_]:
                sampled.append(token)
                logprobs.append(logprob)
            case _:
                raise EngineProtocolError(f"sglang: output_token_logprobs has the row {row!r}")
    ids = as_ids(sampled, "output_token_logprobs")
    told = reply.get("output_ids")
    if told is not None and told != ids:
        raise EngineProtocolError(f"sglang: output_ids ({len(told)}) are not the ids of the logprobs ({len(ids)})")
    count = meta.get("completion_tokens", len(ids))
    if count != len(ids):
        raise EngineProtocolError(f"sglang: {count} tokens, but logprobs of {len(ids)}")
    return ids, as_logprobs(logprobs, "output_token_logprobs")
