"""A connection of a client: uvicorn's, with limits on how long and how many.

uvicorn waits for ever for the rest of a request and for a client that reads its response. Its limit
on connections (`limit_concurrency`) counts those that are silent and refuses the others; here the
one that has waited longest for its client makes way for a new one.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lopa.serving.api.errors import ApiError

_RETRY_SECONDS = 1
_LINGER_SECONDS = 1.0  # for an error to be read
_MAX_HEAD_BYTES = 16_384  # of the headers of a request, as in h11
_SLICE_BYTES = 16_384  # of what was received, between two looks at what it costs
# The parts of a body have so many bytes on average, beyond the first ones.
_PART_BYTES = 64
_FREE_PARTS = 1024


@dataclass(slots=True)
class ConnectionLimits:
    """Shared by the connections of a server."""

    max_connections: int
    request_seconds: float  # for a request to arrive, or for a part of a response to be read
    open: set[Connection] = field(default_factory=set)
    refused: set[Connection] = field(default_factory=set)  # and not yet closed
    waiting: dict[Connection, None] = field(default_factory=dict)  # for their clients, oldest first

    def has_room(self) -> bool:
        """Whether another may stay; drops the one that waits longest for its client."""
        if len(self.open) >= self.max_connections and self.waiting:
            next(iter(self.waiting)).abort()
        return len(self.open) < self.max_connections


class _CountingConnection(h11.Connection):
    """Counts the parts of a request's body. Each costs time, and a chunk may be of one byte."""

    body_parts = 0
    body_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.body_parts = self.body_bytes = 0
        elif isinstance(event, h11.Data):
            self.body_parts += 1
            self.body_bytes += len(event.data)
        return event


class Connection(H11Protocol):
    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: _CountingConnection = _CountingConnection(
            h11.SERVER, self.config.h11_max_incomplete_event_size or _MAX_HEAD_BYTES
        )
        self._limits = limits
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refused = False  # what comes is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._limits.has_room():
            message = "too many connections: try again later"
            self._respond(ApiError(503, message, retry_after=_RETRY_SECONDS))
            return
        self._limits.open.add(self)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _SLICE_BYTES):
            if self._refused or self.transport.is_closing():
                return
            super().data_received(data[begin : begin + _SLICE_BYTES])
            if self.conn.body_parts > _FREE_PARTS + self.conn.body_bytes / _PART_BYTES:
                self._respond(ApiError(400, "the body is sent in parts that are too small"))
        self._update()

    def send_400_response(self, msg: str) -> None:
        self._respond(ApiError(400, f"{msg} Send HTTP/1.1"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_waiting()  # the next request has its own time
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._limits.waiting[self] = None  # uvicorn closes it when nothing comes
        else:
            self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.request_seconds, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def abort(self) -> None:
        """Close it at once; what is not sent is dropped."""
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self._limits.open.discard(self)
        self._limits.refused.discard(self)
        self._stop_waiting()

    def _update(self) -> None:
        """Wait for the rest of a request, or stop waiting when it is complete."""
        waits = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if self.transport.is_closing() or not waits:
            self._stop_waiting()
        elif self._request_timer is None:
            self._limits.waiting.setdefault(self)
            self._request_timer = self.loop.call_later(self._limits.request_seconds, self._expire)

    def _stop_waiting(self) -> None:
        self._limits.waiting.pop(self, None)
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _expire(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.abort()  # nothing has come, as from a browser that opens connections in advance
            return
        message = f"the request took longer than {self._limits.request_seconds:g} seconds to arrive"
        self._respond(ApiError(408, f"{message}: send it faster"))

    def _respond(self, error: ApiError) -> None:
        """Send an error, unless a response has begun, and close.

        Not at once, while there are few of these: a connection that is closed with unread data is
        reset, and the client loses the response.
        """
        self._stop_waiting()
        self._refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
                **error.headers,
            }
            reason = HTTPStatus(error.status).phrase
            response = h11.Response(
                status_code=error.status, headers=list(headers.items()), reason=reason
            )
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._limits.refused.add(self)
        few = len(self._limits.refused) <= self._limits.max_connections
        self.loop.call_later(_LINGER_SECONDS if few else 0, self.abort)
