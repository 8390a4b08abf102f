"""An SGLang server (or its router) over its native `/generate`: ids in, ids and logprobs out."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, cast

import anyio
import httpx2
import numpy as np
import orjson

from rollwright.engines import EngineCapabilities, Generation
from rollwright.engines.spans import version_spans
from rollwright.errors import ConfigError, EngineError, EngineProtocolError, EngineRejected, EngineUnreachable
from rollwright.tokens import Renderer
from rollwright.types import LogprobKind, Sampling, VersionSpan

__all__ = ["SglangEngine"]

MAX_REPLY_BYTES = 64 << 20
"""Of one body: some 80 bytes a token leave room for a million tokens."""
SNIPPET_BYTES = 600
ABORT_SECONDS = 5.0
PROBE = "def f(x):\n\treturn {'ü': x[0:3]}  # 1234 — naïve\n\n" + "".join(map(chr, range(32, 127)))
"""Text that two tokenizers hardly split alike; the ids that end a turn are added."""

Json = Mapping[str, Any]


class SglangEngine:
    """Talks to SGLang ≥ 0.5.

    Logprob kind is `temperature` as SGLang is by default: log_softmax(logits / T) over the full vocabulary, also where
    top-k or top-p cut (greedy: of the unscaled logits). Say `raw` for a server started with
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1`, which no reply tells. With `behaviour` the server is asked for the logprobs of
    the distribution it sampled from (`return_sampling_mask`).

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
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.url must start with http:// or https://, not {url!r}", field="engine.url")
        self._renderer = renderer
        self._url = url.rstrip("/")
        self._logprob_kind: LogprobKind = logprob_kind
        self._max_context = max_context
        self._version = version
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx2.Timeout(reply_seconds, connect=connect_seconds)
        self._limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._client: httpx2.AsyncClient | None = None
        self._capabilities: EngineCapabilities | None = None
        self._deterministic = False
        self._tokenizer = ""

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine is not open")
        return self._capabilities

    async def __aenter__(self) -> Self:
        self._client = httpx2.AsyncClient(
            timeout=self._timeout,
            limits=self._limits,
            # Proxies and certificates of the environment are not ours to pick up.
            trust_env=False,
        )
        try:
            server = await self._told("/server_info")
            model = await self._told("/model_info")
            self._deterministic = bool(server.get("enable_deterministic_inference"))
            self._tokenizer = str(model.get("tokenizer_path") or model.get("model_path") or "?")
            if self._version is None and isinstance(model.get("weight_version"), str):
                self._version = model["weight_version"]
            self._capabilities = EngineCapabilities(
                name="sglang", max_context=self._context(server), logprob_kind=self._logprob_kind
            )
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True):
                await client.aclose()

    async def check(self) -> None:
        """Samples one token, and has both tokenizers split one text where the server offers `/v1/tokenize`.

        Raises `ConfigError` naming both when they differ.
        """
        text = PROBE + self._renderer.decode(sorted(self._renderer.stop_ids))
        ours = self._renderer.encode(text)
        try:
            body = {"model": "default", "prompt": text, "add_special_tokens": False}
            theirs = (await self._post("/v1/tokenize", body)).get("tokens")
        except EngineRejected as error:
            # Routers and older servers have no such route.
            if error.details.get("status") not in (404, 405):
                raise
            theirs = ours
        if theirs != ours:
            raise ConfigError(
                f"the engine at {self._url} uses the tokenizer {self._tokenizer}, which does not split text as "
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
        if self._logprob_kind == "behaviour":
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        try:
            reply = await self._post("/generate", body, {"x-smg-routing-key": session_key})
        except (anyio.get_cancelled_exc_class(), EngineUnreachable):
            await self._abort_quietly(request_id)
            raise
        return self._generation(reply, stop_ids)

    async def abort(self, request_id: str) -> None:
        await self._request("POST", "/abort_request", {"rid": request_id}, {})

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
                f"the engine at {self._url} does not say how long its context is; set engine.sglang.max_context",
                field="engine.max_context",
            )
        return min(known)

    def _generation(self, reply: Json, stop_ids: frozenset[int]) -> Generation:
        meta = _mapping(reply.get("meta_info"), "meta_info")
        finish = _finish(meta.get("finish_reason"))
        ids, logprobs = _sampled(reply, meta, finish)
        if self._logprob_kind == "behaviour":
            logprobs = _floats(meta.get("output_token_sampling_logprobs", [] if not ids else None))
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
        spans = [_span(item) for item in _list(told, "weight_versions")]
        versions = [span.version for span in spans for _ in range(span.start, span.end)]
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or len(versions) != count:
            raise EngineProtocolError(f"sglang: weight_versions {told} do not cover {count} tokens")
        return version_spans(versions)

    # ----------------------------------------------------------------------- HTTP

    async def _told(self, path: str) -> Json:
        """What the server tells about itself; nothing where it (or a router) has no such route."""
        try:
            return await self._get(path)
        except EngineRejected as error:
            if error.details.get("status") not in (404, 405):
                raise
            return {}

    async def _get(self, path: str) -> Json:
        return _json(path, await self._request("GET", path, None, {}))

    async def _post(self, path: str, body: Json, headers: Mapping[str, str] | None = None) -> Json:
        return _json(path, await self._request("POST", path, body, headers or {}))

    async def _request(self, method: str, path: str, body: Json | None, headers: Mapping[str, str]) -> bytes:
        """The body of a 200. Raises the contract's errors; never reads more than `MAX_REPLY_BYTES`."""
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._stream(method, path, content, headers) as response:
            limit = MAX_REPLY_BYTES if response.status_code == 200 else SNIPPET_BYTES
            received = bytearray()
            async for chunk in response.aiter_bytes():
                received += chunk
                if len(received) > limit:
                    break
            if response.status_code == 200:
                if len(received) > limit:
                    raise EngineProtocolError(f"sglang {path}: a reply of more than {limit} bytes")
                return bytes(received)
            raise self._rejected(path, response.status_code, bytes(received[:limit]))

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx2.Response]:
        if self._client is None:
            raise EngineUnreachable("the sglang engine is not open")
        types = {"content-type": "application/json"} if content is not None else {}
        try:
            async with self._client.stream(
                method, self._url + path, content=content, headers={**self._headers, **types, **headers}
            ) as response:
                yield response
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            what = str(error) or type(error).__name__
            raise EngineUnreachable(f"sglang at {self._url}{path}: {what}", path=path) from error

    def _rejected(self, path: str, status: int, body: bytes) -> EngineRejected:
        snippet = body.decode("utf-8", "replace")
        too_long = status == 400 and ("context length" in snippet or "longer than" in snippet)
        what = "the prompt does not fit the engine's context: " if too_long else ""
        return EngineRejected(
            f"sglang {path} answered {status}: {what}{snippet}", path=path, status=status, too_long=too_long
        )


def _json(path: str, body: bytes) -> Json:
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EngineProtocolError(f"sglang {path}: the reply is not JSON: {error}") from error
    return _mapping(value, path)


def _mapping(value: object, name: str) -> Json:
    if not isinstance(value, dict):
        raise EngineProtocolError(f"sglang: {name} is not an object")
    return cast("dict[str, Any]", value)


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise EngineProtocolError(f"sglang: {name} is missing or not a list")
    return cast("list[Any]", value)


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
    ids: list[int] = []
    logprobs: list[float] = []
    for row in _list(rows, "output_token_logprobs"):
        match row:
            case [logprob, int() as token, *_]:
                ids.append(token)
                logprobs.append(logprob)
            case _:
                raise EngineProtocolError(f"sglang: output_token_logprobs has the row {row!r}")
    told = reply.get("output_ids")
    if told is not None and told != ids:
        raise EngineProtocolError(f"sglang: output_ids ({len(told)}) are not the ids of the logprobs ({len(ids)})")
    count = meta.get("completion_tokens", len(ids))
    if count != len(ids):
        raise EngineProtocolError(f"sglang: {count} tokens, but logprobs of {len(ids)}")
    return ids, _floats(logprobs)


def _floats(values: object) -> list[float]:
    numbers: list[float] = []
    for value in _list(values, "logprobs"):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise EngineProtocolError(f"sglang: a logprob is {value!r}")
        numbers.append(float(value))
    return numbers


def _span(value: object) -> VersionSpan:
    match value:
        case {"version": str() as version, "start": int() as start, "end": int() as end}:
            return VersionSpan(version, start, end)
        case [str() as version, int() as start, int() as end]:
            return VersionSpan(version, start, end)
        case _:
            raise EngineProtocolError(f"sglang: weight_versions has {value!r}")
