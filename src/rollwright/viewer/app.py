"""The pages over HTTP: a secret in the path, one host name, no way to change anything, nothing from elsewhere."""

from __future__ import annotations

import hmac
import mimetypes
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import anyio
import anyio.to_thread
from starlette.types import Receive, Scope, Send

from rollwright.errors import RollwrightError
from rollwright.viewer.pages import NotFound, Pages
from rollwright.viewer.pages.site import STATIC, STATIC_FILES

__all__ = ["App"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_HOST = re.compile(rb"(?:127\.0\.0\.1|localhost)(?::[0-9]{1,5})?", re.IGNORECASE)
_LOOK_SECONDS = 0.5
"""How often a followed run folder is looked at."""
_QUIET_SECONDS = 15.0
"""After which a comment keeps the connection of a follower alive."""
_PIECE = 256 << 10
_MOST_QUERY = 8192


class App:
    """An ASGI app. `token`: the first part of every path."""

    def __init__(self, pages: Pages, *, token: str) -> None:
        self._pages = pages
        self._token = token.encode()
        self._threads: anyio.CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(4)
        reply = _Reply(send, head=scope["method"] == "HEAD")
        if scope["method"] not in ("GET", "HEAD"):
            await reply.text(405, "This viewer only shows.", {"allow": "GET, HEAD"})
            return
        # A page of another site that has its name point here must not read anything.
        if not _is_ours(scope):
            await reply.text(421, "This viewer answers only to the address it printed.")
            return
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        first, *rest = raw.split(b"?")[0].lstrip(b"/").split(b"/")
        if not hmac.compare_digest(first, self._token):
            await reply.text(403, "Open the address that `rollwright view` printed: it has a token in it.")
            return
        if not rest:
            await reply.redirect(f"/{self._token.decode()}/")
            return
        parts = tuple(unquote(part.decode("latin-1"), errors="replace") for part in rest)
        await self._route(parts, _query(scope), reply, receive)

    async def _route(self, parts: tuple[str, ...], query: Mapping[str, str], reply: _Reply, receive: Receive) -> None:
        *folder, name = parts
        if parts[0] == "static" and len(parts) == 2:
            await self._static(name, reply)
        elif name == "events":
            await self._events(tuple(folder), query.get("state", ""), reply, receive)
        elif name == "":
            await self._page(tuple(folder), query, reply)
        else:
            await self._file(parts, reply)

    async def _page(self, parts: tuple[str, ...], query: Mapping[str, str], reply: _Reply) -> None:
        try:
            html = await self._thread(self._pages.html, parts, query)
            status = 200
        except NotFound as error:
            html, status = await self._thread(self._pages.error, (), str(error)), 404
        except (RollwrightError, OSError) as error:  # a run folder that is taken away under us
            html, status = await self._thread(self._pages.error, (), str(error)), 500
        await reply.whole(status, html.encode(), "text/html; charset=utf-8")

    async def _file(self, parts: tuple[str, ...], reply: _Reply) -> None:
        try:
            path = await self._thread(self._pages.file, parts)
            await reply.file(path)
        except (NotFound, OSError):
            await reply.text(404, "There is no such file.")

    async def _static(self, name: str, reply: _Reply) -> None:
        if name not in STATIC_FILES:
            await reply.text(404, "There is no such file.")
            return
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        await reply.whole(200, await anyio.Path(STATIC / name).read_bytes(), f"{kind}; charset=utf-8")

    async def _events(self, parts: tuple[str, ...], known: str, reply: _Reply, receive: Receive) -> None:
        """Say whenever the page at `parts` may look different from `known`, until the client goes."""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        await reply.start(200, {"content-type": "text/event-stream"})
        async with anyio.create_task_group() as group:
            group.start_soon(gone)
            quiet = 0.0
            await reply.piece(b": following\n\n")
            while True:
                state = await self._thread(self._pages.state, parts)
                if state != known:
                    known, quiet = state, 0.0
                    await reply.piece(f"data: {state}\n\n".encode())
                elif quiet >= _QUIET_SECONDS:
                    quiet = 0.0
                    await reply.piece(b":\n\n")
                await anyio.sleep(_LOOK_SECONDS)
                quiet += _LOOK_SECONDS

    async def _thread(self, function: Any, *args: Any) -> Any:
        """A page reads files and SQLite: it must not hold up the others."""
        return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)


class _Reply:
    """One response."""

    def __init__(self, send: Send, *, head: bool) -> None:
        self._send = send
        self._head = head

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        listed = [(name.encode(), value.encode("latin-1")) for name, value in {**_HEADERS, **headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def piece(self, data: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": b"" if self._head else data, "more_body": not last})

    async def whole(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        await self.start(status, {"content-type": kind, "content-length": str(len(body)), **(headers or {})})
        await self.piece(body, last=True)

    async def text(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        await self.whole(status, text.encode() + b"\n", "text/plain; charset=utf-8", headers)

    async def redirect(self, place: str) -> None:
        await self.whole(307, b"", "text/plain; charset=utf-8", {"location": place})

    async def file(self, path: Path) -> None:
        """As text, whatever it claims to be. Raises `OSError` before anything was sent."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{path} is no file")
            await self.start(
                200,
                {"content-type": "text/plain; charset=utf-8", "content-security-policy": "default-src 'none'; sandbox"},
            )
            for piece in _pieces(file):
                if self._head:
                    break
                await self.piece(piece)
        await self.piece(b"", last=True)


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def _is_ours(scope: Scope) -> bool:
    """Whether the Host header names this machine. Its port may be another one: that of a tunnel."""
    found = [value for name, value in scope["headers"] if name == b"host"]
    return len(found) == 1 and _HOST.fullmatch(found[0]) is not None


def _query(scope: Scope) -> dict[str, str]:
    text = scope["query_string"][:_MOST_QUERY].decode("latin-1")
    return dict(parse_qsl(text, encoding="utf-8", errors="replace", max_num_fields=50)) if text.count("&") < 50 else {}
