"""The bodies of answers in the shapes of OpenAI's two endpoints, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lopa.serving.api.request_state import Flow
from lopa.serving.jobs import Finished, Token

# Why an answer ended, in OpenAI's words: on its own or at a stop string, or cut off.
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "rounds": "length"}


class Shape:
    """What the two endpoints have in common."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, response_id: str, model: str, logprobs: bool) -> None:
        self.head = {"id": response_id, "created": int(time.time()), "model": model}
        self.logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def whole(self, flows: Sequence[Flow], per_prompt: int) -> dict[str, Any]:
        choices = []
        for flow in flows:
            assert isinstance(flow.end, Finished)
            choices.append(
                {
                    "index": flow.index,
                    **self.content(flow.text),
                    "logprobs": self._logprobs(flow.index, flow.tokens),
                    "finish_reason": FINISH[flow.end.finish],
                    "lopa": figures(flow.end),
                }
            )
        return {
            **self.head,
            "object": self.kind,
            "choices": choices,
            "usage": usage(flows, per_prompt),
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
            "finish_reason": FINISH[end.finish] if end else None,
        }
        if end is not None:
            choice["lopa"] = figures(end)
        return {**self.head, "object": self.chunk_kind, "choices": [choice]}

    def usage_chunk(self, flows: Sequence[Flow], per_prompt: int) -> dict[str, Any]:
        found = usage(flows, per_prompt)
        return {**self.head, "object": self.chunk_kind, "choices": [], "usage": found}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before there is any text."""
        return None

    def content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, text: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        raise NotImplementedError


class Chat(Shape):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> dict[str, Any]:
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


class Text(Shape):
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
        at = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token.text)
        self._offsets[index] = at
        return {
            "tokens": [t.text for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage(flows: Sequence[Flow], per_prompt: int) -> dict[str, int]:
    """Every prompt counts once, however many answers it has; the end of text counts."""
    asked = sum(flow.accepted.result().prompt_tokens for flow in flows[::per_prompt])
    made = sum(flow.end.tokens for flow in flows if isinstance(flow.end, Finished))
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def figures(end: Finished) -> dict[str, Any]:
    """What this engine adds to a choice."""
    return {
        "finish": end.finish,
        "rounds": end.rounds,
        "tpf": end.tpf,
        "seconds": end.seconds,
        "queue_seconds": end.queue_seconds,
        "engine_seconds": end.engine_seconds,
    }
