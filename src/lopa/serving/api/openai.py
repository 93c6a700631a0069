"""OpenAI's endpoints: models, completions and chat completions, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lopa.serving.api.errors import ApiError, of_failure
from lopa.serving.api.metrics import Metrics
from lopa.serving.api.request_context import Exchange, Gone
from lopa.serving.api.request_state import Backend
from lopa.serving.api.responses import Chat, Shape, Text
from lopa.serving.api.schemas import ChatRequest, CompletionRequest
from lopa.serving.jobs import Accepted, Advance, Failed, Finished, Job

DONE = "[DONE]"
_GONE = 499  # nobody reads it; for the log


class Endpoints:
    """The routes and what they work with."""

    def __init__(self, backend: Backend, metrics: Metrics, model: str, max_choices: int) -> None:
        self.backend = backend
        self.metrics = metrics
        self.model = model
        self.max_choices = max_choices
        self._created = int(time.time())
        self.router = APIRouter(prefix="/v1")
        self.router.get("/models", summary="What is served")(self.models)
        self.router.get("/models/{name:path}", summary="One model")(self.one_model)
        self.router.post("/completions", summary="Go on from a prompt")(self.completions)
        self.router.post("/chat/completions", summary="Answer a conversation")(self.chat)

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, name: str) -> JSONResponse:
        self._check_model(name)
        return JSONResponse(self._card())

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        return await self._answer(body, request, Text)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._answer(body, request, Chat)

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

    async def _answer(
        self, body: CompletionRequest | ChatRequest, request: Request, shape_of: type[Shape]
    ) -> Response:
        self._check_model(body.model)
        prompts = body.prompts()
        body.check(self.max_choices, len(prompts))
        response_id = f"{shape_of.prefix}-{uuid.uuid4().hex}"
        notes = request.state.notes
        notes["id"], notes["user"] = response_id, body.user
        jobs = self._jobs(body, prompts, response_id)
        shape = shape_of(response_id, self.model, body.wants_logprobs)
        try:
            exchange = Exchange(self.backend, self.metrics, jobs, request.receive)
        except ApiError as error:
            if error.status == 429:
                self.metrics.rejected.inc()
            raise
        try:
            accepted = await exchange.accepted()
            notes["prompt_tokens"] = sum(a.prompt_tokens for a in accepted[:: body.n or 1])
            if body.stream:
                events = _denoised if body.denoise else _texts
                return EventStream(exchange, events(exchange, shape, body), notes)
            with exchange:
                flows = await exchange.results()
            whole = shape.whole(flows, body.n or 1)
        except ApiError as error:
            exchange.close()
            if error.param == "prompt" and shape_of is Chat:
                error.param = "messages"
            raise
        except Gone:
            return Response(status_code=_GONE)
        except BaseException:
            exchange.close()
            raise
        _note_ends(exchange, notes)
        return JSONResponse(whole)

    def _jobs(
        self, body: CompletionRequest | ChatRequest, prompts: list[Any], response_id: str
    ) -> list[Job]:
        """One job an answer: those to the same prompt differ by their seed."""
        options, limit, count = body.options(), body.limit(), body.n or 1
        several = len(prompts) * count > 1
        jobs = []
        for number, prompt in enumerate(prompts):
            for i in range(count):
                jobs.append(
                    Job(
                        id=f"{response_id}-{number * count + i}" if several else response_id,
                        prompt=prompt,
                        options=options,
                        nth=i,
                        max_tokens=limit,
                        stream=bool(body.stream),
                        denoise=body.denoise,
                        logprobs=body.wants_logprobs,
                    )
                )
        return jobs


async def _texts(
    exchange: Exchange, shape: Shape, body: CompletionRequest | ChatRequest
) -> AsyncIterator[str]:
    """Final text, in order."""
    counted = body.stream_options is not None and bool(body.stream_options.include_usage)

    def line(chunk: dict[str, Any]) -> str:
        return json.dumps({**chunk, "usage": None} if counted else chunk, ensure_ascii=False)

    for flow in exchange.flows:
        if (opening := shape.opening(flow.index)) is not None:
            yield line(opening)
    async for found in exchange.events():
        if found is None:
            yield ""
            continue
        index, event = found
        if isinstance(event, Advance) and (event.text or event.tokens):
            yield line(shape.chunk(index, event.text, event.tokens))
        elif isinstance(event, Finished):
            yield line(shape.chunk(index, end=event))
        elif isinstance(event, Failed):
            yield json.dumps(of_failure(event).body())
            return
    if counted:
        yield json.dumps(shape.usage_chunk(exchange.flows, body.n or 1))


async def _denoised(
    exchange: Exchange, shape: Shape, body: CompletionRequest | ChatRequest
) -> AsyncIterator[str]:
    """Every round, in the form of a trace's lines."""
    async for found in exchange.events():
        if found is None:
            yield ""
            continue
        event = found[1]
        if isinstance(event, Failed):
            yield json.dumps({"type": "error", **of_failure(event).body()})
        elif isinstance(event, Accepted | Advance | Finished) and event.line is not None:
            yield event.line


class EventStream(Response):
    """Server-sent events; an empty line from the source is a sign of life. Ends with [DONE]."""

    media_type = "text/event-stream"

    def __init__(
        self, exchange: Exchange, lines: AsyncIterator[str], notes: dict[str, Any]
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=self.media_type,
        )
        del self.headers["content-length"]
        self._exchange = exchange
        self._lines = lines
        self._notes = notes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._exchange:
            try:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                async for line in self._lines:
                    await _send_part(send, f"data: {line}\n\n" if line else ": waiting\n\n")
                await _send_part(send, f"data: {DONE}\n\n", more=False)
            except Gone:
                self._notes["finish"] = "gone"
                return
        _note_ends(self._exchange, self._notes)


async def _send_part(send: Send, text: str, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def _note_ends(exchange: Exchange, notes: dict[str, Any]) -> None:
    """For the log line of the request."""
    ends = [flow.end for flow in exchange.flows if isinstance(flow.end, Finished)]
    failed = [flow.end.kind for flow in exchange.flows if isinstance(flow.end, Failed)]
    notes["tokens"] = sum(end.tokens for end in ends)
    notes["rounds"] = sum(end.rounds for end in ends)
    notes["finish"] = ",".join([*failed, *(end.finish for end in ends)])
    spent = [flow.elsewhere for flow in exchange.flows]
    known = [seconds for seconds in spent if seconds is not None]
    if len(known) == len(spent):
        notes["engine_seconds"] = round(max(known), 6)  # of answers made side by side
