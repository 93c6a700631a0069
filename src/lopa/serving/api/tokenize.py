"""`/tokenize`: the tokens of a prompt as a request would have them, with vLLM's names of fields."""

from __future__ import annotations

import uuid
from contextlib import closing
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from lopa.serving.api.errors import ApiError
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_context import ClientDisconnected, RequestContext
from lopa.serving.api.request_state import Backend
from lopa.serving.api.schemas import Message
from lopa.serving.jobs import Job


class TokenizeRequest(BaseModel):
    """A text, or the messages of a chat, to which the model's template is applied."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None


class TokenizeEndpoint:
    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self.backend = backend
        self._metrics = metrics
        self.router = APIRouter()
        self.router.post("/tokenize", summary="The tokens of a prompt")(self.tokenize)

    async def tokenize(self, body: TokenizeRequest, raw_request: Request) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        prompt = body.prompt if body.messages is None else [m.plain() for m in body.messages]
        job = Job(id=f"tokenize-{uuid.uuid4().hex}", prompt=prompt, tokenize=True)
        try:
            context = RequestContext(self.backend, self._metrics, [job], raw_request.receive)
            with closing(context):
                (accepted,) = await context.accepted()
        except ClientDisconnected:
            return Response(status_code=499)  # never sent; for the log
        except ApiError as error:
            if error.status == 429:
                self._metrics.rejected.inc()
            if error.param == "prompt" and body.messages is not None:
                error.param = "messages"
            raise
        found = {
            "count": accepted.prompt_tokens,
            "max_model_len": accepted.max_tokens,
            "tokens": accepted.token_ids,
        }
        return JSONResponse(found)
