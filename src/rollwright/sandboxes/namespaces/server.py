"""The small single-threaded process that boots boxes and enters them, one for each provider.

It exists because namespaces and parent-death signals belong to threads: forks of a lean process that never runs a
second thread are fast and predictable, the orchestrator is neither. It ends with the orchestrator, and every box
ends with it: each init has it as parent (death signal) and holds a socket to it (end of file).
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from rollwright.sandboxes.namespaces import boot, channel, enter, syscalls


@dataclass(slots=True)
class _Box:
    id: str
    control: socket.socket
    reply: socket.socket
    expires: float
    """CLOCK_BOOTTIME, seconds."""
    booter: int
    """Pid of the fork that makes the namespaces, until it ended."""
    pid: int = 0
    pidfd: int = -1
    ready: list[int] | None = None
    """The descriptors that came with init's `ready`."""
    told: bool = False


class Server:
    """The event loop and its table of boxes."""

    def __init__(self, listener: socket.socket, orchestrator: int) -> None:
        self._listener = listener
        self._boxes: dict[str, _Box] = {}
        self._orchestrator = os.pidfd_open(orchestrator)
        self._wake = boot.child_wakeups()
        self._selector = selectors.DefaultSelector()
        for key in (listener, self._orchestrator, self._wake):
            self._selector.register(key, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serve until the orchestrator is gone, then end every box."""
        while True:
            events = self._selector.select(self._seconds_to_expiry())
            for key, _ in events:
                if key.fileobj is self._orchestrator:
                    self._end_all()
                    return
                if key.fileobj is self._wake:
                    boot.drain(self._wake)
                elif isinstance(key.data, _Box):
                    self._hear(key.data)
                elif not self._accept():
                    self._end_all()
                    return
            self._collect()
            self._expire()

    def _seconds_to_expiry(self) -> float | None:
        if not self._boxes:
            return None
        return max(0.0, min(box.expires for box in self._boxes.values()) - _now())

    def _expire(self) -> None:
        for box in [box for box in self._boxes.values() if box.expires <= _now()]:
            self._end(box)

    def _end_all(self) -> None:
        for box in list(self._boxes.values()):
            self._end(box)

    def _end(self, box: _Box) -> None:
        del self._boxes[box.id]
        self._selector.unregister(box.control)
        if box.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)
            os.close(box.pidfd)
        elif box.booter:
            os.kill(box.booter, signal.SIGKILL)
        for fd in box.ready or []:
            os.close(fd)
        box.control.close()
        box.reply.close()

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for box in self._boxes.values():
                    if box.booter == pid:
                        box.booter = 0
                        self._acknowledge(box)

    # ------------------------------------------------------------------ requests

    def _accept(self) -> bool:
        """Take one request. Its first descriptor is the socket for the answer."""
        received = channel.receive(self._listener)
        if received is None:
            return False
        request, fds = received
        reply = socket.socket(fileno=fds.pop(0))
        try:
            match request["op"]:
                case "create":
                    self._create(request, reply)
                    return True
                case "renew":
                    box = self._boxes.get(request["box"])
                    if box is not None:
                        box.expires = request["expires"]
                    channel.send(reply, {"ok": True} if box else {"gone": True})
                case "end":
                    if request["box"] in self._boxes:
                        self._end(self._boxes[request["box"]])
                    channel.send(reply, {"ok": True})
                case _:
                    self._enter(request, fds, reply)
        except OSError as e:
            with contextlib.suppress(OSError):
                channel.send(reply, {"error": "EIO", "text": str(e)})
        finally:
            for fd in fds:
                os.close(fd)
        reply.close()
        return True

    def _create(self, request: dict[str, Any], reply: socket.socket) -> None:
        control, theirs = channel.pair()
        pid = os.fork()
        if pid == 0:
            _leave_loop()
            boot.boot(request, theirs)
        theirs.close()
        box = _Box(id=request["id"], control=control, reply=reply, expires=request["expires"], booter=pid)
        self._boxes[box.id] = box
        self._selector.register(control, selectors.EVENT_READ, box)

    def _enter(self, request: dict[str, Any], fds: list[int], reply: socket.socket) -> None:
        box = self._boxes.get(request["box"])
        if box is None:
            channel.send(reply, {"gone": True})
        elif os.fork() == 0:
            _leave_loop()
            enter.serve(request, box.pidfd, fds, reply)

    # ------------------------------------------------------------------ boxes

    def _hear(self, box: _Box) -> None:
        if box.id not in self._boxes:
            return
        try:
            received = channel.receive(box.control)
        except OSError:
            received = None
        if received is None:
            # While its first fork lives, the end of the socket may just be the order of things.
            self._end(box)
            return
        message, fds = received
        if "error" in message:
            with contextlib.suppress(OSError):
                channel.send(box.reply, message)
            self._end(box)
        elif "pid" in message:
            try:
                box.pid, box.pidfd = message["pid"], os.pidfd_open(message["pid"])
            except ProcessLookupError:
                self._end(box)
        elif "ready" in message:
            box.ready = fds
        elif "armed" in message:
            self._tell(box)
            return
        self._acknowledge(box)

    def _acknowledge(self, box: _Box) -> None:
        """When init is up and has become our child, let it tie its life to ours."""
        if box.id in self._boxes and box.pid and box.ready is not None and not box.booter and not box.told:
            box.told = True
            # A dead init is noticed at the end of its socket.
            with contextlib.suppress(OSError):
                channel.send(box.control, {"go": True})

    def _tell(self, box: _Box) -> None:
        fds = box.ready or []
        with contextlib.suppress(OSError):
            channel.send(box.reply, {"ok": True, "pid": box.pid}, (box.pidfd, *fds))
        for fd in fds:
            os.close(fd)
        box.ready = []
        box.reply.close()


def _leave_loop() -> None:
    """In a fork: forget the parent's way of hearing about children."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    """Entry point of the server process: descriptor 0 is the request socket, argv[1] the orchestrator's pid."""
    os.setsid()
    os.umask(0o022)
    orchestrator = int(sys.argv[1])
    listener = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    syscalls.become_subreaper()
    syscalls.set_title(f"box-server {orchestrator}")
    server = Server(listener, orchestrator)
    gc.collect()
    gc.freeze()
    gc.disable()
    server.run()
