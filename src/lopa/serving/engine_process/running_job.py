"""A job that runs in the engine, and the events that report it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lopa.serving.jobs import Accepted, Advance, Event, Finished, Job, Token
from lopa.trace import gap_fields

if TYPE_CHECKING:
    from lopa.engine.output import Event as Step
    from lopa.engine.session import Session

MASK = "▁"
_MIN_LOGPROB = -9999.0  # OpenAI's value for a probability of 0
_NOT_IN_SUMMARY = ("text", "token_ids")  # the `end` line has them itself


class RunningJob:
    """A job, its session, and what has been reported of it."""

    def __init__(self, job: Job, session: Session, arrived: float) -> None:
        self.job = job
        self.session = session
        self.arrived = arrived  # by time.perf_counter
        self._queue_seconds: float | None = None
        self._reported_tokens = 0
        self._text: list[str] = []
        self._probabilities: dict[int, float] = {}  # by position
        self._sent_pieces: set[int] = set()  # token ids

    def accepted(self, max_tokens: int) -> Accepted:
        ids, decoder = self.session.trace.prompt_ids, self.session.decoder
        trace_line = None
        if self.job.denoise:
            piece = self.session.tokenizer.piece if self.session.tokenizer else str
            trace_line = _json_line(
                type="run",
                id=self.job.id,
                prompt_ids=ids,
                prompt_pieces=[piece(i) for i in ids],
                eos_ids=sorted({*decoder.eos_ids, *decoder.never}),
                settings=self.session.trace.settings,
                **self._gap_fields(piece),
            )
        given = len(ids) + sum(map(len, self.session.trace.pinned_ids))
        return Accepted(prompt_tokens=given, max_tokens=max_tokens, trace_line=trace_line)

    def _gap_fields(self, piece: Callable[[int], str]) -> dict[str, Any]:
        """Pinned text, and as many masks as there are at first: the longest that is tried."""
        found = gap_fields(self.session.trace)
        if found:
            ids = {i for after in found["pinned_ids"] for i in after}
            found["pieces"] = {str(i): piece(i) for i in sorted(ids)}
        return found

    def report(self, step: Step) -> Iterable[Event]:
        """The events of a round."""
        record, auto = step.round, self.session.decoder.auto
        if self._queue_seconds is None:
            self._queue_seconds = time.perf_counter() - self.arrived - record.seconds
        placed = record.branches[record.winner].lookaheads
        text = step.text
        if step.output is not None and self.session.tokenizer is None:
            text = " ".join(map(str, step.output.token_ids))
        yield Advance(
            round=record.index,
            text=text,
            filled=len(step.tokens) - step.tokens.count(self.session.decoder.mask_id),
            seconds=record.seconds,
            winner_rank=record.winner + 1 if placed else 0,
            branches=len(record.branches),
            expected_gain=0.0 if auto is None else auto.expected_gain,
            tokens=self._tokens(step) if self.job.logprobs else [],
            trace_line=self._round_line(step, text) if self.job.denoise else None,
        )
        if step.output is not None:
            output = step.output
            yield Finished(
                finish=output.finish,
                tokens=output.tokens,
                rounds=output.rounds,
                tpf=output.tpf,
                branches=output.mean_branches,
                seconds=output.seconds,
                queue_seconds=self._queue_seconds,
                engine_seconds=time.perf_counter() - self.arrived,
                trace_line=self._end_line(step) if self.job.denoise else None,
            )

    def _tokens(self, step: Step) -> list[Token]:
        """The tokens of this round's text, with their probabilities when they were filled."""
        record, tokenizer = step.round, self.session.tokenizer
        for won in record.branches[record.winner].lookaheads:
            self._probabilities[won.position] = won.max_prob
        self._probabilities.update((fill.position, fill.max_prob) for fill in record.fills)
        begin, self._reported_tokens = self._reported_tokens, self.session.detokenized
        found = []
        for index in range(begin, self._reported_tokens):
            token = step.tokens[index]
            probability = self._probabilities.get(self.session.decoder.prompt + index, 0.0)
            text = tokenizer.piece(token) if tokenizer else str(token)
            raw = tokenizer.to_bytes([token]) if tokenizer and tokenizer.is_byte_level else None
            found.append(
                Token(
                    text=text,
                    bytes=list(text.encode() if raw is None else raw),
                    logprob=math.log(probability) if probability > 0 else _MIN_LOGPROB,
                )
            )
        return found

    def _round_line(self, step: Step, text: str) -> str:
        record = step.round
        self._text.append(text)
        seen = [fill.token for fill in record.fills]
        seen += [ahead.token for draft in record.spawned for ahead in draft]
        for branch in record.branches:
            seen += [ahead.token for ahead in branch.lookaheads]
            seen += [opinion.token for opinion in branch.anchor]
        return _json_line(
            type="round",
            **asdict(record),
            text=text,
            provisional=self._provisional(step.tokens),
            pieces=self._pieces(seen),
        )

    def _end_line(self, step: Step) -> str:
        assert step.output is not None
        summary = step.output.summary()
        return _json_line(
            type="end",
            token_ids=step.output.token_ids,
            finish=step.output.finish,
            text="".join(self._text),
            summary={k: v for k, v in summary.items() if k not in _NOT_IN_SUMMARY},
            pieces=self._pieces(step.output.token_ids),
        )

    def _provisional(self, tokens: list[int]) -> str:
        """What stands to the right of the final text; masks in it are not filled yet."""
        mask, tokenizer = self.session.decoder.mask_id, self.session.tokenizer
        piece = tokenizer.piece if tokenizer else str
        return "".join(MASK if t == mask else piece(t) for t in tokens[self.session.detokenized :])

    def _pieces(self, tokens: Iterable[int]) -> dict[str, str]:
        if self.session.tokenizer is None:
            return {}
        fresh = sorted(set(tokens) - self._sent_pieces)
        self._sent_pieces.update(fresh)
        return {str(token): self.session.tokenizer.piece(token) for token in fresh}


def _json_line(**record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
