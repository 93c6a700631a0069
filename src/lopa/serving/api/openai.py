"""OpenAI's endpoints: models, completions and chat completions, complete or as a stream.

The 429 path: `_respond` makes a `RequestContext`, which calls `Backend.submit`; that calls
`errors.check_capacity` with the seconds of `Retry-After` from `RetryAfter.for_capacity`. The
capacity is `max_running` + `max_queue` sequences.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lopa.serving.api.errors import ApiError, error_for
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_context import ClientDisconnected, RequestContext
from lopa.serving.api.request_state import Backend
from lopa.serving.api.responses import ChatFormat, ResponseFormat, TextFormat
from lopa.serving.api.schemas import ChatRequest, CompletionRequest
from lopa.serving.jobs import Accepted, Advance, Failed, Finished, Job

DONE = "[DONE]"
_CLIENT_CLOSED = 499  # never sent; for the log


class Endpoints:
    """The routes of `/v1`."""

    def __init__(self, backend: Backend, metrics: Metrics, model: str, max_choices: int) -> None:
        self.backend = backend
        self.metrics = metrics
        self.model = model
        self.max_choices = max_choices
        self._created = int(time.time())
        self.router = APIRouter(prefix="/v1")
        self.router.get("/models", summary="The model that is served")(self.models)
        self.router.get("/models/{name:path}", summary="One model")(self.one_model)
        self.router.post("/completions", summary="Continue a prompt")(self.completions)
        self.router.post("/chat/completions", summary="Reply to a conversation")(self.chat)

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, name: str) -> JSONResponse:
        self._check_model(name)
        return JSONResponse(self._card())

    async def completions(self, body: CompletionRequest, raw_request: Request) -> Response:
        return await self._respond(body, raw_request, TextFormat)

    async def chat(self, body: ChatRequest, raw_request: Request) -> Response:
        return await self._respond(body, raw_request, ChatFormat)

    def _card(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self._created, "owned_by": "lopa"}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"the model {name!r:.200} is not served here: {self.model} is",
                param="model",
                code="model_not_found",
            )

    async def _respond(
        self,
        body: CompletionRequest | ChatRequest,
        raw_request: Request,
        format_type: type[ResponseFormat],
    ) -> Response:
        self._check_model(body.model)
        prompts = body.prompts()
        body.check(self.max_choices, len(prompts))
        response_id = f"{format_type.prefix}-{uuid.uuid4().hex}"
        log_fields = raw_request.state.log_fields
        log_fields["id"], log_fields["user"] = response_id, body.user
        log_fields["ignored"] = ",".join(body.ignored) or None
        jobs = self._jobs(body, prompts, response_id)
        response_format = format_type(response_id, self.model, body.wants_logprobs)
        try:
            context = RequestContext(self.backend, self.metrics, jobs, raw_request.receive)
        except ApiError as error:
            if error.status == 429:
                self.metrics.rejected.inc()
            raise
        try:
            accepted = await context.accepted()
            log_fields["prompt_tokens"] = sum(a.prompt_tokens for a in accepted[:: body.n or 1])
            if body.stream:
                lines = (_trace_lines if body.denoise else _chunks)(context, response_format, body)
                return EventStream(context, lines, log_fields)
            with closing(context):
                requests = await context.results()
            response = response_format.response(requests, body.n or 1)
        except ApiError as error:
            context.close()
            if error.param == "prompt" and format_type is ChatFormat:
                error.param = "messages"
            raise
        except ClientDisconnected:
            return Response(status_code=_CLIENT_CLOSED)
        except BaseException:
            context.close()
            raise
        _log_results(context, log_fields)
        return JSONResponse(response)

    def _jobs(
        self, body: CompletionRequest | ChatRequest, prompts: list[Any], response_id: str
    ) -> list[Job]:
        """One job per choice; those of the same prompt differ by their seed."""
        options, limit, count = body.options(), body.limit(), body.n or 1
        several = len(prompts) * count > 1
        gap: dict[str, Any] = {}
        if isinstance(body, CompletionRequest) and body.suffix:
            gap = {"suffix": body.suffix, "gap_tokens": body.gap_tokens}
        jobs = []
        for number, prompt in enumerate(prompts):
            for i in range(count):
                jobs.append(
                    Job(
                        id=f"{response_id}-{number * count + i}" if several else response_id,
                        prompt=prompt,
                        **gap,
                        options=options,
                        seed_offset=i,
                        max_tokens=limit,
                        stream=bool(body.stream),
                        denoise=body.denoise,
                        logprobs=body.wants_logprobs,
                    )
                )
        return jobs


async def _chunks(
    context: RequestContext, response_format: ResponseFormat, body: CompletionRequest | ChatRequest
) -> AsyncIterator[str]:
    """Final text in order, as chunks of OpenAI's API; an empty line when there is none for long."""
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    def line(chunk: dict[str, Any]) -> str:
        return json.dumps({**chunk, "usage": None} if with_usage else chunk, ensure_ascii=False)

    for request in context.requests:
        if (first := response_format.first_chunk(request.index)) is not None:
            yield line(first)
    async for found in context.events():
        if found is None:
            yield ""
            continue
        index, event = found
        if isinstance(event, Advance) and (event.text or event.tokens):
            yield line(response_format.chunk(index, event.text, event.tokens))
        elif isinstance(event, Finished):
            yield line(response_format.chunk(index, end=event))
        elif isinstance(event, Failed):
            yield json.dumps(error_for(event).body())
            return
    if with_usage:
        yield json.dumps(response_format.usage_chunk(context.requests, body.n or 1))


async def _trace_lines(
    context: RequestContext, response_format: ResponseFormat, body: CompletionRequest | ChatRequest
) -> AsyncIterator[str]:
    """Every round, as the lines of a trace; an empty line when there is none for long."""
    async for found in context.events():
        if found is None:
            yield ""
            continue
        event = found[1]
        if isinstance(event, Failed):
            yield json.dumps({"type": "error", **error_for(event).body()})
        elif isinstance(event, Accepted | Advance | Finished) and event.trace_line is not None:
            yield event.trace_line


class EventStream(Response):
    """Server-sent events; an empty line becomes a comment. Ends with [DONE]."""

    media_type = "text/event-stream"

    def __init__(
        self, context: RequestContext, lines: AsyncIterator[str], log_fields: dict[str, Any]
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=self.media_type,
        )
        del self.headers["content-length"]
        self._context = context
        self._lines = lines
        self._log_fields = log_fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._context):
            try:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                async for line in self._lines:
                    await _send_part(send, f"data: {line}\n\n" if line else ": waiting\n\n")
                await _send_part(send, f"data: {DONE}\n\n", more=False)
            except ClientDisconnected:
                self._log_fields["finish"] = "gone"
                return
        _log_results(self._context, self._log_fields)


async def _send_part(send: Send, text: str, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def _log_results(context: RequestContext, log_fields: dict[str, Any]) -> None:
    """Add the results to the request's log line."""
    finished = [r.end for r in context.requests if isinstance(r.end, Finished)]
    failed = [r.end.kind for r in context.requests if isinstance(r.end, Failed)]
    log_fields["tokens"] = sum(end.tokens for end in finished)
    log_fields["rounds"] = sum(end.rounds for end in finished)
    log_fields["finish"] = ",".join([*failed, *(end.finish for end in finished)])
    seconds = [r.seconds_outside_api for r in context.requests]
    known = [value for value in seconds if value is not None]
    if len(known) == len(seconds):
        log_fields["engine_seconds"] = round(max(known), 6)  # jobs run side by side
