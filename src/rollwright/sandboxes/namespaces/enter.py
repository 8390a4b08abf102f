"""What runs something in a box: a command, a file operation, or the cell that a job lives in.

All of it runs in forks of the server. After `_join` the file system is the box's, so nothing may be imported.
"""

# Plain `os` calls: this runs in a lean process, which does not load pathlib.
# ruff: noqa: PTH101, PTH103, PTH104, PTH108, PTH110, PTH211

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import select
import signal
import socket
import stat
import sys
import time
from typing import Any, NoReturn

from rollwright.sandboxes.namespaces import boot, channel, seccomp, syscalls

COMMAND_FD = 8
"""Where the supervisor finds its end of the cell's command pipe."""

LIFE_FD = 5
"""Where it finds the pipe that ends with the cell."""

_SCRIPT_FD = 7

_FILTER = seccomp.program(platform.machine())

_ROOT_CAPABILITIES = frozenset(
    {
        syscalls.CAP_CHOWN,
        syscalls.CAP_DAC_OVERRIDE,
        syscalls.CAP_FOWNER,
        syscalls.CAP_FSETID,
        syscalls.CAP_KILL,
        syscalls.CAP_SETGID,
        syscalls.CAP_SETUID,
        syscalls.CAP_NET_BIND_SERVICE,
        syscalls.CAP_SYS_CHROOT,
    }
)


def serve(request: dict[str, Any], box: int, fds: list[int], reply: socket.socket) -> NoReturn:
    """Carry out one request in the box whose init `box` (a pidfd) is, answer on `reply`, and end."""
    try:
        boot.close_others({box, reply.fileno(), *fds})
        if request["op"] == "exec":
            _exec(request, box, fds, reply)
        else:
            _join(request, box)
            _become(request["user"], single=request["single"], program=False)
            _FILE_OPERATIONS[request["op"]](request, reply)
        os._exit(0)
    except OSError as e:
        with contextlib.suppress(OSError):
            channel.send(reply, {"error": errno.errorcode.get(e.errno or 0, "EIO"), "text": str(e)})
    except BaseException as e:  # noqa: BLE001 - a fork must never return into the server
        with contextlib.suppress(OSError):
            channel.send(reply, {"error": "EIO", "text": repr(e)})
    os._exit(1)


def _join(request: dict[str, Any], box: int) -> None:
    flags = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWIPC
    flags |= syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
    if request["network"] != "open":
        flags |= syscalls.CLONE_NEWNET
    syscalls.setns(box, flags)
    syscalls.hide_memory()
    sys.path.clear()


