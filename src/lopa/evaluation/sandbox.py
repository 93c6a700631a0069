"""Run untrusted Python in a separate, restricted process and say whether it ran to its end.

What the child is given: an empty throw-away working directory, no environment, closed standard
streams, kernel limits on memory, CPU time, file size, open files and processes, and an audit hook
that refuses network, processes, signals, every kind of writing to the file system, and reading
outside the standard library. A child started as root gives up root before the candidate runs, so
that the process limit holds; it can then import only the modules loaded beforehand if the standard
library is readable by root alone. Where `os.unshare` exists (Python 3.12 and later) the child is
also moved into an empty network namespace when the kernel allows it. A *judge*, trusted code that
is loaded before the restrictions, may run the candidate in its own way; it brings the folders that
it imports from.

Success is proven by a random token that only the trusted part of the child knows and writes to a
dedicated pipe after the last line of the code has run. Exiting early, printing, or writing to the
pipe without the token is a failure. The hook refuses the ways to reach the frame that holds the
token (frames, tracebacks, the garbage collector, `/proc`).

Limits: this stops accidents and ordinary misbehaviour of generated code, not an attacker with an
interpreter exploit. Code may still deceive its own asserts, for example by returning an object
that is equal to everything. Linux only.
"""

import marshal
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from lopa.errors import LopaError

TOKEN_LENGTH = 32
REPLY_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Judge:
    """Trusted code that runs the candidate: `source` defines `prepare(payload)`.

    It is called before the restrictions, and returns a function that is called with the
    candidate's text under them and raises if it fails.
    """

    source: str
    payload: bytes
    folders: tuple[str, ...]  # to import from, for the judge and the candidate


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether the code ran to its end, and in a word or two why not."""

    passed: bool
    reason: str


# Runs in the child. Everything used after the candidate has started is bound to a local name
# beforehand, because the candidate may replace any attribute of any module.
_CHILD = r"""
def main():
    import marshal, os, resource, signal, sys
    import bisect, collections, functools, heapq, itertools, math, operator, re, string, typing
    from posix import dup2, write, _exit

    seconds, megabytes, reply = map(int, sys.argv[1:4])
    with open(0, "rb", closefd=False) as request:
        token, code, source, payload, folders = marshal.loads(request.read())
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        dup2(null, descriptor)
    os.close(null)
    del sys.argv[:], sys.orig_argv[:]
    sys.path += folders
    roots = tuple(path for path in sys.path if path.startswith("/"))
    judge = None
    if source:
        trusted = {}
        try:
            exec(source, trusted)
            judge = trusted["prepare"](payload)
        except Exception as error:
            write(reply, token + f"{type(error).__name__}: {error}".encode()[:200])
            _exit(1)

    is_root = os.geteuid() == 0
    if is_root:  # what may not be readable any more when it is asked for
        import calendar, cmath, colorsys, copy, datetime, decimal, fractions, hashlib, json
        import random, statistics, textwrap, time, unicodedata
    if hasattr(os, "unshare"):
        try:
            os.unshare(os.CLONE_NEWNET | (0 if is_root else os.CLONE_NEWUSER))
        except OSError:
            pass
    size = megabytes << 20
    for limit, value in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_CPU, seconds + 1),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if is_root:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    signal.alarm(seconds + 2)

    families = frozenset((
        "socket", "subprocess", "ctypes", "signal", "resource", "shutil", "tempfile", "pty",
        "fcntl", "mmap", "gc", "winreg", "ftplib", "urllib", "http", "smtplib", "sqlite3",
        "syslog", "webbrowser", "cpython", "faulthandler",
    ))
    harmless_os = frozenset(("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr"))
    modules = frozenset((
        "ctypes", "_ctypes", "socket", "_socket", "ssl", "_ssl", "subprocess", "_posixsubprocess",
        "multiprocessing", "_multiprocessing", "asyncio", "mmap", "fcntl", "pty", "gc",
        "faulthandler", "_testcapi", "_testinternalcapi", "_xxsubinterpreters",
        "_interpreters", "concurrent", "_posixshmem",
    ))
    sys_events = frozenset((
        "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile",
        "sys.addaudithook", "sys.excepthook", "sys.unraisablehook",
        "sys.monitoring.register_callback", "sys.remote_exec",
    ))
    frames = frozenset(("tb_frame", "gi_frame", "cr_frame", "ag_frame"))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    text, refused, unavailable = str, PermissionError, ValueError

    def hook(event, args):
        if event == "object.__getattr__":
            if args[1] in frames:
                raise refused(event)
        elif event == "sys._getframe":
            # namedtuple and typing ask for the caller's frame and do without on ValueError.
            raise unavailable(event)
        elif event == "open":
            path, _mode, flags = args
            if flags & writing or type(path) is not text or ".." in path:
                raise refused(event)
            if not path.startswith(roots):
                raise refused(event)
        elif event == "import":
            if args[0].partition(".")[0] in modules:
                raise refused(event)
        elif event in sys_events or event.startswith("_thread."):
            raise refused(event)
        else:
            family = event.partition(".")[0]
            if family in families or (family == "os" and event not in harmless_os):
                raise refused(event)

    for name in modules:
        sys.modules.pop(name, None)
    namespace = {"__name__": "candidate", "__builtins__": __builtins__}
    caught, kind = BaseException, type
    run = exec
    try:
        program = compile(code, "candidate", "exec", dont_inherit=True)
    except caught as error:
        write(reply, b"!" + kind(error).__name__.encode())
        _exit(1)
    sys.addaudithook(hook)
    try:
        judge(code) if judge else run(program, namespace)
    except caught as error:
        write(reply, b"!" + kind(error).__name__.encode()[:64])
        _exit(1)
    write(reply, token)
    _exit(0)
