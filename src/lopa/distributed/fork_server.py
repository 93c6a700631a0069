"""The fork server: a process that has imported what a rank needs and forks one when it is asked.

Importing torch takes seconds, forking milliseconds: that is the pause a request sees when its group
is rebuilt. It touches no device and starts no thread, so that its children may.

multiprocessing has a fork server too, but its children import the program's main module: a script
that uses `ParallelLLM` without `if __name__ == "__main__"` would then run again in every rank.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from concurrent.futures import Future
from typing import Any

from lopa.distributed.channel import die_with

_MAX_ORDERS = 1 << 20  # bytes


class ForkServer:
    """The supervisor's end of one."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        # A package that is not installed but found through sys.path is found there as well.
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        process: Future[subprocess.Popen[bytes]] = Future()
        self._closed = closed = threading.Event()

        def start() -> None:
            try:
                popen = subprocess.Popen(
                    [sys.executable, "-m", "lopa.distributed.fork_server", str(there.fileno())],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                    env=environment,
                )
            except BaseException as error:
                process.set_exception(error)
            else:
                process.set_result(popen)
                closed.wait()

        with there:
            # It dies with the thread that starts it (`die_with`), and the caller's may end first.
            threading.Thread(target=start, name="fork server", daemon=True).start()
            self.process = process.result()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, orders: Any, end: socket.socket) -> int:
        """A rank with these orders (`RankOrders`), on that end of a channel; its process id."""
        socket.send_fds(self._socket, [pickle.dumps(orders)], [end.fileno()])
        answer = self._socket.recv(64)
        if not answer:
            raise EOFError("the fork server is gone")
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()
        self._closed.set()


def main() -> None:
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    control = socket.socket(fileno=int(sys.argv[1]))
    from lopa.distributed import rank_process

    own = os.getpid()
    while True:
        orders, ends, *_ = socket.recv_fds(control, _MAX_ORDERS, 1)
        if not orders:
            return
        child = os.fork()
        if child == 0:
            _run_child(rank_process.main, own, control, pickle.loads(orders), ends[0])
        os.close(ends[0])
        control.send(str(child).encode())


def _run_child(work: Any, parent: int, control: socket.socket, orders: Any, end: int) -> None:
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
