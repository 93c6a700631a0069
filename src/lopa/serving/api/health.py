"""`/health`, `/metrics`, `/slots` and `/version`."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_state import Backend
from lopa.version import VERSION


class HealthEndpoints:
    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self.backend = backend
        self._metrics = metrics
        self.router = APIRouter()
        self.router.get("/health", summary="Ready for requests?")(self.ready)
        self.router.get("/health/ready", summary="Ready for requests?")(self.ready)
        self.router.get("/health/live", summary="Is the process up?")(self.live)
        for path, route in (("", self.ready), ("/ready", self.ready), ("/live", self.live)):
            self.router.head(f"/health{path}", include_in_schema=False)(route)
        self.router.get("/metrics", summary="Prometheus metrics")(self.metrics)
        self.router.get("/slots", summary="What each request is doing")(self.slots)
        self.router.get("/version", summary="Version of the server")(self.version)

    async def ready(self, deep: bool = False) -> JSONResponse:
        """`deep` asks the engine for a round."""
        await self.backend.refresh()
        error = await self.backend.check_round() if deep and self.backend.ready else ""
        ready = self.backend.ready and not error
        body = {"live": True, "ready": ready, "state": self.backend.state}
        if error:
            body["error"] = error
        return JSONResponse(body, 200 if ready else 503)

    async def live(self) -> JSONResponse:
        return JSONResponse({"live": True})

    async def metrics(self) -> Response:
        await self.backend.refresh()
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def slots(self) -> JSONResponse:
        return JSONResponse({"slots": [request.describe() for request in self.backend.requests()]})

    async def version(self) -> JSONResponse:
        return JSONResponse({"version": VERSION})
