"""The playground: a page that shows tokens, branches and rounds as a prompt is decoded.

Plain HTML, CSS and ES modules, served from memory: no path of a request is ever opened. The page
loads nothing from other hosts, runs no inline script, and inserts the model's output as text only;
the headers make the browser enforce all three.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from lopa.serving.playground.info import describe

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # The browser validates its copy each time (an empty 304), so that the page and its modules are
    # always of one version.
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    tag: str


@functools.cache
def _files() -> dict[str, _File]:
    found = {}
    for path in sorted(_STATIC.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            found[path.name] = _File(body, _TYPES[path.suffix], tag)
    return found


def _respond(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, "the playground has no such file")
    headers = {**_HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return _respond(request, "index.html")


@router.get("/playground/info")
async def info(request: Request) -> Response:
    """The model and its settings, for the page."""
    state = request.app.state
    # The engine's description: empty until it is ready, None with replicas.
    engine: dict[str, Any] | None = getattr(state.backend, "engine", None)
    if engine is not None and not engine:
        message = "The model is still loading."
        return JSONResponse({"error": {"message": message}}, 503, {"Retry-After": "2"})
    return JSONResponse(describe(state.model, engine or {}), headers={"Cache-Control": "no-store"})


@router.api_route("/playground/{name}", methods=["GET", "HEAD"])
async def static(request: Request, name: str) -> Response:
    return _respond(request, name)
