"""What the engines behind HTTP share: one pooled client, bounded replies, the contract's errors, checked values."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import httpx2
import orjson

from rollwright.engines.spans import version_spans
from rollwright.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnreachable
from rollwright.messages import Message
from rollwright.types import VersionSpan

__all__ = [
    "NO_LOGPROB",
    "NO_SUCH_ROUTE",
    "PROBE",
    "EngineServer",
    "Json",
    "as_floats",
    "as_ids",
    "as_list",
    "as_logprobs",
    "as_mapping",
    "as_spans",
]

MAX_REPLY_BYTES = 64 << 20
"""Of one body: some 80 bytes a token leave room for a million tokens."""
SNIPPET_BYTES = 600
NO_LOGPROB = -9999.0
"""What vLLM writes where it has none, and others in its stead."""
NO_SUCH_ROUTE = (404, 405)
PROBE = "def f(x):\n\treturn {'ü': x[0:3]}  # 1234 — naïve\n\n" + "".join(map(chr, range(32, 127)))
"""Text that two tokenizers hardly split alike; the ids that end a turn are added."""

Json = Mapping[str, Any]


class EngineServer:
    """One inference server (or its router) over one pooled client. Whoever opens it closes it."""

    def __init__(
        self,
        kind: str,
        url: str,
        *,
        api_key: str | None,
        connect_seconds: float,
        reply_seconds: float,
        max_connections: int,
    ) -> None:
        """`kind`: for messages. Raises `ConfigError` for a URL that is none."""
        if not url.startswith(("http://", "https://")):
            field = f"engine.{kind}.url"
            raise ConfigError(f"{field} must start with http:// or https://, not {url!r}", field=field)
        self.kind = kind
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx2.Timeout(reply_seconds, connect=connect_seconds)
        self._limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        # Without a client around it: redirects, cookies and the like cost time on each call, and none is wanted.
        self._transport: httpx2.AsyncHTTPTransport | None = None

    def open(self) -> None:
        self._transport = httpx2.AsyncHTTPTransport(
            limits=self._limits,
            # Proxies and certificates of the environment are not ours to pick up.
            trust_env=False,
            # Reading certificates takes a tenth of a second, and nothing is verified over http.
            verify=self.url.startswith("https://"),
        )

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            with anyio.CancelScope(shield=True):
                await transport.aclose()

    async def told(self, path: str) -> Json:
        """What the server tells about itself; nothing where it (or a router) has no such route."""
        try:
            return await self.get(path)
        except EngineRejected as error:
            if error.details.get("status") not in NO_SUCH_ROUTE:
                raise
            return {}

    async def get(self, path: str) -> Json:
        return self._json(path, await self.request("GET", path))

    async def post(self, path: str, body: Json, headers: Mapping[str, str] | None = None) -> Json:
        return self._json(path, await self.request("POST", path, body, headers))

    async def post_if_there(self, path: str, body: Json) -> Json | None:
        """None where the server (a router, an older one) has no such route."""
        try:
            return await self.post(path, body)
        except EngineRejected as error:
            if error.details.get("status") not in NO_SUCH_ROUTE:
                raise
            return None

    async def rendered(self, path: str, messages: Sequence[Message], **more: Any) -> list[int] | None:
        """See `TellsTemplate`; `path` is the server's own route for it."""
        body = {"messages": [{"role": m.role, "content": m.content} for m in messages], **more}
        try:
            told = (await self.post(path, body)).get("tokens")
        except EngineRejected:  # no such route, no template, or an older server that takes only text
            return None
        if not isinstance(told, list) or not all(isinstance(token, int) for token in cast("list[object]", told)):
            return None
        return cast("list[int]", told)

    async def request(
        self, method: str, path: str, body: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The body of a 200. Raises the contract's errors; never reads more than `MAX_REPLY_BYTES`."""
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._stream(method, path, content, headers or {}) as response:
            limit = MAX_REPLY_BYTES if response.status_code == 200 else SNIPPET_BYTES
            received = bytearray()
            async for chunk in response.aiter_bytes():
                received += chunk
                if len(received) > limit:
                    break
            if response.status_code == 200:
                if len(received) > limit:
                    raise EngineProtocolError(f"{self.kind} {path}: a reply of more than {limit} bytes")
                return bytes(received)
            raise self._rejected(path, response.status_code, bytes(received[:limit]))

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx2.Response]:
        if self._transport is None:
            raise EngineUnreachable(f"the {self.kind} engine is not open")
        types = {"content-type": "application/json"} if content is not None else {}
        request = httpx2.Request(
            method,
            self.url + path,
            content=content,
            headers={"accept": "*/*", **self._headers, **types, **headers},
            extensions={"timeout": self._timeout.as_dict()},
        )
        try:
            response = await self._transport.handle_async_request(request)
            try:
                yield response
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            what = str(error) or type(error).__name__
            raise EngineUnreachable(f"{self.kind} at {self.url}{path}: {what}", path=path) from error

    def _rejected(self, path: str, status: int, body: bytes) -> EngineRejected:
        snippet = body.decode("utf-8", "replace")
        too_long = status == 400 and ("context length" in snippet or "longer than" in snippet)
        what = "the prompt does not fit the engine's context: " if too_long else ""
        return EngineRejected(
            f"{self.kind} {path} answered {status}: {what}{snippet}", path=path, status=status, too_long=too_long
        )

    def _json(self, path: str, body: bytes) -> Json:
        try:
            value: object = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise EngineProtocolError(f"{self.kind} {path}: the reply is not JSON: {error}") from error
        return as_mapping(value, path)


