"""What makes a box: namespaces, the file system, and the tiny init that then stays. Runs in a fork of the server.

The box always has its own user namespace, also when we are root: its root then has no power outside it. Its own
capabilities are cut down further, `/proc/sys` and friends are read-only, and every mount is nosuid.
"""

# Plain `os` calls: this runs in a lean process, which does not load pathlib.
# ruff: noqa: PTH101, PTH102, PTH103, PTH110, PTH112, PTH120, PTH211

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from collections.abc import Generator
from types import FrameType
from typing import Any, NoReturn

from rollwright.sandboxes.namespaces import channel, syscalls

JOBS_FOLDER = "/run/rollwright"
"""Root's alone inside the box, on its own small file system, so that a full box cannot lose a job's record."""

_MASKED = ("kcore", "keys", "timer_list", "sched_debug", "kpagecount", "kpageflags", "kmsg", "sysrq-trigger")
_READ_ONLY = ("sys", "bus", "fs", "irq")
_PLAIN = syscalls.MS_NOSUID | syscalls.MS_NODEV
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class BootError(Exception):
    """A step of the boot failed."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error}")
        self.step = step
        self.errno = error.errno or 0


@contextlib.contextmanager
def _step(name: str) -> Generator[None]:
    try:
        yield
    except OSError as e:
        raise BootError(name, e) from e


def close_others(keep: set[int]) -> None:
    """Close every descriptor but 0-2 and `keep`: a fork must not hold its parent's sockets open."""
    start = 3
    for fd in sorted(keep):
        if fd >= start:
            os.closerange(start, fd)
            start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def boot(plan: dict[str, Any], control: socket.socket) -> NoReturn:
    """Become a new box. Sends `pid`, then `ready` (with the gateway's socket) or `error` over `control`."""
    try:
        close_others({control.fileno()})
        with _step("join the cgroup"):
            for path in plan["cgroups"]:
                write_file(path, "0")
        if plan["outside"]:
            with _step("make the namespaces"):
                syscalls.unshare(syscalls.CLONE_NEWNS)
            _mount_layers(plan, "outside", "index=on")
        enter_user_namespace(plan["uid_map"], plan["gid_map"])
        flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
        flags |= syscalls.CLONE_NEWCGROUP
        if plan["network"] != "open":
            flags |= syscalls.CLONE_NEWNET
        with _step("make the namespaces"):
            syscalls.unshare(flags)
        pid = os.fork()
        if pid == 0:
            _init(plan, control)
        channel.send(control, {"pid": pid})
        os._exit(0)
    except BaseException as e:  # noqa: BLE001 - a fork must never return into the server
        _report(control, e)
        os._exit(1)


def _report(control: socket.socket, error: BaseException) -> None:
    step, number = (error.step, error.errno) if isinstance(error, BootError) else ("boot", 0)
    with contextlib.suppress(OSError):
        channel.send(control, {"error": step, "errno": number, "text": str(error) or repr(error)})


