"""Continuous batching: one thread samples for all requests, prompts in chunks, replies one token a round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollwright.engines.prefixes import PrefixStore
from rollwright.engines.runtime import Cache, Logits, Runtime
from rollwright.engines.sampler import candidates, draw, logprob_of, uniform
from rollwright.types import Sampling

__all__ = ["Batcher", "Request"]

PREFILL_CHUNK = 192
"""Prompt tokens between two rounds of sampling, so that a long prompt does not stop the others."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One reply in the making. After `wake` was called, only the caller touches it."""

    tokens: list[int]
    """Prompt and, after it, what was sampled."""
    prompt_length: int
    sampling: Sampling
    stop_ids: frozenset[int]
    key: bytes
    """Of the random numbers."""
    session_key: str
    wake: Callable[[], object]
    """Called once from the batcher's thread, when `finish` or `error` is set."""
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[str] = field(default_factory=list[str])
    """The weights each sampled token came from."""
    forced: Sequence[int] = ()
    """What is to be said, to learn how likely it is; else it is drawn."""
    cached_tokens: int = 0
    abort: bool = False
    """Set by the caller: end at the next token."""
    finish: Literal["stop", "length", "abort"] | None = None
    error: BaseException | None = None
    cache: Cache | None = None

    @property
    def budget(self) -> int:
        return self.prompt_length + self.sampling.max_new_tokens


class Batcher:
    """Owns the runtime once started. Public methods may be called from any thread."""

    def __init__(self, runtime: Runtime, version: str, *, threads: int, prefix_bytes: int, max_concurrent: int) -> None:
        self._runtime = runtime
        self._version = version
        self._threads = threads
        self._prefixes = PrefixStore(prefix_bytes)
        self._max_concurrent = max_concurrent
        self._wakeup = threading.Condition()
        self._waiting: list[Request] = []
        self._swaps: list[tuple[Runtime, str, Callable[[], object]]] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._active: list[Request] = []
        self._thread = threading.Thread(target=self._main, name="rollwright-local-engine", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread before its time."""
        return self._failure

    @property
    def version(self) -> str:
        return self._version

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Abort what runs and wait for the thread."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join()

    def submit(self, request: Request) -> None:
        with self._wakeup:
            if self._failure is not None or self._closing:
                request.error = self._failure
                request.finish = "abort"
                request.wake()
                return
            self._waiting.append(request)
            self._wakeup.notify()

    def abort(self, request: Request) -> None:
        with self._wakeup:
            request.abort = True
            self._wakeup.notify()

    def swap(self, runtime: Runtime, version: str, done: Callable[[], object]) -> None:
        """Go on with other weights from the next token. `done` is called from the thread."""
        with self._wakeup:
            if self._failure is not None or self._closing:
                done()
                return
            self._swaps.append((runtime, version, done))
            self._wakeup.notify()

    def _main(self) -> None:
        try:
            threads_before = self._runtime.set_threads(self._threads)
            while self._take_in():
                self._round()
            self._runtime.set_threads(threads_before)
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: no caller may wait for ever
            self._failure = error
        with self._wakeup:
            self._closing = True
            left, self._waiting = [*self._active, *self._waiting], []
            swaps, self._swaps = self._swaps, []
        for request in left:
            request.error = self._failure
            self._end(request, "abort")
        for _, _, done in swaps:
            done()

    def _take_in(self) -> bool:
        """Wait until there is work and take it; False when it is time to end."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._active or self._waiting or self._swaps or self._closing)
            if self._closing:
                return False
            swaps, self._swaps = self._swaps, []
            room = self._max_concurrent - len(self._active)
            arrived, self._waiting = self._waiting[:room], self._waiting[room:]
            given_up = [request for request in self._waiting if request.abort]
            self._waiting = [request for request in self._waiting if not request.abort]
        for runtime, version, done in swaps:
            self._change_weights(runtime, version)
            done()
        self._active.extend(arrived)
        for request in given_up:
            self._end(request, "abort")
        return True

    def _change_weights(self, runtime: Runtime, version: str) -> None:
        # Old keys and values under new weights would be a third model that nobody can compute again.
        self._prefixes.clear()
        for request in self._active:
            request.cache = None
        self._runtime, self._version = runtime, version

    def _round(self) -> None:
        """A chunk of the oldest unfinished prompt, and one token for every reply."""
        for request in [request for request in self._active if request.abort]:
            self._end(request, "abort")
        for request in [r for r in self._active if r.cache is None]:
            self._open(request)
        stepping: list[tuple[Request, Cache]] = []
        filling: list[tuple[Request, Cache]] = []
        for request in self._active:
            if request.cache is not None:
                replying = len(request.tokens) > request.prompt_length
                ready = replying and request.cache.length == len(request.tokens) - 1
                (stepping if ready else filling).append((request, request.cache))
        if stepping:
            caches = [cache for _, cache in stepping]
            rows = self._runtime.step([request.tokens[-1] for request, _ in stepping], caches)
            for (request, _), logits in zip(stepping, rows, strict=True):
                self._sample(request, logits)
        if filling:
            self._fill(*filling[0])

    def _open(self, request: Request) -> None:
        if request.budget <= request.prompt_length:
            self._end(request, "length")
            return
        # The last token is always computed: its logits are what is wanted.
        usable = request.tokens[: request.prompt_length][:-1]
        found = self._prefixes.find(request.session_key, usable)
        if found is None:
            request.cache = self._runtime.new_cache(request.budget)
        else:
            cache, shared = found
            request.cache = cache.fork(shared, request.budget)
            if not request.logprobs:
                request.cached_tokens = shared

    def _fill(self, request: Request, cache: Cache) -> None:
        start, tile = cache.length, self._runtime.prefill_tile
        stop = min(len(request.tokens), start // tile * tile + max(PREFILL_CHUNK, tile))
        logits = self._runtime.prefill(request.tokens[start:stop], cache)
        if stop < len(request.tokens):
            return
        if stop == request.prompt_length:
            # Only prompts are kept: a sampled token's keys come from another product than a prompt's and may differ
            # in the last bit, and then a reply would depend on what happened to be cached.
            # The copy leaves out the room for the reply.
            self._prefixes.put(request.session_key, request.tokens[:stop], cache.fork(stop, stop))
        self._sample(request, logits)

    def _sample(self, request: Request, logits: Logits) -> None:
        try:
            choice = candidates(logits, request.sampling)
        except Exception as error:  # noqa: BLE001 - one request's boundary: the others go on
            request.error = error
            self._end(request, "abort")
            return
        if request.forced:
            token = request.forced[len(request.tokens) - request.prompt_length]
            logprob = logprob_of(choice, token)
        else:
            token, logprob = draw(choice, uniform(request.key, len(request.tokens)))
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.versions.append(self._version)
        if token in request.stop_ids:
            self._end(request, "stop")
        elif len(request.tokens) >= request.budget:
            self._end(request, "length")

    def _end(self, request: Request, finish: Literal["stop", "length", "abort"]) -> None:
        if request in self._active:
            self._active.remove(request)
        request.cache = None
        request.finish = finish
        request.wake()
