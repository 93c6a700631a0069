"""Errors in the format of OpenAI's API, which its clients turn into their own exceptions.

`check_capacity` makes the 429. The seconds of `Retry-After` come from `retry_after.RetryAfter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send

from lopa.serving.jobs import Failed

# HTTP status → the `type` that OpenAI's API gives with it.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An HTTP status and what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _TYPES[400])
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)

    async def __call__(self, scope: Scope, send: Send) -> None:
        """Send it from a middleware, outside of any route."""
        await self.response()(scope, _no_receive, send)


async def _no_receive() -> Message:
    return {"type": "http.disconnect"}


def shutting_down(retry_after: int) -> ApiError:
    message = "the server is shutting down"
    return ApiError(503, message, code="shutting_down", retry_after=retry_after)


def loading(retry_after: int) -> ApiError:
    message = "the model is still loading: try again soon"
    return ApiError(503, message, code="loading", retry_after=retry_after)


def check_capacity(
    new: int, in_progress: int, capacity: int, retry_after: Callable[[int], int]
) -> None:
    """Raise 429 when `new` sequences do not fit now, 400 when they never will.

    `retry_after` gives the seconds until so many of those in progress have ended.
    """
    if new > capacity:
        raise ApiError(400, f"{new} choices are more than the {capacity} that fit: ask for fewer")
    if in_progress + new > capacity:
        message = f"the server is at capacity ({in_progress} in progress): try again later"
        seconds = retry_after(in_progress + new - capacity)
        raise ApiError(429, message, code="queue_full", retry_after=seconds)


def error_for(failed: Failed) -> ApiError:
    if failed.kind == "invalid":
        return ApiError(400, failed.message, param=failed.param, code="invalid_value")
    if failed.kind in ("shutdown", "unavailable"):
        code = "shutting_down" if failed.kind == "shutdown" else "engine_unavailable"
        return ApiError(503, failed.message, code=code, retry_after=failed.retry_after or 1)
    return ApiError(500, failed.message, code=f"engine_{failed.kind}")
