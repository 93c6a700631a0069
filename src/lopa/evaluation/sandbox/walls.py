"""What keeps a judged process from the machine: namespaces with an empty root, or Landlock.

Either comes with the filter of system calls. Namespaces are taken where the machine allows a user
to make them; where it does not, as in many containers, Landlock does for the file system what an
empty root would, and the filter alone does the rest. Neither needs a privilege or a program.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from lopa.evaluation.sandbox import seccomp
from lopa.evaluation.sandbox.kernel import MissingError, call, syscall

NAMESPACES, LANDLOCK, NONE = "namespaces", "landlock", "none"

_NEW_MOUNT, _NEW_CGROUP, _NEW_UTS, _NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_USER = 1000  # who a process is inside: nobody in particular
_NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_DETACH = 2
_AT_CWD, _AT_RECURSIVE = (1 << 64) - 100, 0x8000
_READ_ONLY = 1 | 2 | 4  # and without devices or set-user-ids, of a mount
_OLD = "/old"  # the machine's root, until it is let go
_HIDDEN = ("site-packages", "dist-packages")  # inside the standard library: not part of it

_LANDLOCK_FILES = (13, 14, 15, 15, 16)  # kinds of access that versions 1 to 5 know
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_PATH_BENEATH = 1
_RULESET_VERSION = 1

_DEATH_SIGNAL, _DUMPABLE, _NO_NEW_PRIVILEGES = 1, 4, 38
_CAPABILITY_VERSION = 0x20080522
_OPEN_FILES, _TASKS = 32, 128  # tasks are threads: there is no other process


class Walls:
    """Around a process and those that it forks; `kind` is one of the three."""

    def __init__(self, kind: str) -> None:
        if kind not in (NAMESPACES, LANDLOCK, NONE):
            raise MissingError(kind)
        self.kind = kind
        self._size = 0  # bytes of the process before it runs anything

    def leave(self) -> None:
        """Go into new namespaces, still with the old root. For a process with one thread."""
        if self.kind != NAMESPACES:
            return
        user, group = os.geteuid(), os.getegid()
        everything = _NEW_MOUNT | _NEW_CGROUP | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET
        try:
            call("unshare", _NEW_USER | everything)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{_USER} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{_USER} {group} 1")
            socket.sethostname("judge")
        except OSError as error:
            raise MissingError(f"user namespaces ({error})") from None

    def close(self, folders: Sequence[str]) -> None:
        """From now on nothing is seen but these folders, read-only."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._size = pages * resource.getpagesize()
        if self.kind == NAMESPACES:
            try:
                _empty_root(folders)
            except OSError as error:
                raise MissingError(f"mounts in a user namespace ({error})") from None
        elif self.kind == LANDLOCK:
            call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            try:
                _landlock(folders)
            except OSError as error:
                raise MissingError(f"Landlock ({error})") from None

    def fork(self) -> int:
        """As `os.fork`; the child sees no process but itself, where there are namespaces."""
        if self.kind == NAMESPACES:
            call("unshare", _NEW_PID)
        return os.fork()

    def confine(self, seconds: int, megabytes: int) -> None:
        """Limits, no privileges, no system calls but those of computation: the last step.

        Seconds are of CPU. Megabytes are beside those of the interpreter.
        """
        size = self._size + (megabytes << 20)
        for limit, value in (
            (resource.RLIMIT_AS, size),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if self.kind == NONE:
            return
        if self.kind == NAMESPACES:  # elsewhere those of the whole user would count
            resource.setrlimit(resource.RLIMIT_NPROC, (_TASKS, _TASKS))
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
        seccomp.install(seccomp.program())


def die_with_parent() -> None:
    call("prctl", _DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)


def hide_memory() -> None:
    """From other processes of the same user."""
    call("prctl", _DUMPABLE, 0, 0, 0, 0)


def _empty_root(folders: Sequence[str]) -> None:
    call("mount", None, "/", None, _RECURSIVE | _PRIVATE, None)
    place = folders[0]  # any folder will do: it is bare again when the root has moved
    call("mount", "tmpfs", place, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.mkdir(place + _OLD)
    syscall("pivot_root", place, place + _OLD)
    os.chdir("/")
    hidden = []
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
        call("mount", _OLD + folder, folder, None, _BIND | _RECURSIVE, None)
        _set_read_only(folder, _AT_RECURSIVE)
        for name in _HIDDEN:
            if os.path.isdir(cover := os.path.join(folder, name)):
                call("mount", "tmpfs", cover, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
                hidden.append(cover)
    call("umount2", _OLD, _DETACH)
    os.rmdir(_OLD)
    for path in (*hidden, "/"):  # last: folders may lie in what is hidden
        _set_read_only(path, 0)


def _set_read_only(path: str, flags: int) -> None:
    wanted = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    syscall("mount_setattr", _AT_CWD, path, flags, ctypes.byref(wanted), ctypes.sizeof(wanted))


def _landlock(folders: Sequence[str]) -> None:
    version = syscall("landlock_create_ruleset", None, 0, _RULESET_VERSION)
    handled = (1 << _LANDLOCK_FILES[min(version, len(_LANDLOCK_FILES)) - 1]) - 1
    wanted = (ctypes.c_uint64 * 1)(handled)
    rules = syscall("landlock_create_ruleset", ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
    for folder in folders:
        # Every file by name of its folder, because what must stay hidden is in there, too.
        _allow(rules, folder, _READ_FOLDER)
        for entry in os.scandir(folder):
            if entry.name not in _HIDDEN:
                _allow(rules, entry.path, _READ_FILE)
    syscall("landlock_restrict_self", rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = access.to_bytes(8, "little") + opened.to_bytes(4, "little")
    syscall("landlock_add_rule", rules, _PATH_BENEATH, rule, 0)
    os.close(opened)