main()
"""


def run(
    code: str, timeout: float = 3.0, memory_mb: int = 256, judge: Judge | None = None
) -> Outcome:
    """Run code and report whether it reached its end, or satisfied the judge, without an exception.

    Never raises for anything the code does; LopaError when the judge itself cannot run. The child
    and whatever it started are dead when this returns.
    """
    token = secrets.token_hex(TOKEN_LENGTH // 2).encode()
    try:
        code.encode()
    except UnicodeEncodeError:
        return Outcome(False, "not encodable")
    trusted = judge or Judge("", b"", ())
    request_bytes = marshal.dumps(
        (token, code, trusted.source, trusted.payload, list(trusted.folders))
    )
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryFile() as request, tempfile.TemporaryDirectory() as directory:
            request.write(request_bytes)
            request.seek(0)
            arguments = [str(int(timeout) + 1), str(memory_mb), str(writer)]
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _CHILD, *arguments],
                stdin=request,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env={},
                pass_fds=(writer,),
                start_new_session=True,
            )
            os.close(writer)
            writer = -1
            try:
                reply, in_time = _read_reply(reader, time.monotonic() + timeout)
            finally:
                _kill_group(child)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    if reply == token:
        return Outcome(True, "passed")
    if not in_time:
        return Outcome(False, "timeout")
    if reply.startswith(token):
        reason = reply[len(token) :].decode(errors="replace")
        raise LopaError(f"the judge of the sandbox cannot run: {reason}")
    if reply.startswith(b"!"):
        return Outcome(False, reply[1:80].decode(errors="replace"))
    return Outcome(False, "ended early")


def _read_reply(reader: int, deadline: float) -> tuple[bytes, bool]:
    """What the child wrote, bounded, and whether it finished before the deadline."""
    reply = b""
    while len(reply) < REPLY_LIMIT:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return reply, False
        chunk = os.read(reader, REPLY_LIMIT)
        if not chunk:
            break
        reply += chunk
    return reply, True


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    # The child is not reaped yet, so its process group id cannot have been reused.
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()
    child.wait()
