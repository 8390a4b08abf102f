"""The system calls that no program in a box may make: a filter for the kernel, made without a compiler.

Capabilities and namespaces already refuse nearly all of these. The filter takes the kernel's code behind them out of
reach too, and closes what no namespace covers: sockets to the hypervisor (vsock), and the calls of another ABI.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in what the kernel shows the filter."""

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_NEW_TIME = 0x80
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""

# In the order x86_64, aarch64. None: that machine has no such call.
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "userfaultfd": (323, 282),
}
_NOT_THERE: dict[str, tuple[int, int]] = {
    # Its flags lie in memory, where a filter cannot look; libraries then take `clone`.
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_CLONE, _UNSHARE, _SOCKET = (56, 220), (272, 97), (41, 198)


def program(machine: str) -> bytes | None:
    """The filter for this machine (as `uname -m` calls it), for `syscalls.filter_calls`. None: we have none for it."""
    if machine not in _AUDIT:
        return None
    column = list(_AUDIT).index(machine)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        _error(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), _error(errno.ENOSYS)]
    for numbers in _FORBIDDEN.values():
        number = numbers[column]
        if number is not None:
            lines += [(_EQUAL, 0, 1, number), _error(errno.EPERM)]
    for numbers in _NOT_THERE.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), _error(errno.ENOSYS)]
    flags = ((_CLONE[column], _NEW_NAMESPACES), (_UNSHARE[column], _NEW_NAMESPACES | _NEW_TIME))
    for number, mask in flags:
        lines += _if_called(number, [(_ANY_OF, 0, 1, mask), _error(errno.EPERM), _allow()])
    families = [(_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    lines += _if_called(_SOCKET[column], [*families, _error(errno.EAFNOSUPPORT), _allow()])
    return b"".join(struct.pack("HBBI", *line) for line in (*lines, _allow()))


_Line = tuple[int, int, int, int]


def _if_called(number: int, then: Iterable[_Line]) -> list[_Line]:
    """`then` looks at the first argument, and decides."""
    body = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *then]
    return [(_EQUAL, 0, len(body), number), *body]


def _error(number: int) -> _Line:
    return (_RETURN, 0, 0, _ERROR | number)


def _allow() -> _Line:
    return (_RETURN, 0, 0, _ALLOW)