def write_file(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def enter_user_namespace(uid_map: list[list[int]], gid_map: list[list[int]]) -> None:
    """Enter a new user namespace and become its root.

    One's own id may be mapped by oneself; a range must be written by a process that stayed outside.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid_map == [[0, uid, 1]]:
        with _step("make a user namespace"):
            syscalls.unshare(syscalls.CLONE_NEWUSER)
        with _step("map the user"):
            write_file("/proc/self/setgroups", "deny")
            write_file("/proc/self/uid_map", f"0 {uid} 1")
            write_file("/proc/self/gid_map", f"0 {gid} 1")
    else:
        hold, go = os.pipe()
        helper = os.fork()
        if helper == 0:
            os.close(go)
            os._exit(_write_maps(hold, uid_map, gid_map))
        os.close(hold)
        with _step("make a user namespace"):
            syscalls.unshare(syscalls.CLONE_NEWUSER)
        os.write(go, b"g")
        os.close(go)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
        if code:
            raise BootError("map the users", OSError(code, os.strerror(code)))
        with _step("become root of the box"):
            os.setgroups([])
    with _step("become root of the box"):
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    syscalls.new_session_keyring()


def _write_maps(hold: int, uid_map: list[list[int]], gid_map: list[list[int]]) -> int:
    if not os.read(hold, 1):
        return 0
    target = os.getppid()
    try:
        for kind, rows in (("uid", uid_map), ("gid", gid_map)):
            if os.geteuid() == 0:
                write_file(f"/proc/{target}/{kind}_map", "".join(f"{a} {b} {n}\n" for a, b, n in rows))
            else:
                numbers = [str(number) for row in rows for number in row]
                tool = f"/usr/bin/new{kind}map"
                quiet = [(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]
                pid = os.posix_spawn(tool, [tool, str(target), *numbers], {}, file_actions=quiet)
                if os.waitpid(pid, 0)[1]:
                    return errno.EPERM
    except OSError as e:
        return e.errno or errno.EPERM
    return 0


def _init(plan: dict[str, Any], control: socket.socket) -> NoReturn:
    """PID 1 of the box."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        _build_root(plan)
        gateway = _open_network(plan)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        syscalls.set_title("box-init")
        # It keeps its capabilities: nobody in the box has as many, so nobody there may trace it or follow its
        # /proc links to the host's files; and we outside may still join its namespaces.
        channel.send(control, {"ready": True}, (gateway.fileno(),) if gateway else ())
        if gateway:
            gateway.close()
        # The answer comes when our parent is the server itself; only then may we ask to die with it.
        if channel.receive(control) is None:
            os._exit(1)
        syscalls.die_with_parent(signal.SIGKILL)
        channel.send(control, {"armed": True})
        reap_until(control.fileno())
        os._exit(0)
    except BaseException as e:  # noqa: BLE001 - a fork must never return into the server
        _report(control, e)
        os._exit(1)


def child_wakeups() -> int:
    """A descriptor that is readable when a child ended."""
    wake, poke = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(poke, False)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(poke, warn_on_full_buffer=False)
    return wake


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler must exist for the wake-up to be written."""


def drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def reap_until(owner: int) -> None:
    """Collect the box's orphans until `owner` says something or is gone."""
    wake = child_wakeups()
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(owner, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        drain(wake)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if owner in ready:
            return


# ----------------------------------------------------------------------------- file system


def _mount_layers(plan: dict[str, Any], place: str, more: str) -> None:
    """The writable layer, as current folder, and in it the overlays at `place`.

    Only when mounted outside of the box's user namespace (which takes root) does an overlay know a file by the same
    number before and after it is copied up. `git clone` of a repository in the image asks for that.
    """
    stage, agent, single = plan["stage"], plan["agent"], plan["single"]
    with _step("detach from the host's mounts"):
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    with _step("mount the writable layer"):
        syscalls.mount("box", stage, "tmpfs", _PLAIN, f"size={plan['disk_mb']}m,mode=755")
    os.chdir(stage)
    for number, overlay in enumerate(plan["overlays"]):
        upper, work, target = f"u{number}", f"w{number}", overlay["target"]
        os.mkdir(upper, 0o755)
        os.mkdir(work, 0o755)
        if target == "/":
            os.mkdir(place)
            _prepare_top(upper, agent, chown=not single)
        # Short relative names: option strings are bounded, and a path may hold a colon.
        for index, lower in enumerate(overlay["lowers"]):
            os.symlink(lower, f"l{number}.{index}")
        lowers = ":".join(f"l{number}.{index}" for index in range(len(overlay["lowers"])))
        options = f"lowerdir={lowers},upperdir={upper},workdir={work},userxattr,{more}"
        with _step(f"mount the overlay of {target}"):
            syscalls.mount("box", place + target.rstrip("/"), "overlay", _PLAIN, options)


def _build_root(plan: dict[str, Any]) -> None:
    if plan["outside"]:
        with _step("take over the root"):
            syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            os.chdir(plan["stage"])
            os.mkdir("root")
            # What was mounted outside is locked in its place, but a copy is not.
            syscalls.mount("outside", "root", None, syscalls.MS_BIND | syscalls.MS_REC)
    else:
        _mount_layers(plan, "root", "index=off")
    _mount_proc("root/proc")
    _make_devices("root/dev")
    shown = [(bind["target"], _take(bind["source"], number)) for number, bind in enumerate(plan["binds"])]
    with _step("enter the new root"):
        os.chdir("root")
        syscalls.pivot_root(".", ".")
        syscalls.umount(".", syscalls.MNT_DETACH)
        os.chdir("/")
    # From here on a link that the image has leads nowhere but into the image.
    with _step("mount the jobs folder"):
        os.makedirs(JOBS_FOLDER, 0o700, exist_ok=True)
        syscalls.mount("jobs", JOBS_FOLDER, "tmpfs", _PLAIN | syscalls.MS_NOEXEC, f"size={plan['jobs_mb']}m,mode=700")
    for target, (tree, folder) in shown:
        with _step(f"show something at {target}"):
            _show(tree, target, folder=folder)
    with _step("name the host"):
        syscalls.sethostname("box")
    if not plan["single"]:
        # Nested user namespaces would give the agent capabilities to play with.
        with _step("forbid nested user namespaces"):
            write_file("/proc/sys/user/max_user_namespaces", "0")
    with _step("guard /proc"):
        guard_proc()


def _prepare_top(upper: str, agent: dict[str, Any], *, chown: bool) -> None:
    folders = {"home": 0o755, "root": 0o711, "run": 0o755, "tmp": 0o1777, "var": 0o755, "var/tmp": 0o1777}
    folders |= {"proc": 0o555, "dev": 0o755, "sys": 0o555}
    home = str(agent["home"]).lstrip("/")
    for name, mode in folders.items():
        os.mkdir(f"{upper}/{name}")
        os.chmod(f"{upper}/{name}", mode)
    os.makedirs(f"{upper}/{home}", 0o755, exist_ok=True)
    if chown:
        os.chown(f"{upper}/{home}", agent["uid"], agent["gid"])


def _mount_proc(target: str) -> None:
    with _step("mount /proc"):
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        syscalls.mount("proc", target, "proc", flags)


def guard_proc() -> None:
    """Hide or freeze the parts of /proc that speak for the whole machine."""
    for name in _READ_ONLY:
        path = f"/proc/{name}"
        if os.path.isdir(path):
            syscalls.mount(path, path, None, syscalls.MS_BIND | syscalls.MS_REC)
            syscalls.set_mount_attributes(path, syscalls.ATTR_RDONLY, recursive=True)
    for name in _MASKED:
        path = f"/proc/{name}"
        if os.path.exists(path):
            syscalls.mount("/dev/null", path, None, syscalls.MS_BIND)


def enter_own_proc() -> None:
    """For the first process of a nested PID namespace, after it took its own mount namespace."""
    _mount_proc("/proc")
    guard_proc()
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_RDONLY
    syscalls.mount("none", JOBS_FOLDER, "tmpfs", flags, "size=4k,mode=700")


def _make_devices(dev: str) -> None:
    with _step("make /dev"):
        flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
        syscalls.mount("dev", dev, "tmpfs", flags, "size=64k,mode=755")
        for name in ("shm", "pts"):
            os.mkdir(f"{dev}/{name}")
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            os.symlink(f"/proc/self/{target}", f"{dev}/{name}")
        os.symlink("pts/ptmx", f"{dev}/ptmx")
        for name in _DEVICES:
            os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
            syscalls.mount(f"/dev/{name}", f"{dev}/{name}", None, syscalls.MS_BIND)
        # Read-only keeps a box root, who may be the owner of the host's node, from changing its mode.
        attributes = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NOEXEC
        syscalls.set_mount_attributes(dev, attributes, recursive=True)
        flags |= syscalls.MS_NODEV
        syscalls.mount("shm", f"{dev}/shm", "tmpfs", flags, "mode=1777,size=256m")
        flags &= ~syscalls.MS_NODEV
        syscalls.mount("devpts", f"{dev}/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")


def _take(source: str, number: int) -> tuple[int, bool]:
    """A descriptor of a read-only view of something of the host's, and whether it is a folder.

    A folder is seen through an overlay, since a plain bind would tell its place on the host in /proc/self/mountinfo.
    """
    with _step(f"show {source}"):
        if not os.path.isdir(source):
            return syscalls.open_tree(source), False
        view = f"b{number}"
        os.mkdir(view)
        os.mkdir(f"{view}.empty")
        os.symlink(source, f"{view}.source")
        options = f"lowerdir={view}.source:{view}.empty,userxattr"
        syscalls.mount("box", view, "overlay", _PLAIN | syscalls.MS_RDONLY, options)
        return syscalls.open_tree(view), True


def _show(tree: int, target: str, *, folder: bool) -> None:
    if folder:
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    syscalls.attach_tree(tree, target)
    os.close(tree)
    attributes = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV
    syscalls.set_mount_attributes(target, attributes, recursive=True)


# ----------------------------------------------------------------------------- network


def _open_network(plan: dict[str, Any]) -> socket.socket | None:
    """Loopback up; with `gateway_only` also the listening socket that the host will serve."""
    if plan["network"] == "open":
        return None
    with _step("bring loopback up"):
        syscalls.bring_loopback_up()
    if plan["network"] != "gateway_only":
        return None
    host: str = plan["gateway_host"]
    with _step(f"listen on {host}:{plan['gateway_port']}"):
        if not host.startswith("127."):
            syscalls.add_loopback_address(host)
        gateway = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        gateway.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        gateway.bind((host, plan["gateway_port"]))
        gateway.listen(512)
    return gateway
