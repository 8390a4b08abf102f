"""Admin routes of a gateway that serves alone: sessions opened, watched and closed, weight updates; loopback only."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollwright.dialects.jsonio import dumps, loads
from rollwright.errors import RollwrightError, UsageError
from rollwright.gateway.gate import PauseMode
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import Session
from rollwright.gateway.traffic import TRAINED, trained_classes
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.types import HistoryPolicy, Sample

__all__ = ["SessionBook", "admin_routes", "local_route", "reply"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What a rollout may be called: its log is a file of that name."""


class SessionBook:
    """The open sessions by rollout, and where their logs are."""

    def __init__(
        self, gateway: Gateway, folder: Path | None, limits: SessionLimits, *, secret_prefix: str = ""
    ) -> None:
        """`folder`: for the turn logs; None keeps none. `limits`: of sessions that name no own ones. `secret_prefix`:
        how the keys of new sessions begin."""
        self.gateway = gateway
        self.sessions: dict[str, Session] = {}
        self._folder = folder
        self._limits = limits
        self._secret_prefix = secret_prefix

    def reopen(self) -> None:
        """Take up the sessions of a gateway that was killed. Raises `StoreError`."""
        for session in [] if self._folder is None else self.gateway.reopen_all(self._folder):
            self.sessions[session.rollout_id] = session

    def open(self, asked: Mapping[str, Any]) -> Session:
        """Raises `UsageError` naming the field, `StoreError`."""
        name = asked.get("rollout_id")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError("rollout_id: letters, digits, dot, dash and underscore, at most 128")
        if name in self.sessions:
            raise UsageError(f"rollout_id: {name} is open already")
        seed = asked.get("seed")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise UsageError("seed: must be a whole number")
        history = asked.get("history", "exact")
        if history not in get_args(HistoryPolicy):
            raise UsageError(f"history: one of {', '.join(get_args(HistoryPolicy))}")
        try:
            limits = _limits(asked["limits"]) if "limits" in asked else self._limits
            trained = trained_classes(asked["trained"]) if "trained" in asked else TRAINED
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        session = self.gateway.open(
            name,
            log=None if self._folder is None else self._log(name),
            limits=limits,
            seed=seed,
            secret=self._secret_prefix + secrets.token_urlsafe(32),
            history=history,
            trained=trained,
            one_program=bool(asked.get("one_program", False)),
        )
        self.sessions[name] = session
        return session

    def find(self, name: str) -> Session:
        """Raises `UsageError`."""
        if name not in self.sessions:
            raise _not_open(name)
        return self.sessions[name]

    async def close(self, name: str, asked: Mapping[str, Any]) -> list[Sample]:
        """Seal the session and make its samples; the same again for a caller whose answer was lost, where there are
        logs. Raises `UsageError`, with the session as it was, and `StoreError`."""
        make = _asked_samples(name, asked)
        session = self.sessions.get(name)
        if session is not None:
            trajectory = await session.close()
            self.sessions.pop(name, None)
        else:
            trajectory = await anyio.to_thread.run_sync(self._closed, name)
        return await anyio.to_thread.run_sync(make, trajectory)

    def _closed(self, name: str) -> Trajectory:
        """Of a session that was closed before. Raises `UsageError`, `StoreError`."""
        if self._folder is not None and _NAME.fullmatch(name) and (log := self._log(name)).is_file():
            logged = read_turn_log(log)
            if logged.sealed:
                return logged.trajectory
        raise _not_open(name)

    def _log(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.turns.log"


Answer = Callable[[Mapping[str, Any], Request], Awaitable[object]]


def admin_routes(book: SessionBook, key: str) -> list[Route]:
    """`key`: what the trainer sends as `Authorization: Bearer`."""

    async def opened(asked: Mapping[str, Any], request: Request) -> object:
        session = book.open(asked)
        return {"rollout_id": session.rollout_id, "api_key": session.secret}

    async def listed(asked: Mapping[str, Any], request: Request) -> object:
        return {"sessions": [_state(session) for session in book.sessions.values()]}

    async def shown(asked: Mapping[str, Any], request: Request) -> object:
        return _state(book.find(request.path_params["name"]))

    async def closed(asked: Mapping[str, Any], request: Request) -> object:
        return {"samples": [sample.to_json() for sample in await book.close(request.path_params["name"], asked)]}

    async def paused(asked: Mapping[str, Any], request: Request) -> object:
        mode = asked.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise UsageError(f"mode: one of {', '.join(get_args(PauseMode))}")
        await book.gateway.pause(mode)
        return {"versions": book.gateway.versions}

    async def resumed(asked: Mapping[str, Any], request: Request) -> object:
        version = asked.get("version")
        book.gateway.resume(None if version is None else str(version))
        return {"versions": book.gateway.versions}

    return [
        local_route("POST", "/admin/sessions", opened, key),
        local_route("GET", "/admin/sessions", listed, key),
        local_route("GET", "/admin/sessions/{name}", shown, key),
        local_route("POST", "/admin/sessions/{name}/close", closed, key),
        local_route("POST", "/admin/pause", paused, key),
        local_route("POST", "/admin/resume", resumed, key),
    ]


def _limits(asked: Mapping[str, Any]) -> SessionLimits:
    """Raises `TypeError`, `ValueError`."""
    for name, value in asked.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"limits.{name}: must be a number")
    return SessionLimits(**asked)


def _asked_samples(name: str, asked: Mapping[str, Any]) -> Callable[[Trajectory], list[Sample]]:
    """Raises `UsageError` naming the field."""
    reward, most, accepted = (asked.get(field) for field in ("reward", "max_sample_tokens", "accepted_versions"))
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise UsageError("reward: must be a number")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise UsageError("max_sample_tokens: must be a number of tokens")
    versions = cast("list[Any] | None", accepted)
    if versions is not None and not (
        isinstance(accepted, list) and all(isinstance(version, str) for version in versions)
    ):
        raise UsageError("accepted_versions: must be a list of versions")
    return partial(
        build_samples,
        task_id=str(asked.get("task_id", name)),
        group_id=str(asked.get("group_id", name)),
        rollout_id=name,
        reward=None if reward is None else float(reward),
        trainable=reward is not None,
        counts_in_baseline=reward is not None,
        max_sample_tokens=most,
        accepted_versions=versions,
    )


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


def local_route(method: str, path: str, answer: Answer, key: str | None) -> Route:
    """JSON in, JSON out, for callers on this machine; everybody else gets the 404 of a path that is not there."""

    async def endpoint(request: Request) -> Response:
        if request.client is None or not ipaddress.ip_address(request.client.host).is_loopback:
            return reply(404, {"error": "no such route"})
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(sent.encode(), key.encode()):
            return reply(401, {"error": "the admin key is wrong"})
        try:
            body = await request.body()
            asked: Any = loads(body) if body else {}
            if not isinstance(asked, dict):
                raise UsageError("the body must be an object")
            # A KeyError is a field that is missing.
            return reply(200, await answer(cast("dict[str, Any]", asked), request))
        except (ValueError, LookupError) as error:
            return reply(400, {"error": f"the body is not usable: {error}"})
        except RollwrightError as error:
            return reply(400 if isinstance(error, UsageError) else 500, {"error": str(error)})

    return Route(path, endpoint, methods=[method])


def reply(status: int, value: object) -> Response:
    """A JSON response."""
    return Response(dumps(value), status, media_type="application/json")
