"""The Linux calls Python has no names for. Every failure is an `OSError` with the kernel's errno."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4
ATTR_NOEXEC = 8

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID = 0, 1, 3, 4, 5, 6, 7
CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT = 10, 18

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_NAME = 15

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_machine = platform.machine()
_LAST_CAPABILITY = 40
_CAPABILITY_VERSION_3 = 0x20080522


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (or, for PIDs, its next children) into new namespaces."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    """Join namespaces: of a process when `fd` is its pidfd, else the one `fd` stands for."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            None if data is None else os.fsencode(data),
        ),
        f"mount {target}",
    )


def umount(target: str, flags: int) -> None:
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"umount {target}")


def set_mount_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Add mount attributes without having to name those that the mount already has."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    _checked(
        _libc.syscall(
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(target),
            ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
            attr,
            ctypes.c_size_t(len(attr)),
        ),
        f"mount_setattr {target}",
    )


def open_tree(source: str) -> int:
    """A descriptor of a copy of the mounts at `source`, attached nowhere yet."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    fd = _libc.syscall(
        ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(_AT_FDCWD), os.fsencode(source), ctypes.c_uint(flags)
    )
    _checked(fd, f"open_tree {source}")
    return int(fd)


def attach_tree(fd: int, target: str) -> None:
    """Attach what `open_tree` gave at `target`."""
    here = ctypes.c_int(_AT_FDCWD)
    flags = ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
    result = _libc.syscall(ctypes.c_long(_SYS_MOVE_MOUNT), ctypes.c_int(fd), b"", here, os.fsencode(target), flags)
    _checked(result, f"move_mount {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), "pivot_root")


def sethostname(name: str) -> None:
    raw = name.encode()
    _checked(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def _prctl(option: int, a: int = 0, b: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(a), ctypes.c_ulong(b), zero, zero), f"prctl {option}")


def die_with_parent(signal_number: int) -> None:
    """Ask for a signal when the thread that forked us ends. Forgotten by the kernel when credentials change."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def become_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Nobody without power over the namespace our program was started in may trace us or follow our /proc links."""
    _prctl(_PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Undo `hide_memory`: needed while writing one's own id maps."""
    _prctl(_PR_SET_DUMPABLE, 1)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_calls(program: bytes) -> None:
    """Have the kernel ask this filter before each call of ours and of all that we start. Needs power or `no_new_privs`.

    `program` is of `seccomp.program`.
    """
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    result = _libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_SECCOMP_MODE_FILTER), described)
    _checked(result, "prctl seccomp")


def set_name(name: str) -> None:
    """What `ps` calls the process; its first 15 bytes."""
    _checked(_libc.prctl(ctypes.c_int(_PR_SET_NAME), name.encode()[:15] + b"\0"), "prctl name")


def set_title(title: str) -> None:
    """Be called so: by name, and by our arguments, which every process of the same PID namespace may read."""
    set_name(title)
    fd = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
    finally:
        os.close(fd)
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def limit_capabilities(keep: frozenset[int]) -> None:
    """Drop all others from the bounding set, so that no program started from here can have them."""
    for number in range(_LAST_CAPABILITY + 1):
        if number not in keep:
            _prctl(_PR_CAPBSET_DROP, number)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def set_capabilities(keep: frozenset[int]) -> None:
    """Give up all others in this process itself."""
    mask = sum(1 << number for number in keep)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, struct.pack("6I", low, low, 0, high, high, 0)), "capset")


def new_session_keyring() -> None:
    """Leave the host session's keys behind."""
    number = _SYS_KEYCTL.get(_machine)
    if number is not None:
        _libc.syscall(ctypes.c_long(number), ctypes.c_int(_KEYCTL_JOIN_SESSION_KEYRING), None)


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(s, _SIOCGIFFLAGS, request))
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def add_loopback_address(address: str) -> None:
    """Give the loopback device one more IPv4 address, that one alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.255")):
            packed = struct.pack("16sHH4s16x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(s, request, packed)
