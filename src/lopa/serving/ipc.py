"""Messages between the API and an engine process: JSON, preceded by its length in four bytes.

JSON and not pickle: a message can never run code in the process that reads it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!I")


def frame(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class Channel:
    """The engine's side: blocking. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._file = connected.makefile("rb")
        self._send_lock = threading.Lock()

    def send(self, message: Any) -> None:
        data = frame(message)
        with self._send_lock:
            self._socket.sendall(data)

    def receive(self) -> Any | None:
        """The next message; None when the connection is closed."""
        try:
            head = self._file.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            body = self._file.read(length)
        except OSError:
            return None
        return json.loads(body) if len(body) == length else None


async def receive(reader: asyncio.StreamReader) -> Any | None:
    """The API's side: the next message; None when the connection is closed, even in mid-message."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None
