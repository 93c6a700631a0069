"""Messages between a supervisor and its ranks: pickled, length first, over a pair of sockets.

Both ends are processes of ours, joined by a socket pair that nobody else can reach. Unlike
multiprocessing's Connection, reading never waits for the rest of a message: a rank that is stopped
in the middle of one must not stop the supervisor.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from typing import Any

_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1


class Channel:
    """One end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._sending = threading.Lock()
        self._pending = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[Any, ...]:
        """Wait for a message; EOFError when the other end is gone."""
        while True:
            for message in self._complete():
                return message
            self._read()

    def received(self) -> list[tuple[Any, ...]]:
        """The messages that are there once the socket is readable; EOFError when it has ended."""
        self._read()
        return self._complete(every=True)

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> None:
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._pending += data

    def _complete(self, every: bool = False) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        while len(self._pending) >= _LENGTH.size and (every or not found):
            (size,) = _LENGTH.unpack_from(self._pending)
            end = _LENGTH.size + size
            if len(self._pending) < end:
                break
            found.append(pickle.loads(self._pending[_LENGTH.size : end]))
            del self._pending[:end]
        return found


def die_with(parent: int) -> None:
    """Be killed when the parent's thread that made this process ends, even while stopped.

    Linux alone can do that; elsewhere the end of the channel is what ends a rank.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it went before we could ask
            os._exit(1)
