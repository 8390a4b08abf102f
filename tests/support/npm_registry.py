"""A loopback npm registry for the user's own npm: packages are made in memory, faults are switched on."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


def tarball(files: dict[str, bytes], *, top: str = "package", executable: str = "") -> bytes:
    """A gzipped tar of `files` below `top`; equal files give equal bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content)
            member.mode = 0o755 if name == executable else 0o644
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(out.getvalue(), mtime=0)


def sha512(data: bytes) -> str:
    return base64.b64encode(hashlib.sha512(data).digest()).decode()


@dataclass(kw_only=True)
class Registry:
    """`packages`: (name, version) → tarball. Requests for tarballs meet `faults` first, one each."""

    url: str = ""
    packages: dict[tuple[str, str], bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """`503`, `cut` (half the bytes, then the connection breaks), `hang` (half the bytes, then nothing)."""
    downloads: int = 0
    hanging: threading.Event = field(default_factory=threading.Event)
    """Set when a download hangs."""
    release: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serve_registry() -> Iterator[Registry]:
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(self.path).removeprefix("/")
            if path.endswith(".tgz"):
                name, version = path.removesuffix(".tgz").rsplit("/-/", 1)
                self._tarball(registry.packages[name, version])
            else:
                self._packument(path)

        def _packument(self, name: str) -> None:
            versions = {
                version: {
                    "name": name,
                    "version": version,
                    "dist": {
                        "tarball": f"{registry.url}/{name}/-/{version}.tgz",
                        "integrity": f"sha512-{sha512(data)}",
                    },
                }
                for (known, version), data in registry.packages.items()
                if known == name
            }
            if not versions:
                self._send(404, b"{}")
                return
            document = {"name": name, "dist-tags": {"latest": min(versions)}, "versions": versions}
            self._send(200, json.dumps(document).encode())

        def _tarball(self, data: bytes) -> None:
            registry.downloads += 1
            fault = registry.faults.pop(0) if registry.faults else ""
            if fault == "503":
                self._send(503, b"")
            elif fault:
                self._send(200, data[: len(data) // 2], length=len(data))
                if fault == "hang":
                    registry.hanging.set()
                    registry.release.wait(30)
                self.close_connection = True
            else:
                self._send(200, data)

        def _send(self, status: int, body: bytes, *, length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        registry.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield registry
        finally:
            registry.release.set()
            http.shutdown()
            thread.join()