def as_mapping(value: object, name: str) -> Json:
    """Raises `EngineProtocolError`, like its siblings below."""
    if not isinstance(value, dict):
        raise EngineProtocolError(f"engine reply: {name} is not an object")
    return cast("dict[str, Any]", value)


def as_list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise EngineProtocolError(f"engine reply: {name} is missing or not a list")
    return cast("list[Any]", value)


def as_floats(values: object, name: str) -> list[float]:
    """Finite numbers only."""
    numbers: list[float] = []
    for value in as_list(values, name):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise EngineProtocolError(f"engine reply: a logprob is {value!r}")
        numbers.append(float(value))
    return numbers


def as_logprobs(told: object, name: str) -> list[float]:
    """Of sampled tokens. NaN where the engine has none (null, or what it writes for it): such a token is masked and
    counted. Raises `EngineProtocolError` for what is no number, and when none of several tokens has one: that engine
    gives none."""
    values = [math.nan if value is None else value for value in as_list(told, name)]
    for value in values:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise EngineProtocolError(f"engine reply: a logprob is {value!r}")
    logprobs = [float(value) if value > NO_LOGPROB and value != math.inf else math.nan for value in values]
    if len(logprobs) > 1 and all(math.isnan(logprob) for logprob in logprobs):
        raise EngineProtocolError(f"engine reply: {name} has no logprob of any token")
    return logprobs


def as_ids(told: object, field: str) -> list[int]:
    """Token ids as a trajectory can hold them: whole numbers from 0 that fit 32 bits. Raises `EngineProtocolError`."""
    ids = as_list(told, field)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise EngineProtocolError(f"{field} has something else than ids")
    return cast("list[int]", ids)


def as_spans(told: object, count: int) -> tuple[VersionSpan, ...]:
    """`weight_versions` as both SGLang and vLLM write them; they must cover `count` tokens without gaps."""
    spans = [_span(item) for item in as_list(told, "weight_versions")]
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != count or edges != sorted(edges):
        raise EngineProtocolError(f"engine reply: weight_versions {told} do not cover {count} tokens")
    return version_spans([span.version for span in spans for _ in range(span.start, span.end)])


def _span(value: object) -> VersionSpan:
    match value:
        case {"version": str() as version, "start": int() as start, "end": int() as end}:
            return VersionSpan(version, start, end)
        case [str() as version, int() as start, int() as end]:
            return VersionSpan(version, start, end)
        case _:
            raise EngineProtocolError(f"engine reply: weight_versions has {value!r}")
