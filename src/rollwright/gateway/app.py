"""The gateway's routes: each request to its session, each turn to its reader, each problem in the wire's own words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import anyio
from starlette.routing import Mount, Route, Router
from starlette.types import Receive, Scope, Send

from rollwright.dialects import Dialect, Problem
from rollwright.dialects.anthropic import Anthropic
from rollwright.dialects.openai_chat import OpenAIChat
from rollwright.dialects.openai_responses import OpenAIResponses
from rollwright.errors import LimitError, MalformedRequest, PromptTooLong, RollwrightError, UsageError
from rollwright.gateway.exchange import ClientGone, Exchange, Refused
from rollwright.gateway.receipt import Receipt
from rollwright.gateway.session import Session
from rollwright.gateway.turn import Asked, Flight, Policy

__all__ = ["Doorkeeper", "build_app"]

_GRACE_SECONDS = 0.25
"""An engine that does not take a prompt says so at once: so long a status is held back that could not be taken back."""
_SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Doorkeeper(Protocol):
    """Who may come in."""

    async def session(self, secret: str, only: Session | None) -> Session:
        """The open session of this key on a listener that may serve one session `only`. One that is about to be
        reopened is waited for. Raises `Refused`."""
        ...


def build_app(door: Doorkeeper, policy: Policy, *, keepalive_seconds: float) -> Router:
    """One app for every socket and session of a gateway."""
    anthropic, chat, responses = Anthropic(), OpenAIChat(), OpenAIResponses()
    shared = (door, policy, keepalive_seconds)
    return Router(
        routes=[
            Route("/v1/messages", _Turns(anthropic, *shared), methods=["POST"]),
            Route("/v1/messages/count_tokens", _Count(anthropic, *shared), methods=["POST"]),
            Route("/v1/chat/completions", _Turns(chat, *shared), methods=["POST"]),
            Route("/v1/responses", _Turns(responses, *shared), methods=["POST"]),
            Route("/v1/models", _Models(chat, *shared), methods=["GET"]),
            Route("/v1/models/{model:path}", _Models(chat, *shared), methods=["GET"]),
            Mount("/", _NotFound(chat, *shared)),
        ]
    )


class _Endpoint(ABC):
    """What every route does: read the request, answer it, and say what is wrong."""

    def __init__(self, dialect: Dialect, door: Doorkeeper, policy: Policy, keepalive: float) -> None:
        self.dialect = dialect
        self.policy = policy
        self.keepalive = keepalive
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self.answer(exchange, scope)
        except ClientGone:
            return
        except Refused as refusal:
            await exchange.json(*self.wire_of(exchange).error(refusal.problem))

    @abstractmethod
    async def answer(self, exchange: Exchange, scope: Scope) -> None: ...

    def wire_of(self, exchange: Exchange) -> Dialect:
        """Where two wires share a path, the SDK's own header tells them apart."""
        return Anthropic() if "anthropic-version" in exchange.headers else self.dialect

    async def admit(self, exchange: Exchange) -> Session:
        session = await self._door.session(exchange.secret, exchange.only)
        exchange.admitted(session)
        return session

    async def read(self, exchange: Exchange, session: Session) -> Asked:
        body = await exchange.body()
        try:
            return await session.read(self.dialect, partial(exchange.unpacked, body), exchange.headers)
        except MalformedRequest as error:
            session.note(error)
            raise Refused(_problem(error)) from error


