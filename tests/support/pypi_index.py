"""A loopback package index for the user's own pip: wheels are made in memory, faults are switched on."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def wheel(name: str, files: dict[str, bytes]) -> bytes:
    """A wheel called `name` (`toy-1.0-py3-none-any.whl`) with `files`; equal files give equal bytes."""
    project, version = name.split("-")[:2]
    info = f"{project}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode()
    tag = "-".join(name.removesuffix(".whl").split("-")[2:])
    about = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    meta = {f"{info}/METADATA": metadata, f"{info}/WHEEL": about, f"{info}/RECORD": b""}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, content in {**files, **meta}.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return out.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(kw_only=True)
class Index:
    """`wheels`: file name -> content. Requests for wheels meet `faults` first, one each."""

    url: str = ""
    wheels: dict[str, bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """`503`, `cut` (half the bytes, then the connection breaks)."""
    downloads: int = 0


@contextmanager
def serve_index() -> Iterator[Index]:
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            last = self.path.rstrip("/").rpartition("/")[2]
            if last in index.wheels:
                self._wheel(index.wheels[last])
                return
            found = [name for name in index.wheels if name.split("-")[0].replace("_", "-") == last]
            links = "".join(f'<a href="{index.url}/files/{name}">{name}</a>' for name in found)
            page = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            self._send(200 if found else 404, page, "text/html")

        def _wheel(self, data: bytes) -> None:
            index.downloads += 1
            fault = index.faults.pop(0) if index.faults else ""
            if fault == "503":
                self._send(503, b"", "text/plain")
            elif fault == "cut":
                self._send(200, data[: len(data) // 2], "application/zip", length=len(data))
                self.close_connection = True
            else:
                self._send(200, data, "application/zip")

        def _send(self, status: int, body: bytes, kind: str, *, length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        index.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield index
        finally:
            http.shutdown()
            thread.join()
