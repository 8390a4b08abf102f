"""The routes: E2B's control API, and envd's API of every box, on one address."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import math
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import parse_qsl, unquote

import anyio
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollwright.e2b_server import files
from rollwright.e2b_server.boxes import ApiError, Box, Boxes
from rollwright.e2b_server.connect import STATUS, Code, RpcError, encode_end, encode_event, read_frame, read_message
from rollwright.e2b_server.files import HttpError
from rollwright.e2b_server.processes import Command, Event
from rollwright.errors import RollwrightError, SandboxGone

__all__ = ["build_app"]

log = logging.getLogger(__name__)

_PORT = "49983"
_PAGE = 100
_GONE = "The sandbox was not found"
"""The SDK looks for these words in a 502 to tell a dead box from a broken way to it."""


def build_app(boxes: Boxes, *, api_key: str) -> Starlette:
    control, envd = _Control(boxes, api_key), _Envd(boxes)
    return Starlette(
        routes=[
            Route("/v2/sandboxes", control.create, methods=["POST"]),
            Route("/sandboxes", control.create, methods=["POST"]),
            Route("/v2/sandboxes", control.list, methods=["GET"]),
            Route("/sandboxes/{id}", control.get, methods=["GET"]),
            Route("/sandboxes/{id}", control.kill, methods=["DELETE"]),
            Route("/sandboxes/{id}/timeout", control.set_timeout, methods=["POST"]),
            Route("/v2/sandboxes/{id}/connect", control.connect, methods=["POST"]),
            Route("/templates/aliases/{name:path}", control.template, methods=["GET"]),
            Route("/health", envd.health, methods=["GET"]),
            Route("/files", envd.download, methods=["GET"]),
            Route("/files", envd.upload, methods=["POST"]),
            Route("/process.Process/{method}", envd.process, methods=["POST"]),
            Route("/filesystem.Filesystem/{method}", envd.filesystem, methods=["POST"]),
            Route("/{rest:path}", control.unsupported, methods=["POST", "PUT"]),
        ],
        exception_handlers={
            ApiError: _api_error,
            HttpError: _api_error,
            RpcError: _rpc_error,
            SandboxGone: _gone,
            RollwrightError: _our_error,
            ClientDisconnect: _client_left,
        },
    )


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")


def _failed(status: int, message: str) -> Response:
    return _json({"code": status, "message": message}, status)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, (ApiError, HttpError))
    return _failed(error.status, error.message)


async def _rpc_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RpcError)
    return _json(error.json(), STATUS[error.code])


async def _gone(request: Request, error: Exception) -> Response:
    return _failed(502, _GONE)


async def _our_error(request: Request, error: Exception) -> Response:
    log.warning("%s %s: %s", request.method, request.url.path, error)
    return _failed(500, str(error))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _body(request: Request) -> dict[str, Any]:
    try:
        return read_message(await request.body() or b"{}")
    except RpcError as e:
        raise ApiError(400, e.message) from e


class _Control:
    """E2B's REST API."""

    def __init__(self, boxes: Boxes, api_key: str) -> None:
        self._boxes = boxes
        self._key = api_key.encode()

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("x-api-key", "").encode()
        if not hmac.compare_digest(given, self._key):
            raise ApiError(401, "unknown API key")

    def _box(self, request: Request) -> Box:
        self._authorize(request)
        box = self._boxes.find(request.path_params["id"])
        if box is None:
            raise ApiError(404, f"sandbox {request.path_params['id']} was not found")
        return box

    async def create(self, request: Request) -> Response:
        self._authorize(request)
        key = request.headers.get("idempotency-key")
        return _json(await self._boxes.create(await _body(request), key=key), 201)

    async def list(self, request: Request) -> Response:
        self._authorize(request)
        query = request.query_params
        wanted = {unquote(k): unquote(v) for k, v in parse_qsl(query.get("metadata", ""))}
        found = [box for box in self._boxes.all() if wanted.items() <= dict(box.metadata).items()]
        if "state" in query and "running" not in ",".join(query.getlist("state")):
            found = []
        start = next((i + 1 for i, box in enumerate(found) if box.id == query.get("nextToken")), 0)
        limit = query.get("limit", "")
        end = start + (int(limit) if limit.isdecimal() and int(limit) else _PAGE)
        headers = {"x-next-token": found[end - 1].id} if end < len(found) else {}
        return _json([box.described() for box in found[start:end]], headers=headers)

    async def get(self, request: Request) -> Response:
        box = self._box(request)
        return _json(box.described() | {"envdAccessToken": box.token})

    async def kill(self, request: Request) -> Response:
        await self._boxes.kill(self._box(request))
        return Response(status_code=204)

    async def set_timeout(self, request: Request) -> Response:
        box = self._box(request)
        await self._boxes.set_timeout(box, (await _body(request)).get("timeout"))
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        box = self._box(request)
        seconds = (await _body(request)).get("timeout")
        if seconds is not None:
            await self._boxes.set_timeout(box, seconds, only_longer=True)
        return _json(box.created())

    async def template(self, request: Request) -> Response:
        self._authorize(request)
        name = request.path_params["name"]
        if not await self._boxes.has_template(name):
            raise ApiError(404, f"template {name} was not found")
        return _json({"templateID": name, "public": False})

    async def unsupported(self, request: Request) -> Response:
        self._authorize(request)
        raise ApiError(501, f"{request.url.path} is not supported by this server")


