"""The system calls that a judged process may make: those of computation, and no others.

Reading files is left to the file system that the process sees; opening one for anything but
reading is refused here, too. There is no call to start a process or a program, to send a signal, to
make a socket or a pipe, to change a file, an identity, a limit or a namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

from lopa.evaluation.sandbox.kernel import NUMBERS, machine, syscall

_CLOCKS = ("clock_gettime", "clock_getres", "clock_nanosleep")
_CLOCK_IDS = 16  # greater ones are those of other processes
_ALLOWED = frozenset(NUMBERS) - {
    *(
        "ioctl",
        "fcntl",
        "clone",
        "openat",
        "prlimit64",
        "sched_getaffinity",
        "clone3",
        "openat2",
        "faccessat2",
    ),
    *_CLOCKS,
    *("mount_setattr", "pivot_root", "capset", "seccomp"),
    *("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"),
}
# The C library does without these where they are missing, and not where they are forbidden.
_UNKNOWN = ("clone3", "openat2", "faccessat2")
_WRITING = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_PATH | 0o20000000
)  # the last is O_TMPFILE without O_DIRECTORY
_CLONE_THREAD = 0x10000
_FCNTLS = (1, 2, 3, 1030)  # F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
_X32 = 0x40000000  # calls of another table on the same machine

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # where they are in what the filter sees

_SET_MODE_FILTER = 1

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def program() -> list[Instruction]:
    """The filter: every rule is a test of the call's number and ends in a verdict."""
    name, column = machine()
    refused = _ERROR | errno.EPERM
    found: list[Instruction] = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, name),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]

    def rule(call: str, *then: Instruction) -> None:
        number = NUMBERS[call][column]
        if number is not None:
            found.extend([(_EQUAL, 0, len(then), number), *then])

    def argument(index: int) -> Instruction:
        return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)  # its low half

    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, refused)
    for call in sorted(_ALLOWED):
        rule(call, allow)
    for call in _UNKNOWN:
        rule(call, (_RETURN, 0, 0, _ERROR | errno.ENOSYS))
    rule("ioctl", (_RETURN, 0, 0, _ERROR | errno.ENOTTY))
    rule("openat", argument(2), (_ANY_BIT, 1, 0, _WRITING), allow, refuse)
    rule("clone", argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse)
    known = ((_EQUAL, len(_FCNTLS) - i, 0, n) for i, n in enumerate(_FCNTLS))
    rule("fcntl", argument(1), *known, refuse, allow)
    own = (argument(0), (_EQUAL, 0, 1, 0))  # of no process but this one
    high = (_LOAD, 0, 0, _ARGUMENTS + 8 * 2 + 4)
    reading = (argument(2), (_EQUAL, 0, 3, 0), high, (_EQUAL, 0, 1, 0), allow, refuse)
    rule("prlimit64", argument(0), (_EQUAL, 1, 0, 0), refuse, *reading)
    rule("sched_getaffinity", *own, allow, refuse)
    for call in _CLOCKS:
        rule(call, argument(0), (_AT_LEAST, 1, 0, _CLOCK_IDS), allow, refuse)
    return [*found, refuse]


def install(instructions: Sequence[Instruction]) -> None:
    """For this process from now on; it must already be barred from new privileges."""
    words = (c | t << 16 | f << 24 | k << 32 for c, t, f, k in instructions)
    code = b"".join(word.to_bytes(8, "little") for word in words)
    buffer = ctypes.create_string_buffer(code, len(code))
    filled = _Program(len(code) // 8, ctypes.addressof(buffer))
    syscall("seccomp", _SET_MODE_FILTER, 0, ctypes.byref(filled))
