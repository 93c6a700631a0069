"""Response bodies in the formats of OpenAI's two endpoints, complete or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lopa.serving.api.request_state import RequestState
from lopa.serving.jobs import Finished, Token

# Why a sequence ended → OpenAI's `finish_reason`.
FINISH_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "filled": "stop",
    "length": "length",
    "rounds": "length",
}


class ResponseFormat:
    """What the two endpoints have in common."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, response_id: str, model: str, logprobs: bool) -> None:
        self.head = {"id": response_id, "created": int(time.time()), "model": model}
        self.logprobs = logprobs
        self._offsets: dict[int, int] = {}  # by choice: characters sent so far

    def response(self, requests: Sequence[RequestState], per_prompt: int) -> dict[str, Any]:
        choices = []
        for request in requests:
            assert isinstance(request.end, Finished)
            choices.append(
                {
                    "index": request.index,
                    **self.content(request.text),
                    "logprobs": self._logprobs(request.index, request.tokens),
                    "finish_reason": FINISH_REASONS[request.end.finish],
                    "lopa": statistics(request.end),
                }
            )
        return {
            **self.head,
            "object": self.kind,
            "choices": choices,
            "usage": usage(requests, per_prompt),
        }

    def chunk(
        self,
        index: int,
        text: str | None = None,
        tokens: Sequence[Token] = (),
        end: Finished | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            **self.delta(text),
            "logprobs": self._logprobs(index, tokens) if tokens else None,
            "finish_reason": FINISH_REASONS[end.finish] if end else None,
        }
        if end is not None:
            choice["lopa"] = statistics(end)
        return {**self.head, "object": self.chunk_kind, "choices": [choice]}

    def usage_chunk(self, requests: Sequence[RequestState], per_prompt: int) -> dict[str, Any]:
        found = usage(requests, per_prompt)
        return {**self.head, "object": self.chunk_kind, "choices": [], "usage": found}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """What a stream sends before any text."""
        return None

    def content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, text: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatFormat(ResponseFormat):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def first_chunk(self, index: int) -> dict[str, Any]:
        chunk = self.chunk(index)
        chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return chunk

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {"token": t.text, "logprob": t.logprob, "bytes": t.bytes, "top_logprobs": []}
            for t in tokens
        ]
        return {"content": content, "refusal": None}


class TextFormat(ResponseFormat):
    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        offsets = []
        offset = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[index] = offset
        return {
            "tokens": [t.text for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage(requests: Sequence[RequestState], per_prompt: int) -> dict[str, int]:
    """A prompt counts once, however many choices it has; EOS counts as a token."""
    prompt_tokens = sum(
        request.accepted.result().prompt_tokens for request in requests[::per_prompt]
    )
    completion_tokens = sum(
        request.end.tokens for request in requests if isinstance(request.end, Finished)
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def statistics(end: Finished) -> dict[str, Any]:
    """The `lopa` object of a choice."""
    return {
        "finish": end.finish,
        "rounds": end.rounds,
        "tpf": end.tpf,
        "branches": end.branches,
        "seconds": end.seconds,
        "queue_seconds": end.queue_seconds,
        "engine_seconds": end.engine_seconds,
    }