def _become(user: dict[str, Any], *, single: bool, program: bool) -> None:
    """Take the user's ids and no more power than it has in the box; for a program not all system calls either.

    Where the box has one id only, its agent lives in a nested user namespace, so that it at least is not root.
    """
    uid, gid = user["uid"], user["gid"]
    power = _ROOT_CAPABILITIES if uid == 0 else frozenset[int]()
    if single and uid and program:
        syscalls.show_memory()
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        boot.write_file("/proc/self/setgroups", "deny")
        boot.write_file("/proc/self/uid_map", f"{uid} 0 1")
        boot.write_file("/proc/self/gid_map", f"{gid} 0 1")
    if program and _FILTER is not None:
        syscalls.filter_calls(_FILTER)
    syscalls.limit_capabilities(power)
    if not single:
        os.setgroups([gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    syscalls.set_capabilities(power)
    if uid:
        syscalls.no_new_privileges()


# ----------------------------------------------------------------------------- commands


def _exec(request: dict[str, Any], box: int, fds: list[int], reply: socket.socket) -> None:
    cgroups = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in request["cgroups"]]
    _join(request, box)
    child = os.fork()
    if child == 0:
        try:
            for fd in cgroups:
                os.write(fd, b"0")
            _run(request, fds)
        except BaseException as e:  # noqa: BLE001 - a fork must never return into the server
            with contextlib.suppress(OSError):
                os.write(fds[2], f"rollwright: {e}\n".encode())
        os._exit(126)
    for fd in fds:
        os.close(fd)
    watch = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.register(reply, select.POLLIN)
    if watch not in {fd for fd, _ in poll.poll()}:
        # The caller hung up: it gave up on this command.
        for target in (-child, child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        channel.send(reply, {"gone": True} if code == -signal.SIGKILL and _ends(box) else {"exit": code})


def _ends(box: int) -> bool:
    """Whether the box's init ends now, which first kills all others: then that is why a command was killed."""
    poll = select.poll()
    poll.register(box, select.POLLIN)
    return bool(poll.poll(100))


def _run(request: dict[str, Any], fds: list[int]) -> NoReturn:
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    env = dict(request["env"])
    keep: set[int] = set()
    if request["cell"]:
        env["ROLLWRIGHT_CELL"] = str(_make_cell(request))
        keep = {COMMAND_FD, LIFE_FD}
    boot.close_others(keep)
    _start(request["argv"], env, request["cwd"], request["user"], single=request["single"])


def _start(argv: list[str], env: dict[str, str], cwd: str, user: dict[str, Any], *, single: bool) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _become(user, single=single, program=True)
    os.chdir(cwd)
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.execve(f"{folder}/{argv[0]}", argv, env)
    os.write(2, f"rollwright: {argv[0]}: not found\n".encode())
    os._exit(127)


# ----------------------------------------------------------------------------- the cell of a job


def _make_cell(request: dict[str, Any]) -> int:
    """Start the first process of a nested PID namespace; it waits for `go`. Our own children stay in ours."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    listen, command = os.pipe()
    life, living = os.pipe()
    syscalls.unshare(syscalls.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open("/dev/null", os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            boot.close_others({listen, living})
            _cell(request, listen, living)
        finally:
            os._exit(1)
    syscalls.setns(own, syscalls.CLONE_NEWPID)
    # First out of the way of the numbers they are to get.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (command, life)]
    for fd, number in zip(high, (COMMAND_FD, LIFE_FD), strict=True):
        os.dup2(fd, number)
    return pid


def _cell(request: dict[str, Any], listen: int, living: int) -> NoReturn:
    """PID 1 of a job. When it ends, the kernel ends everything the job started.

    Commands, one a line: `go FOLDER SCRIPT USER MERGE KEEP` once, then `term`, `kill`, and `tick N` for a `tick` in so
    many hundredths of a second. The end of the pipe means: end now. `exit` is told when nothing else is left here.
    """
    os.setsid()
    syscalls.set_title("job-init")
    wake = boot.child_wakeups()
    line = _read_line(listen)
    if not line.startswith("go "):
        os._exit(0)
    _, folder, script, name, merge, keep = line.split(" ")
    events = os.open(f"{folder}/events", os.O_WRONLY | os.O_CLOEXEC)
    try:
        main = _start_job(request, folder, script, name, merge=merge == "1")
    except OSError as e:
        os.write(events, f"broken {e}\n".encode())
        os._exit(1)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(listen, select.POLLIN)
    running = True
    ticks: list[float] = []
    while True:
        left = [max(0.0, at - time.monotonic()) for at in ticks]
        ready = {fd for fd, _ in poll.poll(min(left) * 1000 if left else None)}
        boot.drain(wake)
        ended = _reap()
        if main in ended:
            if keep != "1":
                _kill_all()
            code = ended[main]
            os.write(events, f"exit {max(code, 0)} {max(-code, 0)}\n".encode())
            if keep != "1":
                os._exit(0)
            running = False
            ticks = []
            poll.unregister(listen)
        if not running:
            if -1 in ended:
                os._exit(0)
            continue
        if ticks and min(ticks) <= time.monotonic():
            ticks.remove(min(ticks))
            os.write(events, b"tick\n")
        if listen in ready:
            command, _, number = _read_line(listen).partition(" ")
            if command == "tick":
                ticks.append(time.monotonic() + int(number) / 100)
            elif command in ("term", "kill"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGTERM if command == "term" else signal.SIGKILL)
            else:
                os._exit(0)


def _kill_all() -> None:
    """Kill every other process of this PID namespace. All of them are, or become, our children."""
    try:
        while True:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _reap() -> dict[int, int]:
    """Collect the ended children: pid to code (minus the signal). The pid -1 says that there are none left."""
    ended: dict[int, int] = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return ended
            ended[pid] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        ended[-1] = 0
        return ended


def _read_line(fd: int) -> str:
    data = bytearray()
    while not data.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return ""
        data += byte
    return data[:-1].decode()


def _start_job(request: dict[str, Any], folder: str, path: str, name: str, *, merge: bool) -> int:
    user = request["users"][name]
    script = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stdin = os.open(f"{folder}/stdin" if os.path.exists(f"{folder}/stdin") else "/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    out = os.open(f"{folder}/out", os.O_WRONLY | os.O_CLOEXEC)
    err = out if merge else os.open(f"{folder}/err", os.O_WRONLY | os.O_CLOEXEC)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    boot.enter_own_proc()
    pid = os.fork()
    if pid:
        for fd in {script, stdin, out, err}:
            os.close(fd)
        return pid
    try:
        os.setsid()
        # First out of the way of the numbers they are to get.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (stdin, out, err, script)]
        for fd, number in zip(high, (0, 1, 2, _SCRIPT_FD), strict=True):
            os.dup2(fd, number)
        boot.close_others({_SCRIPT_FD})
        # The job goes first when memory runs out, not the supervisor that has to tell about it.
        syscalls.show_memory()
        boot.write_file("/proc/self/oom_score_adj", "500")
        _start(["/bin/sh", f"/proc/self/fd/{_SCRIPT_FD}"], dict(user["env"]), "/", user, single=request["single"])
    except OSError as e:
        os.write(2, f"rollwright: {e}\n".encode())
    finally:
        os._exit(126)


# ----------------------------------------------------------------------------- files


def _open(request: dict[str, Any], reply: socket.socket) -> None:
    """Open for reading, in the box's own eyes, and hand the descriptor to the host."""
    fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EISDIR, f"not a plain file: {request['path']}")
    channel.send(reply, {"ok": True}, (fd,))


def _write(request: dict[str, Any], reply: socket.socket) -> None:
    """Hand the host a new file to fill; when it says so, move it to its place."""
    path = request["path"]
    folder, name = os.path.split(path)
    os.makedirs(folder, 0o755, exist_ok=True)
    temporary = f"{folder}/.{name[:64]}.{request['nonce']}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, request["mode"])
        channel.send(reply, {"ok": True}, (fd,))
        if channel.receive(reply) is None:
            raise OSError(errno.ECANCELED, "the caller gave up")
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    channel.send(reply, {"ok": True})


def _unpack(request: dict[str, Any], reply: socket.socket) -> None:
    """Make a tree from a memory file of records: one JSON line each, then `size` bytes for a file."""
    channel.send(reply, {"ok": True})
    message = channel.receive(reply)
    if message is None:
        return
    target = request["path"]
    os.makedirs(target, 0o755, exist_ok=True)
    modes: list[tuple[str, int]] = []
    with os.fdopen(message[1][0], "rb") as records:
        records.seek(0)
        while line := records.readline():
            record = json.loads(line)
            path = f"{target}/{record['path']}"
            if record["kind"] == "folder":
                os.makedirs(path, 0o700, exist_ok=True)
                modes.append((path, record["mode"]))
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if record["kind"] == "link":
                os.symlink(record["to"], path)
                continue
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as f:
                left = record["size"]
                while left and (chunk := records.read(min(left, 1 << 20))):
                    f.write(chunk)
                    left -= len(chunk)
                os.fchmod(fd, record["mode"])
    for path, mode in reversed(modes):
        os.chmod(path, mode)
    channel.send(reply, {"ok": True})


_FILE_OPERATIONS = {"open": _open, "write": _write, "unpack": _unpack}
