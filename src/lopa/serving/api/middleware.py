"""Middleware, outermost first: request id and log line, early responses, hosts and origins, API
keys, size of the body.

Plain ASGI, so that a route sees its client disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lopa.serving import logs
from lopa.serving.api.errors import ApiError
from lopa.serving.api.metrics import Metrics

log = logging.getLogger("lopa.serving")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_POLLED = ("/health", "/metrics", "/slots")  # logged at debug level only
# Paths without a key: health, and the page with what it shows of the model; it asks for the key.
_PUBLIC = re.compile(r"/health(/.*)?|/|/playground/[^/]*|/favicon\.ico")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_LOCAL_NAME = re.compile(r"(.*\.)?localhost")


class RequestId:
    """Gives a request its id (the client's, if it is plain) and writes its log line.

    Routes add to the line through `request.state.log_fields`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        logs.request_id.set(request_id)
        log_fields: dict[str, Any] = {}
        scope.setdefault("state", {})["log_fields"] = log_fields
        arrived = written = time.perf_counter()
        received: float | None = None  # the last byte of the request
        status = 0

        async def receive_timed() -> Message:
            nonlocal received
            message = await receive()
            if received is None and not message.get("more_body"):
                received = time.perf_counter()
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status, written
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)
            written = time.perf_counter()

        try:
            await self._app(scope, receive_timed, send_with_id)
        except Exception:
            log.exception("failed", extra={"path": scope["path"]})
            if not status:
                await ApiError(500, "the server failed; its log says why")(scope, send_with_id)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", None) or "unknown"  # never a path that a client made up
            self._metrics.requests.labels(_method(scope), path, str(status)).inc()
            if "engine_seconds" in log_fields and received is not None:  # all jobs finished
                self._metrics.overhead.observe(written - received - log_fields["engine_seconds"])
            level = logging.DEBUG if scope["path"].startswith(_POLLED) else logging.INFO
            line = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.perf_counter() - arrived, 6),
                "client": (scope.get("client") or (None,))[0],
            }
            log.log(level, "request", extra={**line, **log_fields})


def _method(scope: Scope) -> str:
    known = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
    return scope["method"] if scope["method"] in known else "other"


class EarlyResponse:
    """Lets a response reach a client that is still sending its body, and then closes.

    A connection that is closed with unread data is reset, and the client loses the response: the
    rest of the body is read and dropped first, for `request_seconds` at most. A request whose end
    is in doubt, with both Content-Length and Transfer-Encoding, is refused.
    """

    def __init__(self, app: ASGIApp, request_seconds: float) -> None:
        self._app = app
        self._request_seconds = request_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        chunked = "transfer-encoding" in headers
        received = not chunked and headers.get("content-length", "0").strip("0") == ""

        async def receive_noted() -> Message:
            nonlocal received
            message = await receive()
            received = received or not message.get("more_body")
            return message

        async def send_lingering(message: Message) -> None:
            if not received and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            if received or message.get("more_body") or message["type"] != "http.response.body":
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._request_seconds):
                    while not received:
                        await receive_noted()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        if chunked and (scope["http_version"] == "1.0" or "content-length" in headers):
            received = False  # whatever follows is not read as another request
            error = ApiError(400, "the length of the body is in doubt: send Content-Length alone")
            await error(scope, send_lingering)
            return
        await self._app(scope, receive_noted, send_lingering)


class AllowedHosts:
    """Refuses names and origins that are not this server's.

    A page of another site can have its own name resolve to this server (DNS rebinding) and would
    then be of the same origin. It cannot do that to an address, to localhost or to a name that is
    known here. Origins are checked too, so that a page of another site gets no answer at all.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in hosts
        self._names = {name.lower().rstrip(".") for name in hosts}
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(Headers(scope=scope))) is not None:
            await error(scope, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_ours(host):  # HTTP/1.0 need not have it; browsers do
            message = f"the host {host!r:.200} is not served here: start with --allowed-host"
            return ApiError(403, message, code="unknown_host")
        if origin is None or origin in self._origins or "*" in self._origins:
            return None
        if host is None or origin.lower().partition("://")[2] != host.lower():
            message = f"pages of {origin!r:.200} are not allowed: start with --cors-origin"
            return ApiError(403, message, code="unknown_origin")
        return None

    def _is_ours(self, host: str) -> bool:
        if self._any:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(found["name"].strip("[]"))
            return True
        name = found["name"].lower().rstrip(".")
        return name in self._names or _LOCAL_NAME.fullmatch(name) is not None


class ApiKeys:
    """Refuses requests without a valid key. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (_is_public(scope) or self._has_key(scope)):
            error = ApiError(
                401,
                "a valid API key is needed: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error(scope, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [hmac.compare_digest(given, digest) for digest in self._digests]  # no early exit
        return scheme.lower() == "bearer" and any(found)


def _is_public(scope: Scope) -> bool:
    return _PUBLIC.fullmatch(scope["path"]) is not None or scope["method"] == "OPTIONS"


class BodyLimit:
    """Refuses a body that is too large, by its Content-Length or while it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body is larger than {self._max_bytes} bytes: send less"
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_bytes:
            await ApiError(413, message, code="body_too_large")(scope, send)
            return
        read = 0

        async def receive_limited() -> Message:
            nonlocal read
            part = await receive()
            if part["type"] == "http.request":
                read += len(part.get("body", b""))
                if read > self._max_bytes:
                    raise HTTPException(413, message)
            return part

        await self._app(scope, receive_limited, send)