class _Turns(_Endpoint):
    """POST of a conversation: one turn of the policy."""

    def wire_of(self, exchange: Exchange) -> Dialect:
        return self.dialect

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        session = await self.admit(exchange)
        asked = await self.read(exchange, session)
        try:
            flight = session.join(asked)
        except LimitError as error:
            session.note(error)
            raise Refused(_problem(error)) from error
        receipt: Receipt | None = None
        try:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    await exchange.watch()
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                send = self._stream if asked.request.stream else self._whole
                receipt = await send(exchange, flight, asked)
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await session.leave(flight, receipt)

    async def _whole(self, exchange: Exchange, flight: Flight, asked: Asked) -> Receipt | None:
        await flight.done.wait()
        if flight.reply is None:
            await exchange.json(*self.dialect.error(_failure(flight)))
            return None
        with anyio.CancelScope(shield=True):
            return await exchange.json(200, self.dialect.reply(flight.reply, asked.request))

    async def _stream(self, exchange: Exchange, flight: Flight, asked: Asked) -> Receipt | None:
        await _within(self.keepalive, flight.planned)
        if flight.planned.is_set():
            await _within(min(_GRACE_SECONDS, self.keepalive), flight.done)
        if flight.done.is_set() and (problem := _refusal(flight)) is not None:
            await exchange.json(*self.dialect.error(problem))
            return None
        await exchange.start(200, _SSE_HEADERS)
        opened = False
        while not flight.done.is_set():
            if opened or (self.dialect.opens_counted and not flight.planned.is_set()):
                await exchange.write(self.dialect.keepalive(flight.opening))
            else:
                opened = True
                await exchange.write(self.dialect.opening(flight.opening))
            await _within(self.keepalive, flight.done)
        said = b"" if opened else self.dialect.opening(flight.opening)
        if flight.reply is not None:
            reply = flight.reply
            with anyio.CancelScope(shield=True):
                said += self.dialect.content(reply, asked.request) + self.dialect.terminal(reply, asked.request)
                return await exchange.finish(said)
        if (problem := _refusal(flight)) is not None:
            await exchange.finish(self.dialect.failure(problem, flight.opening))
        else:
            await exchange.hang_up()
        return None


class _Count(_Endpoint):
    """POST of a conversation: how many tokens its prompt has."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        session = await self.admit(exchange)
        asked = await self.read(exchange, session)
        try:
            tokens = await session.count(asked)
        except (UsageError, PromptTooLong) as error:
            session.note(error)
            raise Refused(_problem(error)) from error
        await exchange.json(200, {"input_tokens": tokens})


class _Models(_Endpoint):
    """GET of the models: the one policy, in an object both wires' SDKs read."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        await self.admit(exchange)
        name = self.policy.model
        wanted = scope["path_params"].get("model")
        model = {
            "id": name,
            "type": "model",
            "object": "model",
            "display_name": name,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "rollwright",
        }
        if wanted is None:
            listing: Sequence[object] = [model]
            page = {"has_more": False, "first_id": name, "last_id": name}
            await exchange.json(200, {"object": "list", "data": listing, **page})
        elif wanted == name:
            await exchange.json(200, model)
        else:
            raise Refused(Problem(kind="not_found", message=f"there is no model {wanted[:100]!r}, only {name!r}"))


class _NotFound(_Endpoint):
    """Everything else: CLIs probe for things (HEAD /api/hello) and must be told no at once."""

    async def answer(self, exchange: Exchange, scope: Scope) -> None:
        raise Refused(Problem(kind="not_found", message=f"no such route: {scope['method']} {scope['path'][:200]}"))


def _failure(flight: Flight) -> Problem:
    """Why a flight has no reply."""
    if flight.error is None:
        return Problem(kind="closed", message="this session is closed")
    return _problem(flight.error)


def _refusal(flight: Flight) -> Problem | None:
    """Why a flight has no reply, where it is the client that can do something about it; else it is to ask again."""
    problem = _failure(flight)
    return problem if flight.reply is None and problem.kind in ("too_long", "malformed") else None


async def _within(seconds: float, event: anyio.Event) -> None:
    """Wait for it, but no longer."""
    if not event.is_set():
        with anyio.move_on_after(seconds):
            await event.wait()


def _problem(error: RollwrightError) -> Problem:
    match error:
        case MalformedRequest():
            return Problem(kind="malformed", message=error.message, field=error.details["field"])
        case PromptTooLong():
            tokens, maximum = error.details["tokens"], error.details["maximum"]
            return Problem(kind="too_long", message=error.message, tokens=tokens, maximum=maximum)
        case LimitError():
            return Problem(kind="limit", message=error.message)
        case UsageError():
            return Problem(kind="malformed", message=error.message, field="messages")
        case _:
            return Problem(kind="unavailable", message="the policy's engine does not answer")
