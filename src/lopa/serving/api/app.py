"""The application: routes, middleware and error handlers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from lopa.serving.api.errors import ApiError
from lopa.serving.api.health import HealthEndpoints
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.middleware import (
    AllowedHosts,
    ApiKeys,
    BodyLimit,
    EarlyResponse,
    RequestId,
)
from lopa.serving.api.openai import Endpoints
from lopa.serving.api.request_state import Backend
from lopa.serving.api.schemas import validation_error
from lopa.serving.api.tokenize import TokenizeEndpoint
from lopa.serving.config import ServeConfig
from lopa.serving.playground import router as playground
from lopa.version import VERSION


def create_app(backend: Backend, metrics: Metrics, config: ServeConfig, model: str) -> FastAPI:
    """Serve `backend` under the name `model`. The backend starts and stops with the app."""

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
        docs_url=None,  # it loads scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        middleware=_middleware(metrics, config),
        exception_handlers={
            ApiError: _handle_api_error,
            RequestValidationError: _handle_invalid_request,
            HTTPException: _handle_http_error,
        },
    )
    app.state.backend, app.state.model = backend, model  # read by the playground
    metrics.watch(backend)
    app.include_router(Endpoints(backend, metrics, model, config.max_choices).router)
    app.include_router(TokenizeEndpoint(backend, metrics).router)
    app.include_router(HealthEndpoints(backend, metrics).router)
    app.include_router(playground, include_in_schema=False)
    return app


def _middleware(metrics: Metrics, config: ServeConfig) -> list[Middleware]:
    hosts = (*config.allowed_host, config.host, socket.gethostname())
    found = [
        Middleware(RequestId, metrics=metrics),
        Middleware(EarlyResponse, request_seconds=config.request_seconds),
        Middleware(AllowedHosts, hosts=hosts, origins=config.cors_origin),
    ]
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
        found.append(Middleware(ApiKeys, keys=config.api_key))
    found.append(Middleware(BodyLimit, max_bytes=config.max_body_bytes))
    return found


async def _handle_api_error(request: Request, error: Any) -> Response:
    response: Response = error.response()
    return response


async def _handle_invalid_request(request: Request, error: Any) -> Response:
    return validation_error(error.errors()).response()


async def _handle_http_error(request: Request, error: Any) -> Response:
    messages = {
        404: "there is nothing at this path: see /v1/models, /v1/completions, /v1/chat/completions",
        405: "this path does not take this method",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()
