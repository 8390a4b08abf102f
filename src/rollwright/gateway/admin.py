"""Admin routes of a gateway that serves alone: sessions opened, watched and closed, weight updates; loopback only."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rollwright.dialects.jsonio import dumps
from rollwright.errors import RollwrightError, UsageError
from rollwright.gateway.admin_bodies import (
    ROLLOUT_NAME,
    Body,
    CloseBody,
    NoBody,
    OpenBody,
    PauseBody,
    ResumeBody,
    read_body,
)
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import Session
from rollwright.gateway.settings import SessionSettings
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.types import Sample

__all__ = ["Answer", "NameTaken", "SessionBook", "admin_routes", "local_route", "reply"]

_REMEMBERED = 64
"""Closed sessions without a log whose samples can be asked for again."""

BodyT = TypeVar("BodyT", bound=Body)


class NameTaken(UsageError):
    """There is, or was, a session of this name."""


class SessionBook:
    """The open sessions by rollout, and where their logs are."""

    def __init__(
        self, gateway: Gateway, folder: Path | None, settings: SessionSettings, *, secret_prefix: str = ""
    ) -> None:
        """`folder`: for the turn logs; None keeps none. `settings`: of sessions, where they name no own ones.
        `secret_prefix`: how the keys of new sessions begin."""
        self.gateway = gateway
        self.sessions: dict[str, Session] = {}
        self._folder = folder
        self._settings = settings
        self._secret_prefix = secret_prefix
        self._closed: OrderedDict[str, Trajectory] = OrderedDict()
        """Those that have no log."""

    def reopen(self) -> None:
        """Take up the sessions of a gateway that was killed. Raises `StoreError`."""
        for session in [] if self._folder is None else self.gateway.reopen_all(self._folder):
            self.sessions[session.rollout_id] = session

    def open(self, asked: OpenBody) -> Session:
        """Raises `NameTaken`, `StoreError`."""
        name = asked.rollout_id
        if name in self.sessions:
            raise NameTaken(f"rollout_id: {name} is open already")
        log = self._log(name)
        if log is not None and log.exists():
            raise NameTaken(
                f"rollout_id: {name} has its log, {log}: close it again for its samples, or take another name"
            )
        settings = asked.over(self._settings)
        session = self.gateway.open(
            name,
            log=log,
            limits=settings.limits,
            sampling=settings.sampling,
            secret=self._secret_prefix + secrets.token_urlsafe(32),
            history=settings.history,
            trained=settings.trained,
            one_program=asked.one_program,
        )
        self.sessions[name] = session
        return session

    def find(self, name: str) -> Session:
        """Raises `UsageError`."""
        if name not in self.sessions:
            raise _not_open(name)
        return self.sessions[name]

    async def close(self, name: str, asked: CloseBody) -> list[Sample]:
        """Seal the session and make its samples.

        Again for whoever asks again: from its log, also in another process; without logs, of the last sessions only.
        Raises `UsageError`, `StoreError`.
        """
        session = self.sessions.get(name)
        if session is None:
            trajectory = await self._closed_before(name)
        else:
            trajectory = await session.close()
            if self.sessions.get(name) is session:
                del self.sessions[name]
                self._remember(name, trajectory)
        make = partial(
            build_samples,
            trajectory,
            task_id=name if asked.task_id is None else asked.task_id,
            group_id=name if asked.group_id is None else asked.group_id,
            rollout_id=name,
            reward=asked.reward,
            trainable=asked.reward is not None,
            counts_in_baseline=asked.reward is not None,
            max_sample_tokens=asked.max_sample_tokens,
            accepted_versions=asked.accepted_versions,
        )
        return await anyio.to_thread.run_sync(make)

    def _remember(self, name: str, trajectory: Trajectory) -> None:
        if self._folder is None:
            self._closed[name] = trajectory
            self._closed.move_to_end(name)
            if len(self._closed) > _REMEMBERED:
                self._closed.popitem(last=False)

    async def _closed_before(self, name: str) -> Trajectory:
        if name in self._closed:
            return self._closed[name]
        log = self._log(name) if ROLLOUT_NAME.fullmatch(name) else None
        if log is not None and log.is_file():
            logged = await anyio.to_thread.run_sync(read_turn_log, log)
            if logged.sealed:
                return logged.trajectory
        raise _not_open(name)

    def _log(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{name}.turns.log"


Answer = Callable[[BodyT, Request], Awaitable[object]]


def admin_routes(book: SessionBook, key: str) -> list[Route]:
    """`key`: what the trainer sends as `Authorization: Bearer`."""

    async def opened(asked: OpenBody, request: Request) -> object:
        session = book.open(asked)
        return {"rollout_id": session.rollout_id, "api_key": session.secret}

    async def listed(asked: NoBody, request: Request) -> object:
        return {"sessions": [_state(session) for session in book.sessions.values()]}

    async def shown(asked: NoBody, request: Request) -> object:
        session = book.find(request.path_params["name"])
        return {**_state(session), "api_key": session.secret}

    async def closed(asked: CloseBody, request: Request) -> object:
        return {"samples": [sample.to_json() for sample in await book.close(request.path_params["name"], asked)]}

    async def paused(asked: PauseBody, request: Request) -> object:
        await book.gateway.pause(asked.mode)
        return {"versions": book.gateway.versions}

    async def resumed(asked: ResumeBody, request: Request) -> object:
        book.gateway.resume(asked.version)
        versions = book.gateway.versions
        await book.gateway.store_versions()
        return {"versions": versions}

    return [
        local_route("POST", "/admin/sessions", opened, key, body=OpenBody),
        local_route("GET", "/admin/sessions", listed, key, body=NoBody),
        local_route("GET", "/admin/sessions/{name}", shown, key, body=NoBody),
        local_route("POST", "/admin/sessions/{name}/close", closed, key, body=CloseBody),
        local_route("POST", "/admin/pause", paused, key, body=PauseBody),
        local_route("POST", "/admin/resume", resumed, key, body=ResumeBody),
    ]


def _not_open(name: str) -> UsageError:
    return UsageError(f"there is no open session {name[:128]!r}")


def _state(session: Session) -> dict[str, Any]:
    return {
        "rollout_id": session.rollout_id,
        "turns": session.turns,
        "prompt_tokens": session.prompt_tokens,
        "sampled_tokens": session.sampled_tokens,
        "limit_reason": session.limit_reason,
        "errors": dict(session.errors),
        "last_error": None if session.last_error is None else str(session.last_error),
    }


def local_route(method: str, path: str, answer: Answer[BodyT], key: str | None, *, body: type[BodyT]) -> Route:
    """JSON in, JSON out, for callers on this machine; everybody else gets the 404 of a path that is not there."""

    async def endpoint(request: Request) -> Response:
        if request.client is None or not ipaddress.ip_address(request.client.host).is_loopback:
            return reply(404, {"error": "no such route"})
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(sent.encode(), key.encode()):
            return reply(401, {"error": "the admin key is wrong"})
        try:
            return reply(200, await answer(read_body(body, await request.body()), request))
        except ClientDisconnect:
            return reply(400, {"error": "the request is not whole"})
        except RollwrightError as error:
            return reply(_status(error), {"error": str(error)})

    return Route(path, endpoint, methods=[method])


def _status(error: RollwrightError) -> int:
    if isinstance(error, NameTaken):
        return 409
    return 400 if isinstance(error, UsageError) else 500


def reply(status: int, value: object) -> Response:
    """A JSON response."""
    return Response(dumps(value), status, media_type="application/json")
