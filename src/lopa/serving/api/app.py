"""The application: routes, what requests go through, and how errors are put."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from lopa.serving.api.errors import ApiError
from lopa.serving.api.health import Operations
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.middleware import Identified, Keys, Limited
from lopa.serving.api.openai import Endpoints
from lopa.serving.api.request_state import Backend
from lopa.serving.api.schemas import refusal
from lopa.serving.config import ServeConfig
from lopa.version import VERSION

_PAGE = "lopa.serving.playground"


def create_app(backend: Backend, metrics: Metrics, config: ServeConfig, model: str) -> FastAPI:
    """Serve `backend` under the name `model`. The backend is started and stopped with the app."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        try:
            yield
        finally:
            await backend.stop()

    app = FastAPI(
        title="lopa",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        middleware=_middleware(metrics, config),
        exception_handlers={
            ApiError: _tell,
            RequestValidationError: _tell_invalid,
            HTTPException: _tell_http,
        },
    )
    app.state.backend, app.state.model = backend, model  # the page tells its readers
    metrics.watch(backend)
    app.include_router(Endpoints(backend, metrics, model, config.max_choices).router)
    app.include_router(Operations(backend, metrics).router)
    if find_spec(_PAGE) is not None:
        app.include_router(import_module(_PAGE).router, include_in_schema=False)
    return app


def _middleware(metrics: Metrics, config: ServeConfig) -> list[Middleware]:
    found = [Middleware(Identified, metrics=metrics)]
    if config.cors_origin:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origin),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if config.api_key:
        found.append(Middleware(Keys, keys=config.api_key))
    found.append(Middleware(Limited, most=config.max_body_bytes))
    return found


async def _tell(request: Request, error: Any) -> Response:
    return _response(error)


async def _tell_invalid(request: Request, error: Any) -> Response:
    return _response(refusal(error.errors()))


async def _tell_http(request: Request, error: Any) -> Response:
    messages = {
        404: "there is nothing at this path: see /v1/models, /v1/completions, /v1/chat/completions",
        405: "this path does not take this method",
    }
    message = messages.get(error.status_code, str(error.detail))
    return _response(ApiError(error.status_code, message, headers=error.headers))


def _response(error: ApiError) -> Response:
    return error.response()
