"""The small single-threaded process that boots boxes and enters them, one for each provider.

It exists because namespaces and parent-death signals belong to threads: forks of a lean process that never runs a
second thread are fast and predictable, the orchestrator is neither. It ends with the orchestrator, and every box
ends with it: each init has it as parent (death signal) and holds a socket to it (end of file).

Started to survive, it keeps the boxes of a dead orchestrator for some seconds, in which another process may come in by
the door (a socket in the file system) and attach to them; it ends when there is neither a box nor anybody to serve.
"""

# Plain `os` calls: this runs in a lean process, which does not load pathlib.
# ruff: noqa: PTH104, PTH106, PTH108, PTH120, PTH123

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

from rollwright.sandboxes.namespaces import boot, channel, enter, syscalls

_PATIENCE = 500
"""Looks at a cgroup that is not empty yet, a hundredth of a second apart."""


@dataclass(slots=True)
class _Box:
    id: str
    control: socket.socket
    reply: socket.socket
    owner: _Channel | None
    """Who asked for it. None: it waits for another."""
    expires: float
    """CLOCK_BOOTTIME, seconds."""
    record: str
    cgroups: list[str]
    survives: bool
    booter: int
    """Pid of the fork that makes the namespaces, until it ended."""
    pid: int = 0
    pidfd: int = -1
    ready: list[int] | None = None
    """The descriptors that came with init's `ready`."""
    told: bool = False
    waits_until: float | None = None
    """When it is given up, if nobody attaches to it."""


class _Channel:
    """An orchestrator: the socket of its requests, and the process itself."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.process = os.pidfd_open(pid)


class Server:
    """The event loop and its table of boxes. `door` is None when boxes are not to `survive` their orchestrator."""

    def __init__(self, first: socket.socket, orchestrator: int, *, door: socket.socket | None, survives: float) -> None:
        self._door = door
        self._survives = survives
        self._boxes: dict[str, _Box] = {}
        self._channels: set[_Channel] = set()
        self._wake = boot.child_wakeups()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        if door is not None:
            self._selector.register(door, selectors.EVENT_READ, None)
        self._welcome(first, orchestrator)

    def run(self) -> None:
        """Serve until the orchestrator is gone, then end every box that does not survive it."""
        while self._channels or self._boxes:
            events = self._selector.select(self._seconds_to_expiry())
            for key, _ in events:
                if key.fileobj is self._wake:
                    boot.drain(self._wake)
                elif key.fileobj is self._door:
                    self._open_door()
                elif isinstance(key.data, _Box):
                    self._hear(key.data)
                elif key.data in self._channels and (key.fileobj is not key.data.sock or not self._accept(key.data)):
                    self._part(key.data)
            self._collect()
            self._expire()

    def _seconds_to_expiry(self) -> float | None:
        if not self._boxes:
            return None
        return max(0.0, min(_end_of(box) for box in self._boxes.values()) - _now())

    def _expire(self) -> None:
        for box in [box for box in self._boxes.values() if _end_of(box) <= _now()]:
            self._end(box)
            if box.owner is None:
                self._sweep(box)

    # ------------------------------------------------------------------ orchestrators

    def _welcome(self, sock: socket.socket, pid: int) -> None:
        try:
            channel_ = _Channel(sock, pid)
        except ProcessLookupError:
            sock.close()
            return
        self._channels.add(channel_)
        self._selector.register(sock, selectors.EVENT_READ, channel_)
        self._selector.register(channel_.process, selectors.EVENT_READ, channel_)

    def _open_door(self) -> None:
        assert self._door is not None
        sock, _ = self._door.accept()
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self._welcome(sock, struct.unpack("3i", peer)[0])

    def _part(self, gone: _Channel) -> None:
        """An orchestrator is dead, or wants no more. Its boxes end or wait for another one."""
        self._channels.remove(gone)
        for fd in (gone.sock, gone.process):
            self._selector.unregister(fd)
        gone.sock.close()
        os.close(gone.process)
        for box in [box for box in self._boxes.values() if box.owner is gone]:
            if self._survives > 0 and box.survives and box.told:
                box.owner = None
                box.waits_until = min(box.expires, _now() + self._survives)
                _write_lease(box.record, box.waits_until)
            else:
                self._end(box)

    def _attach(self, owner: _Channel, request: dict[str, Any], reply: socket.socket) -> None:
        box = self._boxes.get(request["box"])
        if box is None:
            channel.send(reply, {"gone": True})
        elif box.owner is not None and box.owner is not owner:
            channel.send(reply, {"taken": True})
        else:
            channel.send(reply, {"ok": True, "expires": box.expires}, (box.pidfd, *(box.ready or [])))
            box.owner, box.waits_until = owner, None

    def _sweep(self, box: _Box) -> None:
        """What the orchestrator would do with a box that ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(box.pid, 0)
        for procs in box.cgroups:
            for _ in range(_PATIENCE):
                try:
                    os.rmdir(os.path.dirname(procs))
                except FileNotFoundError:
                    break
                except OSError:
                    select.select([], [], [], 0.01)
                else:
                    break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(box.record)

    # ------------------------------------------------------------------ ends

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

    def _accept(self, owner: _Channel) -> bool:
        """Take one request. Its first descriptor is the socket for the answer."""
        try:
            received = channel.receive(owner.sock)
        except ConnectionResetError:
            received = None
        if received is None:
            return False
        request, fds = received
        reply = socket.socket(fileno=fds.pop(0))
        try:
            match request["op"]:
                case "create":
                    self._create(owner, request, reply)
                    return True
                case "attach":
                    self._attach(owner, request, reply)
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

    def _create(self, owner: _Channel, request: dict[str, Any], reply: socket.socket) -> None:
        control, theirs = channel.pair()
        pid = os.fork()
        if pid == 0:
            _leave_loop()
            boot.boot(request, theirs)
        theirs.close()
        box = _Box(
            id=request["id"],
            control=control,
            reply=reply,
            owner=owner,
            expires=request["expires"],
            record=request["record"],
            cgroups=request["cgroups"],
            survives=request["survives"],
            booter=pid,
        )
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
        if self._survives == 0:
            # Else they are there for who attaches to the box: a connection made in between waits in the socket.
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


def _end_of(box: _Box) -> float:
    return box.expires if box.waits_until is None else box.waits_until


def _write_lease(path: str, until: float) -> None:
    """In the registry, where others look whether the box is still wanted."""
    fresh = f"{path}.server"
    with contextlib.suppress(FileNotFoundError):
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(record | {"lease_until": until}, file)
        os.rename(fresh, path)


def main() -> None:
    """Entry point of the server process: descriptor 0 is the request socket, argv[1] the settings."""
    settings = json.loads(sys.argv[1])
    orchestrator, survives = settings["orchestrator"], settings.get("survives", 0)
    first = socket.socket(fileno=os.dup(0))
    door = None
    if survives:
        # Nobody waits for our end, so we are nobody's child.
        if os.fork():
            os._exit(0)
        door = socket.socket(fileno=os.dup(3))
        os.close(3)
        os.chdir("/")
    os.setsid()
    os.umask(0o022)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if survives:
        # The orchestrator's stderr would look open to its readers for as long as we live.
        os.dup2(os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), 2)
    syscalls.become_subreaper()
    syscalls.set_title(f"box-server {orchestrator}")
    server = Server(first, orchestrator, door=door, survives=survives)
    gc.collect()
    gc.freeze()
    gc.disable()
    server.run()
    if survives:
        for path in (settings["door"], settings["log"]):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
