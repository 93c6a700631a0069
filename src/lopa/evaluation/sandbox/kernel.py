"""System calls that Python has no name for, by number."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

# name → number on x86_64, on aarch64; None where there is no such call
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "ioctl": (16, 29),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "clone": (56, 220),
    "exit": (60, 93),
    "uname": (63, 160),
    "fcntl": (72, 25),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "prlimit64": (302, 261),
    "getcpu": (309, 168),
    "seccomp": (317, 277),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "clone3": (435, 435),
    "openat2": (437, 437),
    "faccessat2": (439, 439),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
# The machine as the kernel's filters name it, and its column of NUMBERS.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


class MissingError(Exception):
    """What this machine does not allow."""


def machine() -> tuple[int, int]:
    try:
        return MACHINES[platform.machine()]
    except KeyError:
        raise MissingError(
            f"a filter of system calls for {platform.machine()} (there is one for "
            f"{' and '.join(MACHINES)})"
        ) from None


def call(name: str, *arguments: Any) -> int:
    """A function of the C library that returns -1 and sets errno."""
    return _checked(name, getattr(_LIBC, name)(*map(_argument, arguments)))


def syscall(name: str, *arguments: Any) -> int:
    number = NUMBERS[name][machine()[1]]
    return _checked(name, _LIBC.syscall(ctypes.c_long(number or -1), *map(_argument, arguments)))


def _argument(value: Any) -> Any:
    if isinstance(value, str):
        return os.fsencode(value)
    return ctypes.c_ulong(value) if isinstance(value, int) else value


def _checked(name: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
