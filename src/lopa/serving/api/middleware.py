"""What every request goes through, outermost first: id and log line, API key, size of the body.

Plain ASGI, so that a client that goes away is seen by the route that works for it.
"""

from __future__ import annotations

import hashlib
import hmac
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

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUIET = ("/health", "/metrics", "/slots")  # asked for all the time
# What anybody may see: whether the server is up, and the page, which asks for a key itself.
_OPEN = re.compile(r"/health(/.*)?|/|/playground(/.*)?|/openapi\.json|/favicon\.ico")


class Identified:
    """Gives a request its id (the client's own, if it is plain) and writes its log line."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        own = given if _ID.fullmatch(given) else uuid.uuid4().hex
        logs.request_id.set(own)
        notes: dict[str, Any] = {}
        scope.setdefault("state", {})["notes"] = notes
        began = written = time.perf_counter()
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
                MutableHeaders(scope=message)["x-request-id"] = own
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
            path = getattr(route, "path", None) or "unknown"  # never what a stranger made up
            self._metrics.requests.labels(_method(scope), path, str(status)).inc()
            if "engine_seconds" in notes and received is not None:  # an answer was made
                self._metrics.overhead.observe(written - received - notes["engine_seconds"])
            level = logging.DEBUG if scope["path"].startswith(_QUIET) else logging.INFO
            line = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.perf_counter() - began, 6),
                "client": (scope.get("client") or (None,))[0],
            }
            log.log(level, "request", extra={**line, **notes})


def _method(scope: Scope) -> str:
    known = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
    return scope["method"] if scope["method"] in known else "other"


class Keys:
    """Lets in whoever shows a key. Comparing takes the same time however much of one is right."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (self._may_pass(scope) or self._knows(scope)):
            error = ApiError(
                401,
                "a valid API key is needed: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error(scope, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        return _OPEN.fullmatch(scope["path"]) is not None or scope["method"] == "OPTIONS"

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them
        return scheme.lower() == "bearer" and any(found)


class Limited:
    """Refuses a body that is too large, before and while it is read."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body is larger than {self._most} bytes: send less"
        said = Headers(scope=scope).get("content-length", "")
        if said.isascii() and said.isdigit() and int(said[:20]) > self._most:
            await ApiError(413, message, code="body_too_large")(scope, send)
            return
        read = 0

        async def receive_some() -> Message:
            nonlocal read
            part = await receive()
            if part["type"] == "http.request":
                read += len(part.get("body", b""))
                if read > self._most:
                    raise HTTPException(413, message)
            return part

        await self._app(scope, receive_some, send)
