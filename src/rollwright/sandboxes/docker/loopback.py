"""The gateway's listening socket on a container's own loopback, held by the host. Needs root, and a local daemon."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from rollwright.errors import ProvisionFailed, Unsupported
from rollwright.sandboxes.namespaces import syscalls

_BECOMES_SECONDS = 10.0


def listen_inside(pid: int, name: str, port: int) -> socket.socket:
    """Listen on 127.0.0.1:`port` of the container whose main process is `pid` and has `name` among its arguments.

    Blocks, for some seconds at most. Raises `Unsupported` where the process or its network cannot be reached from here,
    `ProvisionFailed` when the port is taken.
    """
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise Unsupported(_NOT_HERE) from e
    except PermissionError as e:
        raise Unsupported(_NOT_ROOT) from e
    try:
        # Looked at after the opening: the number may be that of some other process, here or by now. Just after its
        # start a container's main process still has the arguments of the runtime that becomes it.
        deadline = time.monotonic() + _BECOMES_SECONDS
        while name.encode() not in _arguments(pid):
            if time.monotonic() > deadline:
                raise Unsupported(_NOT_HERE)
            time.sleep(0.02)  # noqa: TID251 - in a thread of its own; no event tells of an exec
        return _bind_in(namespace, port)
    finally:
        os.close(namespace)


_NOT_HERE = (
    "gateway_only: the daemon's containers do not run on this machine (a remote daemon, or one in a virtual machine); "
    "use a local daemon, or the namespaces backend"
)
_NOT_ROOT = "gateway_only: entering a container's network needs root (CAP_SYS_ADMIN) on this machine"


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _bind_in(namespace: int, port: int) -> socket.socket:
    """A network namespace belongs to a thread, so a thread is spent on it."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def bind() -> None:
        try:
            syscalls.setns(namespace, syscalls.CLONE_NEWNET)
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError as e:
            failed.append(e)
            return
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(512)
            made.append(listener)
        except OSError as e:
            listener.close()
            failed.append(e)

    thread = threading.Thread(target=bind, name="enter a container's network")
    thread.start()
    thread.join()
    if not failed:
        return made[0]
    if isinstance(failed[0], PermissionError):
        raise Unsupported(_NOT_ROOT) from failed[0]
    raise ProvisionFailed(f"cannot listen on 127.0.0.1:{port} in the container: {failed[0]}") from failed[0]
