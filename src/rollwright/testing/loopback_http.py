"""What the loopback servers share: an app on a free port in this event loop, and replies that break on purpose."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from typing import Any

import anyio
import orjson
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollwright.engines import Generation
from rollwright.messages import Message
from rollwright.tokens import Renderer
from rollwright.types import VersionSpan

__all__ = ["HalfResponse", "json_response", "serving", "spans_as_told", "tokens_of", "until_disconnect"]


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncGenerator[str]:
    """Serve `app` on a free port of 127.0.0.1 until the block ends; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        logging.getLogger("uvicorn.error").disabled = True
        server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                server.force_exit = True


async def until_disconnect(
    request: Request, work: Callable[[], Awaitable[Generation]], left: Callable[[], object]
) -> Generation | None:
    """Do `work`; when the caller leaves, cancel it, call `left` and return None."""
    generation: Generation | None = None
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        generation = await work()
        tasks.cancel_scope.cancel()
    return generation


class HalfResponse(Response):
    """Promises the whole body, sends half of it and closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body = bytes(self.body)
        await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
        raise ConnectionAbortedError("the connection is dropped, as asked for")


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def spans_as_told(versions: tuple[VersionSpan, ...]) -> list[dict[str, Any]]:
    """`weight_versions` as SGLang and vLLM write them."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in versions]


def tokens_of(body: Mapping[str, Any], renderer: Renderer) -> list[int]:
    """What their tokenize routes answer: of a text, or of messages by the server's own template."""
    if "messages" not in body:
        return renderer.encode(body["prompt"])
    return renderer.render([Message(role=m["role"], content=m["content"]) for m in body["messages"]], ())


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Ctrl-C belongs to the process that runs the test."""
        yield