class _Envd:
    """What runs at port 49983 of every E2B box."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes

    def _box(self, request: Request) -> Box:
        id = request.headers.get("e2b-sandbox-id")
        if id is None:
            id = request.headers.get("host", "").removeprefix(f"{_PORT}-").partition(".")[0]
        box = self._boxes.find(id)
        if box is None:
            raise SandboxGone(f"no box {id}")
        if not hmac.compare_digest(request.headers.get("x-access-token", "").encode(), box.token.encode()):
            raise RpcError("unauthenticated", "unknown access token")
        return box

    async def health(self, request: Request) -> Response:
        self._box(request)
        return Response(status_code=204)

    async def download(self, request: Request) -> Response:
        box = self._box(request)
        path = request.query_params.get("path", "")
        return await files.download(box.sandbox, path, _user(request.query_params.get("username")))

    async def upload(self, request: Request) -> Response:
        box = self._box(request)
        user = _user(request.query_params.get("username"))
        return _json(await files.upload(box.sandbox, request, user))

    async def filesystem(self, request: Request) -> Response:
        box = self._box(request)
        message = read_message(await request.body())
        user = _user(_basic_user(request))
        return _json(await files.filesystem(box.sandbox, request.path_params["method"], message, user))

    async def process(self, request: Request) -> Response:
        box = self._box(request)
        body = await request.body()
        match request.path_params["method"]:
            case "Start":
                return await self._start(box, request, body)
            case "Connect":
                return await self._connect(box, request, body)
            case "List":
                return _json({"processes": [process.info() for process in box.processes.running()]})
            case "SendSignal":
                message = read_message(body)
                await box.processes.find(message.get("process")).signal(message.get("signal"))
            case "SendInput":
                message = read_message(body)
                process = box.processes.find(message.get("process"))
                await process.type(_bytes(_object(message, "input").get("stdin")))
            case "CloseStdin":
                await box.processes.find(read_message(body).get("process")).close_stdin()
            case method:
                raise RpcError("unimplemented", f"process.Process/{method} is not supported by this server")
        return _json({})

    async def _start(self, box: Box, request: Request, body: bytes) -> Response:
        seconds = _stream_seconds(request)
        try:
            command = _command(read_frame(body), _user(_basic_user(request)), seconds)
            events = await box.processes.start(command)
        except RpcError as e:
            return _StreamError(e)
        return _EventStream(events, _keepalive_seconds(request), seconds)

    async def _connect(self, box: Box, request: Request, body: bytes) -> Response:
        try:
            events = box.processes.find(read_frame(body).get("process")).listen()
        except RpcError as e:
            return _StreamError(e)
        return _EventStream(events, _keepalive_seconds(request), _stream_seconds(request))


def _user(name: str | None) -> str:
    """`user` is what E2B calls the ordinary user, who is also the default."""
    if name in (None, "", "user", "agent"):
        return "agent"
    if name == "root":
        return name
    raise RpcError("unauthenticated", f"invalid username: {name!r}")


def _basic_user(request: Request) -> str | None:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme != "Basic":
        return None
    return _bytes(value).decode(errors="replace").partition(":")[0]


def _bytes(value: object) -> bytes:
    try:
        return base64.b64decode(value if isinstance(value, str) else "", validate=True)
    except binascii.Error as e:
        raise RpcError("invalid_argument", f"not base64: {e}") from e


def _stream_seconds(request: Request) -> float | None:
    value = request.headers.get("connect-timeout-ms", "")
    return int(value) / 1000 if value.isdecimal() and int(value) else None


def _keepalive_seconds(request: Request) -> float:
    value = request.headers.get("keepalive-ping-interval", "")
    return int(value) if value.isdecimal() and int(value) else 90


def _object(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value: object = message.get(name) or {}
    if not isinstance(value, dict):
        raise RpcError("invalid_argument", f"{name} must be an object")
    return cast("dict[str, Any]", value)


def _command(message: Mapping[str, Any], user: str, seconds: float | None) -> Command:
    process = _object(message, "process")
    env = _object(process, "envs")
    args: list[Any] = process.get("args") or []
    argv: tuple[Any, ...] = (process.get("cmd"), *args)
    if message.get("pty"):
        raise RpcError("unimplemented", "this server has no pseudo-terminals")
    if not argv[0] or not all(isinstance(text, str) for text in (*argv, *env, *env.values())):
        raise RpcError("invalid_argument", "process needs a cmd, args and envs of text")
    return Command(
        argv=argv,
        env=env,
        cwd=process.get("cwd") or files.home_of(user),
        user=user,
        # A client that says nothing of it means the older protocol, where stdin was always open.
        stdin=message.get("stdin", True) is not False,
        tag=message.get("tag"),
        seconds=seconds,
    )


class _StreamError(Response):
    """A server stream that failed before its first event."""

    media_type = "application/connect+json"

    def __init__(self, error: RpcError) -> None:
        super().__init__(encode_end(error))


class _EventStream(Response):
    """A server stream of a process's events. When the client leaves, the process stays."""

    def __init__(self, events: MemoryObjectReceiveStream[Event], keepalive: float, seconds: float | None) -> None:
        super().__init__(media_type="application/connect+json")
        del self.headers["content-length"]
        self._events = events
        self._keepalive = keepalive
        self._seconds = math.inf if seconds is None else seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                last = encode_end()
                try:
                    with anyio.fail_after(self._seconds):
                        while (event := await self._next()) is not None:
                            await send(_chunk(encode_event(dict(event))))
                except TimeoutError:
                    code: Code = "deadline_exceeded"
                    last = encode_end(RpcError(code, "the stream was open for as long as its timeout allows"))
                await send(_chunk(last, more=False))
                tasks.cancel_scope.cancel()

    async def _next(self) -> Event | None:
        with anyio.move_on_after(self._keepalive):
            try:
                return await self._events.receive()
            except anyio.EndOfStream:
                return None
        return {"keepalive": {}}


def _chunk(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
