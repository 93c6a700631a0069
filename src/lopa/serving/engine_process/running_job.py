"""A job on its way through the engine, and what is reported of it, in plain data."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lopa.serving.jobs import Accepted, Advance, Event, Finished, Job, Token

if TYPE_CHECKING:
    from lopa.engine.output import Event as Step
    from lopa.engine.session import Session

MASK = "▁"
_LEAST_LOGPROB = -9999.0  # what OpenAI's API says for a probability of nothing
_SUMMARY_WITHOUT = ("text", "token_ids")


class Task:
    """A job on its way through the engine: its session, and what has been reported of it."""

    def __init__(self, job: Job, session: Session, since: float) -> None:
        self.job = job
        self.session = session
        self.since = since  # when the job came
        self._queue_seconds: float | None = None
        self._settled = 0
        self._text: list[str] = []
        self._probabilities: dict[int, float] = {}  # by position
        self._shown: set[int] = set()  # tokens whose pieces have been sent

    def accepted(self, max_tokens: int) -> Accepted:
        ids = self.session.trace.prompt_ids
        line = None
        if self.job.denoise:
            piece = self.session.tokenizer.piece if self.session.tokenizer else str
            line = _line(
                type="run",
                id=self.job.id,
                prompt_ids=ids,
                prompt_pieces=[piece(i) for i in ids],
                eos_ids=sorted(self.session.decoder.eos_ids),
                settings=self.session.trace.settings,
            )
        return Accepted(prompt_tokens=len(ids), max_tokens=max_tokens, line=line)

    def report(self, step: Step) -> Iterable[Event]:
        """What a round comes to for whoever waits for it."""
        record = step.round
        if self._queue_seconds is None:
            self._queue_seconds = time.perf_counter() - self.since - record.seconds
        anchor = len(record.branches) - 1
        text = step.text
        if step.output is not None and self.session.tokenizer is None:
            text = " ".join(map(str, step.output.token_ids))
        yield Advance(
            round=record.index,
            text=text,
            filled=sum(token != self.session.decoder.mask_id for token in step.tokens),
            settled=self.session.detokenized,
            seconds=record.seconds,
            rank=0 if record.winner == anchor else record.winner + 1,
            branches=len(record.branches),
            tokens=self._tokens(step) if self.job.logprobs else [],
            line=self._round_line(step, text) if self.job.denoise else None,
        )
        if step.output is not None:
            output = step.output
            yield Finished(
                finish=output.finish,
                tokens=output.tokens,
                rounds=output.rounds,
                tpf=output.tpf,
                seconds=output.seconds,
                queue_seconds=self._queue_seconds,
                engine_seconds=time.perf_counter() - self.since,
                line=self._end_line(step) if self.job.denoise else None,
            )

    def _tokens(self, step: Step) -> list[Token]:
        """The tokens that became text in this round, with their probabilities when filled."""
        record, tokenizer = step.round, self.session.tokenizer
        won = record.branches[record.winner].lookahead
        self._probabilities.update((fill.position, fill.max_prob) for fill in record.fills)
        if won is not None:
            self._probabilities[won.position] = won.max_prob
        begin, self._settled = self._settled, self.session.detokenized
        found = []
        for index in range(begin, self._settled):
            token = step.tokens[index]
            probability = self._probabilities.get(self.session.decoder.prompt + index, 0.0)
            text = tokenizer.piece(token) if tokenizer else str(token)
            raw = tokenizer.to_bytes([token]) if tokenizer and tokenizer.is_byte_level else None
            found.append(
                Token(
                    id=token,
                    text=text,
                    bytes=list(text.encode() if raw is None else raw),
                    logprob=math.log(probability) if probability > 0 else _LEAST_LOGPROB,
                )
            )
        return found

    def _round_line(self, step: Step, text: str) -> str:
        record = step.round
        self._text.append(text)
        seen = [fill.token for fill in record.fills]
        seen += [ahead.token for ahead in record.spawned]
        seen += [b.lookahead.token for b in record.branches if b.lookahead is not None]
        return _line(
            type="round",
            **asdict(record),
            text=text,
            provisional=self._provisional(step.tokens),
            pieces=self._pieces(seen),
        )

    def _end_line(self, step: Step) -> str:
        assert step.output is not None
        summary = step.output.summary()
        return _line(
            type="end",
            token_ids=step.output.token_ids,
            finish=step.output.finish,
            text="".join(self._text),
            summary={k: v for k, v in summary.items() if k not in _SUMMARY_WITHOUT},
            pieces=self._pieces(step.output.token_ids),
        )

    def _provisional(self, tokens: list[int]) -> str:
        """What stands to the right of the final text, as it may still turn out."""
        mask, tokenizer = self.session.decoder.mask_id, self.session.tokenizer
        piece = tokenizer.piece if tokenizer else str
        return "".join(MASK if t == mask else piece(t) for t in tokens[self.session.detokenized :])

    def _pieces(self, tokens: Iterable[int]) -> dict[str, str]:
        if self.session.tokenizer is None:
            return {}
        fresh = sorted(set(tokens) - self._shown)
        self._shown.update(fresh)
        return {str(token): self.session.tokenizer.piece(token) for token in fresh}


def _line(**record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
