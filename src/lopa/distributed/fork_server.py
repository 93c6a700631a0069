"""The nursery: a process that has imported what a rank needs and forks one whenever it is asked.

Importing torch takes seconds, forking milliseconds: that is the pause a request sees when its group
is rebuilt. It touches no device and starts no thread, so that its children may.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from typing import Any

from lopa.distributed.channel import die_with

_MOST = 1 << 20  # bytes of a rank's orders


class Nursery:
    """The supervisor's end of one; `cuts` says that its ranks hold parts of a model."""

    def __init__(self, cuts: bool) -> None:
        self._end, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        # A package that is not installed but found through sys.path is found there as well.
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        with there:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "lopa.distributed.fork_server",
                    str(there.fileno()),
                    str(int(cuts)),
                ],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                env=environment,
            )

    def fork(self, orders: dict[str, Any], end: socket.socket) -> int:
        """A rank with these orders, on that end of a channel; its process id."""
        socket.send_fds(self._end, [pickle.dumps(orders)], [end.fileno()])
        answer = self._end.recv(64)
        if not answer:
            raise EOFError("the nursery is gone")
        return int(answer)

    def close(self) -> None:
        self._end.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    parent = os.getppid()
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    control = socket.socket(fileno=int(sys.argv[1]))
    from lopa.distributed import rank_process as worker

    if int(sys.argv[2]):
        import_module(
            "lopa.distributed.tensor_parallel"
        )  # takes too long for a rank to do it by itself
    own = os.getpid()
    while True:
        orders, ends, *_ = socket.recv_fds(control, _MOST, 1)
        if not orders:
            return
        child = os.fork()
        if child == 0:
            _become(worker.main, own, control, pickle.loads(orders), ends[0])
        os.close(ends[0])
        control.send(str(child).encode())


def _become(work: Any, parent: int, control: socket.socket, orders: Any, end: int) -> None:
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        work(orders, socket.socket(fileno=end))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
