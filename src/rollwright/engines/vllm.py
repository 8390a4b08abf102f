"""A vLLM server: ids in, ids and logprobs out, by its token route where it has one, else by `/v1/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from rollwright.engines import EngineCapabilities, Generation, Scores
from rollwright.engines.remote import NO_SUCH_ROUTE, PROBE, EngineServer, Json, as_list, as_mapping, as_spans
from rollwright.engines.vllm_routes import Completions, Generate, Sampled, VllmRoute, prompt_logprobs
from rollwright.errors import ConfigError, EngineProtocolError, EngineRejected
from rollwright.messages import Message
from rollwright.tokens import Renderer
from rollwright.types import Sampling, VersionSpan

__all__ = ["VllmEngine"]

_DISABLED = 403
"""What the token route answers on a server started without `--enable-scale-out`."""
_MODES = {"raw": "raw_logprobs", "behaviour": "processed_logprobs"}
"""`--logprobs-mode` of each logprob kind."""


class VllmEngine:
    """Talks to vLLM ≥ 0.32.

    `generate` (`vllm serve --enable-scale-out`) tells the weight version of each token. `completions` tells none: there
    the version is `version`, or what the server's `/weight_info` (`VLLM_SERVER_DEV_MODE=1`) says before and after each
    reply; a reply across a change is thrown away and asked for again.

    Logprob kind is `raw` as vLLM is by default: log_softmax(logits), before the temperature. Say `behaviour` for a
    server started with `--logprobs-mode processed_logprobs`: of the distribution that was sampled from (at temperature
    0: of the logits). `check` compares with what a server in development mode tells; others do not tell.

    A running reply ends early with what it has where the server has an abort route for it: always with `generate`, in
    development mode with `completions`. Elsewhere the call is left, and its partial reply is lost.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        url: str,
        route: Literal["auto", "generate", "completions"] = "auto",
        logprob_kind: Literal["raw", "behaviour"] = "raw",
        model: str | None = None,
        max_context: int | None = None,
        version: str | None = None,
        api_key: str | None = None,
        connect_seconds: float = 10.0,
        reply_seconds: float = 3600.0,
        max_connections: int = 1024,
    ) -> None:
        """`url`: of the server or its router, without `/v1`. `model`: its name there, the first one it lists unless
        given. `max_context`: to lower the server's. `version`: of the weights, for a server that does not tell it.
        `reply_seconds`: how long one reply may take, its wait in the queue included.

        Raises `ConfigError`; the server is first asked by `__aenter__`.
        """
        self._server = EngineServer(
            "vllm",
            url,
            api_key=api_key,
            connect_seconds=connect_seconds,
            reply_seconds=reply_seconds,
            max_connections=max_connections,
        )
        self._renderer = renderer
        self._asked_route = route
        self._route: VllmRoute = Completions() if route == "completions" else Generate()
        self._logprob_kind: Literal["raw", "behaviour"] = logprob_kind
        self._model = model
        self._max_context = max_context
        self._version = version
        self._capabilities: EngineCapabilities | None = None
        self._running: dict[str, anyio.CancelScope] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine is not open")
        return self._capabilities

    async def __aenter__(self) -> Self:
        self._server.open()
        try:
            served = self._served(await self._server.get("/v1/models"))
            self._model = str(served.get("id"))
            if self._asked_route == "auto" and not await self._takes_tokens():
                self._route = Completions()
            if isinstance(self._route, Completions) and self._version is None and not await self._weights_now():
                raise ConfigError(
                    f"the engine at {self._server.url} does not say which weights it has: start it with "
                    "--enable-scale-out, or set engine.vllm.version",
                    field="engine.vllm.version",
                )
            self._capabilities = EngineCapabilities(
                name="vllm", max_context=self._context(served), logprob_kind=self._logprob_kind
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
        """Has both tokenizers split one text, compares the logprob mode where the server tells it, samples one token.

        Raises `ConfigError` naming what differs.
        """
        text = PROBE + self._renderer.decode(sorted(self._renderer.stop_ids))
        ours = self._renderer.encode(text)
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        told = await self._server.post_if_there("/tokenize", body)
        if told is not None and told.get("tokens") != ours:
            raise ConfigError(
                f"the engine at {self._server.url} serves {self._model}, whose tokenizer does not split text as "
                f"policy.path's {self._renderer.name} does: they are not of one policy",
                field="policy.path",
            )
        await self._check_logprob_mode()
        await self.generate(
            ours[:8],
            Sampling(max_new_tokens=1),
            stop_ids=self._renderer.stop_ids,
            request_id=f"rollwright-check-{uuid.uuid4().hex}",
            session_key="rollwright-check",
        )

    async def rendered(self, messages: Sequence[Message]) -> list[int] | None:
        return await self._server.rendered("/tokenize", messages, model=self._model)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        session_key: str,
    ) -> Generation:
        room = self.capabilities.max_context
        if len(ids) + sampling.max_new_tokens > room:
            # vLLM itself would sample less than it was asked for and say nothing.
            raise EngineRejected(
                f"vllm: the prompt ({len(ids)} tokens) with {sampling.max_new_tokens} new tokens is longer than the "
                f"context ({room} tokens)",
                too_long=True,
            )
        body = self._route.body(self._model or "", ids, _parameters(sampling, stop_ids), request_id)
        before = await self._weights_if_untold()
        reply: Json | None = None
        with anyio.CancelScope() as scope:
            self._running[request_id] = scope
            try:
                # Both a vLLM engine and the routers in front of it keep a session together by such a header.
                headers = {"x-session-id": session_key, "x-smg-routing-key": session_key}
                reply = await self._server.post(self._route.path, body, headers)
            finally:
                del self._running[request_id]
        if reply is None or before != await self._weights_if_untold():
            return Generation(ids=[], logprobs=[], finish="abort", versions=())
        return self._generation(self._route.read(reply, ids), sampling, stop_ids, before)

    async def score(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        sampling: Sampling,
        *,
        request_id: str,
        session_key: str,
    ) -> Scores:
        """One prefill, and one token nobody wants. vLLM gives log_softmax(logits) of prompt tokens in every mode."""
        asked = _parameters(Sampling(max_new_tokens=1), frozenset()) | {"prompt_logprobs": 0}
        body = self._route.body(self._model or "", ids, asked, request_id)
        headers = {"x-session-id": session_key, "x-smg-routing-key": session_key}
        before = await self._weights_if_untold()
        reply = await self._server.post(self._route.path, body, headers)
        told = prompt_logprobs(self._route.read_prompt(reply), ids)
        spans_of = self._versions(self._route.read(reply, ids), before)
        version = spans_of[0].version if spans_of and before == await self._weights_if_untold() else ""
        wanted = [told[at - 1] for start, end in spans for at in range(start, end)]
        return Scores(logprobs=wanted, kind="raw", version=version)

    async def abort(self, request_id: str) -> None:
        # A list of this one id: vLLM takes an empty one for all requests it has.
        named = {"request_ids": [self._route.name(request_id)]}
        try:
            await self._server.request("POST", self._route.abort_path, named)
        except EngineRejected as error:
            if error.details.get("status") not in NO_SUCH_ROUTE:
                raise
            if request_id in self._running:
                self._running[request_id].cancel()

    # ----------------------------------------------------------------------- what the server says of itself

    def _served(self, models: Json) -> Json:
        listed = [as_mapping(model, "a model") for model in as_list(models.get("data"), "/v1/models: data")]
        names = [str(model.get("id")) for model in listed]
        for name, model in zip(names, listed, strict=True):
            if self._model in (None, name):
                return model
        raise ConfigError(
            f"the engine at {self._server.url} serves {', '.join(names) or 'no model'}, not {self._model!r}",
            field="engine.vllm.model",
        )

    def _context(self, served: Json) -> int:
        told = [served.get("max_model_len"), self._max_context]
        known = [size for size in told if isinstance(size, int) and size > 0]
        if not known:
            raise ConfigError(
                f"the engine at {self._server.url} does not say how long its context is; set engine.vllm.max_context",
                field="engine.vllm.max_context",
            )
        return min(known)

    async def _takes_tokens(self) -> bool:
        """Whether the token route is there: then it finds fault with a body that asks for nothing."""
        try:
            await self._server.post(Generate.path, {})
        except EngineRejected as error:
            status = error.details.get("status")
            if status not in (400, 422, _DISABLED, *NO_SUCH_ROUTE):
                raise
            return status in (400, 422)
        return True

    async def _weights_now(self) -> str:
        """The version in use; "" where the server does not tell it."""
        version = (await self._server.told("/weight_info")).get("weight_version")
        return version if isinstance(version, str) else ""

    async def _weights_if_untold(self) -> str:
        """The version in use, for replies that do not tell theirs."""
        if isinstance(self._route, Generate):
            return ""
        return self._version or await self._weights_now()

    async def _check_logprob_mode(self) -> None:
        match await self._server.told("/server_info?config_format=json"):
            case {"vllm_config": {"model_config": {"logprobs_mode": str() as mode}}}:
                pass
            case _:
                return
        if mode != _MODES[self._logprob_kind]:
            raise ConfigError(
                f"the engine at {self._server.url} runs with --logprobs-mode {mode}, logprob_kind "
                f"{self._logprob_kind!r} needs {_MODES[self._logprob_kind]}",
                field="engine.vllm.logprob_kind",
            )

    # ----------------------------------------------------------------------- reading a reply

    def _generation(self, sampled: Sampled, sampling: Sampling, stop_ids: frozenset[int], weights: str) -> Generation:
        ids = sampled.ids
        if sampled.finish == "stop" and (not ids or ids[-1] not in stop_ids):
            raise EngineProtocolError(
                f"vllm stopped at id {ids[-1] if ids else None}, which ends no turn of {self._renderer.name} "
                f"({sorted(stop_ids)})"
            )
        if sampled.finish == "length" and len(ids) != sampling.max_new_tokens:
            raise EngineProtocolError(f"vllm sampled {len(ids)} tokens where {sampling.max_new_tokens} were asked for")
        return Generation(
            ids=ids,
            logprobs=sampled.logprobs,
            finish=sampled.finish,
            versions=self._versions(sampled, weights),
            cached_tokens=sampled.cached_tokens,
        )

    def _versions(self, sampled: Sampled, weights: str) -> tuple[VersionSpan, ...]:
        count = len(sampled.ids)
        if not count:
            return ()
        if sampled.versions is not None:
            return as_spans(sampled.versions, count)
        version = weights or self._version
        if not version:
            raise EngineProtocolError("vllm does not say which weights a reply came from; set engine.vllm.version")
        return (VersionSpan(version, 0, count),)


def _parameters(sampling: Sampling, stop_ids: frozenset[int]) -> dict[str, Any]:
    """Everything that a model's generation_config.json would else decide is said."""
    parameters: dict[str, Any] = {
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "stop_token_ids": sorted(stop_ids),
        # The policy's own stop ids end a turn, no other one.
        "ignore_eos": True,
    }
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    return parameters
