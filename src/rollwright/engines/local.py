"""The embedded engine: a small policy sampled in this process, for demos, tests and trainers without a server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio import to_thread

from rollwright.engines import EngineCapabilities, Generation, Scores
from rollwright.engines.batcher import Batcher, Request
from rollwright.engines.runtime import Runtime, RuntimeName, load_runtime
from rollwright.engines.spans import version_spans
from rollwright.engines.weights import weights_digest
from rollwright.errors import ConfigError, EngineError, EngineProtocolError, EngineRejected, EngineUnreachable
from rollwright.tokens import Renderer
from rollwright.types import Sampling

__all__ = ["LocalEngine"]


class LocalEngine:
    """Samples from a model folder with continuous batching, prefix reuse and weight swaps.

    Logprob kind is `behaviour`: of the very distribution each token was drawn from, after temperature, top-k, top-p
    and renormalisation. With `top_k = 0` and `top_p = 1` nothing is cut and it equals `temperature`; at temperature
    0 the choice is certain and every logprob is 0.0.

    With `Sampling.seed` the same prompt gives the same ids and logprobs, whatever else runs. Without a seed the
    engine's `seed` and the `request_id` take its place.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        model: Path | str,
        runtime: RuntimeName = "numpy",
        version: str = "0",
        max_context: int | None = None,
        seed: int = 0,
        threads: int = 1,
        prefix_mib: int = 256,
        max_concurrent: int = 32,
    ) -> None:
        """`model`: a Hugging Face model folder. `version`: the name of its weights. `max_context`: lower the model's
        own. `threads`: of the matrix products; more than one only helps larger models. `prefix_mib`: memory for
        prompts kept for reuse. `max_concurrent`: replies sampled at once, the others wait.

        Raises `ConfigError` for a setting that cannot be right; the model is read by `__aenter__`.
        """
        self._folder = Path(model)
        if not self._folder.is_dir():
            raise ConfigError(f"engine.local.model: {self._folder} is not a folder", field="engine.local.model")
        for field, value, least in (
            ("threads", threads, 1),
            ("prefix_mib", prefix_mib, 0),
            ("max_concurrent", max_concurrent, 1),
            ("max_context", 1 if max_context is None else max_context, 1),
        ):
            if value < least:
                raise ConfigError(
                    f"engine.local.{field} must be at least {least}, not {value}", field=f"engine.local.{field}"
                )
        self._renderer = renderer
        self._runtime_name: RuntimeName = runtime
        self._version = version
        self._max_context = max_context
        self._seed = seed
        self._threads = threads
        self._prefix_bytes = prefix_mib << 20
        self._max_concurrent = max_concurrent
        self._batcher: Batcher | None = None
        self._capabilities: EngineCapabilities | None = None
        self._running: dict[str, Request] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine is not open")
        return self._capabilities

    @property
    def weights(self) -> str:
        """See `HoldsWeights`: of the folder it was made with."""
        return weights_digest(self._folder)

    async def __aenter__(self) -> Self:
        runtime = await to_thread.run_sync(self._load, self._folder)
        self._capabilities = EngineCapabilities(
            name="local",
            max_context=self._max_context or runtime.max_context,
            logprob_kind="behaviour",
            vocab_size=runtime.vocab_size,
            updates_weights=True,
        )
        self._batcher = Batcher(
            runtime,
            self._version,
            threads=self._threads,
            prefix_bytes=self._prefix_bytes,
            max_concurrent=self._max_concurrent,
        )
        self._batcher.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        batcher, self._batcher = self._batcher, None
        if batcher is not None:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(batcher.close)

    async def check(self) -> None:
        """Raises `ConfigError` when the model has fewer ids than the tokenizer; else samples one token."""
        vocab_size = self.capabilities.vocab_size or 0
        if vocab_size < self._renderer.vocab_size:
            raise ConfigError(
                f"engine.local.model: {self._folder} knows {vocab_size} ids, the tokenizer {self._renderer.name} "
                f"has {self._renderer.vocab_size}: they are not of one policy",
                field="engine.local.model",
            )
        ids = self._renderer.encode("a") or [0]
        await self.generate(
            ids[:1],
            Sampling(max_new_tokens=1),
            stop_ids=frozenset(),
            request_id="check",
            session_key="check",
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
        request = await self._carry_out(ids, sampling, stop_ids, request_id, session_key, forced=())
        if request.finish is None or len(request.versions) != len(request.logprobs):
            raise EngineProtocolError("the local engine ended a reply without saying how")
        return Generation(
            ids=request.tokens[request.prompt_length :],
            logprobs=request.logprobs,
            finish=request.finish,
            versions=version_spans(request.versions),
            cached_tokens=request.cached_tokens,
        )

    async def score(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        sampling: Sampling,
        *,
        request_id: str,
        session_key: str,
    ) -> Scores:
        """Computed as they were sampled, prompts in tiles and replies token by token, so the numpy runtime gives the
        very same numbers again."""
        logprobs: list[float] = []
        versions: set[str] = set()
        for start, end in spans:
            forced = list(ids[start:end])
            asked = replace(sampling, max_new_tokens=len(forced))
            request = await self._carry_out(
                ids[:start], asked, frozenset(), f"{request_id}-{start}", session_key, forced=forced
            )
            if len(request.logprobs) != len(forced):
                raise EngineUnreachable("the local engine was closed before all tokens were scored")
            logprobs += request.logprobs
            versions.update(request.versions)
        if len(versions) > 1:
            raise EngineProtocolError("the local engine's weights changed while it scored")
        return Scores(logprobs=logprobs, kind="behaviour", version=versions.pop() if versions else self._version)

    async def abort(self, request_id: str) -> None:
        request = self._running.get(request_id)
        if request is not None and self._batcher is not None:
            self._batcher.abort(request)

    async def load_weights(self, path: Path, version: str) -> None:
        """Go on with the weights of folder `path`, called `version`, from each reply's next token on.

        Replies in the making keep what they have; their prompt and partial reply are computed again under the new
        weights, so each token's logprob can be had again from its own version alone. Returns when the new weights
        are in use. Raises `ConfigError` when the folder holds another model than the one that runs.
        """
        batcher = self._open_batcher()
        runtime = await to_thread.run_sync(self._load, path)
        if runtime.vocab_size != self.capabilities.vocab_size:
            raise ConfigError(
                f"weights in {path} have {runtime.vocab_size} ids, the model has {self.capabilities.vocab_size}",
                field="engine.local.model",
            )
        loop, done = asyncio.get_running_loop(), anyio.Event()
        batcher.swap(runtime, version, partial(loop.call_soon_threadsafe, done.set))
        await done.wait()
        if batcher.version != version:
            raise EngineUnreachable("the local engine was closed before the new weights were in use")

    async def _carry_out(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        stop_ids: frozenset[int],
        request_id: str,
        session_key: str,
        *,
        forced: Sequence[int],
    ) -> Request:
        """Have the batcher make one reply, sampled or `forced`. Raises the contract's errors."""
        batcher = self._open_batcher()
        self._refuse_wrong([*ids, *forced] if forced else ids, sampling, request_id, given=len(forced))
        loop, done = asyncio.get_running_loop(), anyio.Event()
        request = Request(
            tokens=list(ids),
            prompt_length=len(ids),
            sampling=sampling,
            stop_ids=stop_ids,
            key=self._random_key(sampling.seed, request_id),
            session_key=session_key,
            wake=partial(loop.call_soon_threadsafe, done.set),
            forced=forced,
        )
        self._running[request_id] = request
        try:
            batcher.submit(request)
            await done.wait()
        except BaseException:
            batcher.abort(request)
            raise
        finally:
            del self._running[request_id]
        if isinstance(request.error, EngineError):
            raise request.error
        if request.error is not None:
            raise EngineUnreachable(f"the local engine's thread died: {request.error!r}") from request.error
        return request

    def _open_batcher(self) -> Batcher:
        if self._batcher is None:
            raise EngineUnreachable("the local engine is not open")
        return self._batcher

    def _load(self, folder: Path) -> Runtime:
        runtime = load_runtime(self._runtime_name, folder)
        if self._max_context is not None and self._max_context > runtime.max_context:
            raise ConfigError(
                f"engine.local.max_context is {self._max_context}, the model's own is {runtime.max_context}",
                field="engine.local.max_context",
            )
        return runtime

    def _refuse_wrong(self, ids: Sequence[int], sampling: Sampling, request_id: str, *, given: int) -> None:
        """`given`: how many of the new tokens are among the ids."""
        room = self.capabilities.max_context
        vocab_size = self.capabilities.vocab_size or 0
        length = len(ids) - given
        size = f"the prompt ({length} tokens) with {sampling.max_new_tokens} new tokens"
        wrong = {
            "the prompt is empty": not length,
            f"{size} is longer than the context ({room} tokens)": length + sampling.max_new_tokens > room,
            f"the prompt has ids outside [0, {vocab_size})": any(not 0 <= token < vocab_size for token in ids),
            f"temperature is {sampling.temperature}": not sampling.temperature >= 0,
            f"top_p is {sampling.top_p}": not 0 < sampling.top_p <= 1,
            f"top_k is {sampling.top_k}": sampling.top_k < 0,
            f"max_new_tokens is {sampling.max_new_tokens}": sampling.max_new_tokens < 0,
            f"request {request_id} is already running": request_id in self._running,
        }
        for what, present in wrong.items():
            if present:
                raise EngineRejected(f"local engine: {what}")

    def _random_key(self, seed: int | None, request_id: str) -> bytes:
        source = f"seed {seed}" if seed is not None else f"request {self._seed} {request_id}"
        return hashlib.blake2b(source.encode(), digest_size=16).digest()
