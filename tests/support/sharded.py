"""`rollwright gateway --shards 2` as a process, and a client that uses one connection for the keys of both."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rollwright.gateway.routing import shard_of

Leaving = Literal["close", "reset"]

LONG = "the fix is done. " * 12_000
"""What the policy says to whoever asks for LONG; to all others it says SHORT."""
SHORT = "said"
FILES = 400
"""That each of its processes may have open."""
_LEAST_BUFFER = 4096
_LEAST_SEGMENT = 536
_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Its processes run."""

    pid: int
    """Of the process in front."""
    port: int
    folder: Path
    said: Path
    """What it has written to stderr."""

    def open(self, name: str, shard: int) -> tuple[str, Path]:
        """A session of that shard: its key and its log."""
        rollout = next(f"{name}.{number}" for number in range(1000) if shard_of(f"{name}.{number}", 2) == shard)
        with Wire(self.port) as wire:
            _, told = wire.ask("/admin/sessions", "admin-key", {"rollout_id": rollout}).answer()
        return json.loads(told)["api_key"], self.folder / f"shard-{shard}" / f"{rollout}.turns.log"

    def kill(self, shard: int) -> None:
        """A shard, the hard way."""
        assert self.kill_if_there(shard), f"no process holds logs of shard {shard}"

    def kill_if_there(self, shard: int) -> bool:
        """Whether it was: it may be on its way back from another kill."""
        folder = str(self.folder / f"shard-{shard}")
        for process in _children(self.pid):
            try:
                files = [str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir()]
            except OSError:
                continue
            if any(file.startswith(folder) for file in files):
                os.kill(process, signal.SIGKILL)
                return True
        return False

    def kill_front(self) -> None:
        """The process in front, the hard way; returns when nobody writes the logs any more."""
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: all(_free(log) for log in self.folder.rglob("*.turns.log")))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _free(log: Path) -> bool:
    with log.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def sharded(folder: Path, tokenizer: Path, *, count: int = 2) -> Generator[Sharded]:
    """Start it, with the sessions that are open there; stop it in good order, unless it was killed."""
    script = folder / "script.toml"
    rules = [f"[[script]]\nmatch = {json.dumps(match)}\nreplies = [{json.dumps(reply)}]\n" for match, reply in _SCRIPT]
    script.write_text("".join(rules))
    argv = ["sh", "-c", f'ulimit -Sn {FILES} && exec "$0" "$@"', sys.executable, "-m", "rollwright.cli", "gateway"]
    argv += [f"script={script}", "--engine", "scripted"]
    argv += ["--tokenizer", str(tokenizer), "--renderer", "template", "--max-new-tokens", "150000"]
    argv += ["--port", "0", "--shards", str(count), "--folder", str(folder / "logs")]
    environ = {**os.environ, "ROLLWRIGHT_ADMIN_KEY": "admin-key"}
    said = folder / f"said-{time.monotonic_ns()}"
    with said.open("w") as file, subprocess.Popen(argv, env=environ, stderr=file) as process:
        try:
            until(lambda: process.poll() is not None or said.read_text().endswith("\n"))
            first = said.read_text().splitlines()[0]
            assert first.startswith("http"), first
            yield Sharded(
                pid=process.pid, port=int(first.partition(",")[0].rpartition(":")[2]), folder=folder / "logs", said=said
            )
        finally:
            if process.poll() is None:
                # As service managers do it.
                for pid in [*_children(process.pid), process.pid]:
                    os.kill(pid, signal.SIGTERM)
    assert process.returncode in (0, -signal.SIGKILL), said.read_text()
    assert "Traceback" not in said.read_text(), said.read_text()


_SCRIPT = (("LONG", LONG), ("", SHORT))


class Wire:
    """One connection, and what a client does with it."""

    def __init__(self, port: int, *, narrow: bool = False) -> None:
        """`narrow`: the kernels of both sides hold as little as they can of what is not read."""
        self.sock = socket.socket()
        self.sock.settimeout(_SECONDS)
        if narrow:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LEAST_BUFFER)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _LEAST_SEGMENT)
        self.sock.connect(("127.0.0.1", port))
        self._received = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def ask(self, path: str, key: str, body: object = None, *, padding: int = 0) -> Self:
        """Send a request: a POST when it has a body, with so much white space before it."""
        self.sock.sendall(request_of(path, key, body, padding=padding))
        return self

    def chat(self, key: str, text: str, *, stream: bool = False, padding: int = 0) -> Self:
        """Ask for a turn."""
        body = {"messages": [{"role": "user", "content": text}], "stream": stream}
        return self.ask("/v1/chat/completions", key, body, padding=padding)

    def read(self, size: int) -> bytes:
        """So many bytes of the reply."""
        while len(self._received) < size:
            # No more than is asked for: what is left stays in the kernel, as with a client that reads no further.
            part = self.sock.recv(min(65536, size - len(self._received)))
            if not part:
                raise ConnectionResetError("the gateway closed the connection")
            self._received += part
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def raw(self) -> bytes:
        """A whole reply, with its head."""
        head = self._until(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
        parts = [head]
        if b"content-length" in fields:
            return head + self.read(int(fields[b"content-length"]))
        while parts[-1] != b"0\r\n":
            parts.append(self._until(b"\r\n"))
            if parts[-1] != b"0\r\n":
                parts.append(self.read(int(parts[-1], 16) + 2))
        return b"".join([*parts, self.read(2)])

    def answer(self) -> tuple[int, bytes]:
        """Status and body of a whole reply, which is no stream."""
        head, _, body = self.raw().partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body

    def _until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            data += self.read(1)
        return data

    def leave(self, how: Leaving) -> None:
        """Without a word more."""
        if how == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def request_of(path: str, key: str, body: object = None, *, padding: int = 0) -> bytes:
    """The bytes of one."""
    data = b"" if body is None else b" " * padding + json.dumps(body).encode()
    verb = "GET" if body is None else "POST"
    head = f"{verb} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def logged(log: Path, *kinds: str) -> list[dict[str, Any]]:
    """The whole lines of these kinds, in order."""
    lines = log.read_bytes().rpartition(b"\n")[0].splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] in kinds]


def until(true: Callable[[], object]) -> None:
    """Wait for what another process does."""
    end = time.monotonic() + _SECONDS
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)  # noqa: TID251 - no event tells that a file has grown
