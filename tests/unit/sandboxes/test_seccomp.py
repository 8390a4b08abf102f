"""The system call filter, run as the kernel runs it."""

from __future__ import annotations

import errno
import struct

import pytest

from rollwright.sandboxes.namespaces import seccomp

ALLOW = 0x7FFF0000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, argument: int = 0, *, architecture: int | None = None) -> int | None:
    """None: allowed; else the error that the call ends with."""
    program = seccomp.program(machine)
    assert program is not None
    lines = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    seen = {0: number, 4: ARCHITECTURES[machine] if architecture is None else architecture, 16: argument}
    value = at = 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        match code:
            case 0x20:
                value = seen[operand]
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false
            case _:
                assert code == 0x06
                return None if operand == ALLOW else operand & 0xFFFF


READ, FORK_FLAGS, NEW_USER, NEW_FILES = {"x86_64": 0, "aarch64": 63}, 0x1200011, 0x10000000, 0x400
CALLS = {
    "mount": {"x86_64": 165, "aarch64": 40},
    "clone": {"x86_64": 56, "aarch64": 220},
    "clone3": {"x86_64": 435, "aarch64": 435},
    "unshare": {"x86_64": 272, "aarch64": 97},
    "socket": {"x86_64": 41, "aarch64": 198},
}
UNIX, INET, INET6, NETLINK, PACKET, ALG, VSOCK = 1, 2, 10, 16, 17, 38, 40


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_programs_need_is_allowed_and_what_none_needs_is_not(machine: str) -> None:
    number = {name: numbers[machine] for name, numbers in CALLS.items()}
    assert verdict(machine, READ[machine]) is None
    assert verdict(machine, number["mount"]) == errno.EPERM
    assert verdict(machine, number["clone3"]) == errno.ENOSYS
    assert verdict(machine, number["clone"], FORK_FLAGS) is None
    assert verdict(machine, number["clone"], FORK_FLAGS | NEW_USER) == errno.EPERM
    assert verdict(machine, number["unshare"], NEW_FILES) is None
    assert verdict(machine, number["unshare"], NEW_USER) == errno.EPERM
    for family in (UNIX, INET, INET6, NETLINK):
        assert verdict(machine, number["socket"], family) is None
    for family in (PACKET, ALG, VSOCK):
        assert verdict(machine, number["socket"], family) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_abi_are_not_there(machine: str) -> None:
    """Their numbers mean other calls, so all of them go."""
    assert verdict(machine, READ[machine], architecture=0x40000003) == errno.ENOSYS
    if machine == "x86_64":
        assert verdict(machine, READ[machine] | 0x40000000) == errno.ENOSYS


def test_a_machine_we_have_no_numbers_for_has_no_filter() -> None:
    assert seccomp.program("riscv64") is None
