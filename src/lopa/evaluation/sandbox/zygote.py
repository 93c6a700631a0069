"""The process that the others are forked from: warm, behind the walls, and never judged itself.

    lopa ─ starts ─▶ zygote ─ forks ─▶ warden ─ forks ─▶ tester, or the answer

A request names a role and brings the sockets that the role needs. The warden is the only one that
knows its child: it counts CPU seconds, says how the child ended, and kills it when the holder of
the other end of `control` goes away. The answer's warden is held by the tester, the tester's by
lopa; so whoever dies, the rest follows.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from lopa.evaluation.sandbox import answer, tester, wire
from lopa.evaluation.sandbox.kernel import MissingError
from lopa.evaluation.sandbox.link import EARLY, ENDING, KILLED, TIMEOUT
from lopa.evaluation.sandbox.walls import Walls, die_with_parent, hide_memory

ANSWER, TESTER = "answer", "tester"
_ROLES: dict[str, Callable[..., None]] = {ANSWER: answer.serve, TESTER: tester.serve}
_REQUEST = 4096  # bytes
_ENDING_SECONDS = 2.0
# What answers import, loaded once: with its shared libraries, which are not seen behind the walls.
_MODULES = """
    abc array ast base64 binascii bisect bz2 calendar cmath codecs collections colorsys contextlib
    copy csv ctypes dataclasses datetime decimal difflib enum fractions functools gzip hashlib heapq
    hmac html inspect io ipaddress itertools json keyword locale lzma marshal math numbers operator
    pickle pprint queue random re secrets statistics string struct textwrap threading time timeit
    traceback types typing unicodedata urllib.parse uuid warnings weakref xml.etree.ElementTree zlib
    zoneinfo
"""


def main() -> None:
    """Arguments: descriptor of the requests, kind of walls, folders to see, modules to load."""
    requests, kind, folders, modules, paths = json.loads(sys.argv[1])
    channel = socket.socket(fileno=requests)
    try:
        walls = Walls(kind)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        os.close(null)
        walls.leave()
        sys.path += paths
        _load(modules)
        walls.close(folders)
    except (MissingError, ImportError) as error:
        channel.send(json.dumps({"missing": str(error)}).encode())
        return
    except OSError as error:
        channel.send(json.dumps({"missing": f"a call of the system ({error})"}).encode())
        return
    del sys.argv[:], sys.orig_argv[:]
    os.environ.clear()
    gc.collect()
    gc.freeze()
    child = os.fork()  # the first process of its namespace
    if child:
        channel.close()
        os.waitpid(child, 0)
        return
    die_with_parent()
    hide_memory()
    _serve(channel, walls)


def _load(modules: Sequence[str]) -> None:
    for name in _MODULES.split():
        try:
            importlib.import_module(name)
        except ImportError:  # Python was built without it
            continue
    for name in modules:
        importlib.import_module(name)
    own = os.path.dirname(os.path.dirname(importlib.import_module("lopa").__file__ or ""))
    sys.path = [path for path in sys.path if path != own]


def _serve(channel: socket.socket, walls: Walls) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wardens are left as zombies
    channel.send(b"{}")
    while True:
        data, sockets, _, _ = socket.recv_fds(channel, _REQUEST, 4)
        if not data:
            return
        if os.fork() == 0:
            channel.close()
            try:
                _watch(walls, json.loads(data), sockets)
            finally:
                os._exit(0)
        for descriptor in sockets:
            os.close(descriptor)


def _watch(walls: Walls, request: dict[str, Any], sockets: Sequence[int]) -> None:
    """Be the warden of one process. The first socket is `control`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    control, *others = sockets
    child = walls.fork()
    if child == 0:
        os.close(control)
        try:
            _become(walls, request, others)
        finally:
            os._exit(1)
    for descriptor in others:
        os.close(descriptor)
    # The process is not waited for until this ends, so its number stays its own.
    clock, limit, ended = (~child << 3) | 2, request["seconds"], ""
    handle = os.pidfd_open(child)
    watched = [control, handle]
    used = 0.0
    while True:
        pause = None if ended else max(0.01, limit - used)
        ready = select.select(watched, [], [], pause)[0]
        if not ended:
            used = time.clock_gettime(clock)
        if handle in ready:
            watched.remove(handle)
            ended = ended or (TIMEOUT if used >= limit else _how(child))
        elif not ended and used >= limit:
            os.kill(child, signal.SIGKILL)
            ended = TIMEOUT
        if control in ready:
            question = os.read(control, 1)
            if not question:
                break
            if question == ENDING and not ended:
                # Its sockets close a little before it has ended.
                gone = select.select([handle], [], [], _ENDING_SECONDS)[0]
                used = time.clock_gettime(clock)
                ended = (TIMEOUT if used >= limit else _how(child)) if gone else EARLY
                os.kill(child, signal.SIGKILL)
            wire.send(control, json.dumps({"cpu": used, "ended": ended}))
    os.kill(child, signal.SIGKILL)


def _how(child: int) -> str:
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if found is None or found.si_code == os.CLD_EXITED:
        return EARLY
    return KILLED if found.si_status == signal.SIGKILL else f"signal {found.si_status}"


def _become(walls: Walls, request: dict[str, Any], sockets: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()
    role = _ROLES[request["role"]]
    if request["role"] == ANSWER:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lopa"]:
            del sys.modules[name]
    else:
        hide_memory()
    walls.confine(int(request["seconds"]) + 2, request["megabytes"])
    role(*sockets)
    os._exit(0)


if __name__ == "__main__":
    main()
