"""A session: one decoder driven over one runner slot, round by round, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.errors import CapacityError, ConfigError
from lopa.models.stream_decoder import StreamDecoder
from lopa.models.tokenizer import Tokenizer
from lopa.runner.base import Runner
from lopa.types import FinishReason, Plan, Round, Stats, Trace


@dataclass(slots=True)
class Output:
    """A finished answer. Token counts state their rule in the name; see docs/decoding.md."""

    text: str  # empty where the model has no tokenizer
    token_ids: list[int]  # up to and including the end of text; all of them in parity mode
    finish: FinishReason
    rounds: int
    tokens: int  # up to and including the end of text
    tokens_paper: int  # all that were filled, filler behind the end of text included
    seconds: float  # spent in its rounds
    first_round_seconds: float
    config: DecodeConfig
    trace: Trace

    @property
    def tpf(self) -> float:
        """Tokens per forward: up to and including the end of text, the first round counted."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tpf_paper(self) -> float:
        """The paper's counting: whole blocks over rounds + 1."""
        return self.tokens_paper / (self.rounds + 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second_paper(self) -> float:
        """The paper's counting: whole blocks, the first round's time left out."""
        rest = self.seconds - self.first_round_seconds
        return self.tokens_paper / rest if rest > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "rounds": self.rounds,
            "tpf": self.tpf,
            "tpf_paper": self.tpf_paper,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_paper": self.tokens_per_second_paper,
            "finish": self.finish,
            "decoder": self.config.decoder,
            "settings": self.config.settings(),
        }


@dataclass(slots=True)
class Event:
    """One round of a stream."""

    round: Round
    text: str  # what became final in this round, in order; never half a character
    tokens: list[int]  # the new tokens as they stand, masks included
    output: Output | None = None  # with the last event


class Session:
    """One request in progress. `step` runs a round; the last event carries `output`."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        decoder: Decoder,
        prompt_ids: Sequence[int],
        limit: int | None = None,
    ) -> None:
        """`limit` ends the answer after so many tokens, which need not be whole blocks."""
        self.config = decoder.config
        most = self.config.max_new_tokens
        if limit is not None and not (self.config.early_stop and 1 <= limit <= most):
            raise ConfigError(f"limit must be between 1 and {most}, with early_stop: got {limit}")
        self.limit = limit
        # Parity with the published loops knows no limit but its whole blocks.
        self._limit = (limit or most) if self.config.early_stop else None
        if self.config.stop and tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none")
        self.decoder = decoder
        self.runner = runner
        self.tokenizer = tokenizer
        settings = self.config.settings()
        if decoder.budget is not None:
            settings["round_cost"] = [list(point) for point in decoder.budget.cost.points]
        self.trace = Trace(list(prompt_ids), settings)
        self.output: Output | None = None
        self.slot = -1  # the runner's, from `open` to `close`
        self._closed = False
        self._begun: float | None = None  # when the next round was, ahead of its step
        self._stream = StreamDecoder(tokenizer) if tokenizer else None
        self._taken = 0  # settled tokens already handed to the stream decoder
        self._text = ""  # settled text
        self._sent = 0
        self._stopped_at: int | None = None  # length of the text before the stop string

    @property
    def taken(self) -> int:
        """How many new tokens have become text."""
        return self._taken

    @property
    def is_ahead(self) -> bool:
        """Whether the device has begun the next round."""
        return self._begun is not None

    @property
    def capacity(self) -> int:
        """Tokens that it may come to hold, prompt included."""
        return len(self.decoder.tokens)

    def open(self) -> bool:
        """Take a slot of the runner, if there is room; nothing happens when it has one."""
        if self._closed:
            raise RuntimeError("this session is closed")
        if self.slot < 0:
            slot = self.runner.open(self.config, self.capacity, self.trace.prompt_ids)
            if slot is not None:
                self.slot = slot
                self.decoder.reuse(self.runner.reused(slot))
        return self.slot >= 0

    def step(self, *, ahead: bool = False) -> Event | None:
        """One round on its own; None when the answer is complete.

        ahead: let the device begin the next round meanwhile. Only where no other session takes its
        steps on this runner in between: its work would come first, and this be done twice.
        """
        began, self._begun = self._begun or time.perf_counter(), None
        if self.output is not None:
            return None
        if not self.open():
            raise CapacityError("no room in the cache: other requests hold it")
        plan = self.plan()
        if plan is None:
            return None
        stats = None
        while stats is None:  # a long prompt takes several forwards
            (stats,) = self.runner.forward([(self.slot, plan)])
        winner = self.choose(stats)
        self.runner.commit([(self.slot, winner)])
        ended = time.perf_counter()
        following = self.plan() if ahead else None
        if following is not None and self.runner.begin([(self.slot, following)]):
            self._begun = ended
        return self.take(ended - began)

    def plan(self) -> Plan | None:
        """What this session wants forwarded next; None when the answer is complete."""
        if self.output is not None:
            return None
        if self._closed:
            raise RuntimeError("this session is closed")
        return self.decoder.plan()

    def choose(self, stats: Stats) -> int:
        """Take a round's statistics: the winner, to be committed.

        `plan` tells from now on whether there is another round. What nobody waits for, text and
        records, is left to `take`.
        """
        winner = self.decoder.choose(stats)
        if self.config.stop:
            self._settle()
        if self._stopped_at is not None:
            self.decoder.end("stop")
        elif self._is_full():
            self.decoder.end("length")
        return winner

    def take(self, seconds: float) -> Event:
        """The round that was chosen last has been committed: what became of it."""
        record = self.decoder.record()
        record.seconds = seconds
        self.trace.rounds.append(record)
        self._settle()
        event = Event(record, self._fresh_text(), self.decoder.generated.tolist())
        if self.decoder.plan() is None:
            self._finish()
            event.text += self._rest()
            event.output = self.output
        return event

    def close(self) -> None:
        """Free the slot; safe to call twice, and in the middle of a run."""
        self._closed = True
        if self.slot >= 0:
            self.runner.close(self.slot)
            self.slot = -1

    def _settle(self) -> None:
        """Turn the tokens that are final by now into text, and look for a stop string."""
        if self._stream is None or self._stopped_at is not None:
            return
        end = self.decoder.settled
        first = self.decoder.first_eos
        if first is not None:
            end = min(end, first)
        end = self._cut(end)  # blocks may go beyond what was asked
        for token in self.decoder.generated[self._taken : end].tolist():
            self._text += self._stream.push([token])
            self._taken += 1
            found = [i for i in map(self._text.find, self.config.stop) if i >= 0]
            if found:
                self._stopped_at = min(found)
                return

    def _is_full(self) -> bool:
        """Whether all that was asked for is settled, without an end of text in it."""
        if self._limit is None or self.decoder.settled < self._limit:
            return False
        first = self.decoder.first_eos
        return first is None or first >= self._limit

    def _cut(self, tokens: int) -> int:
        return tokens if self._limit is None else min(tokens, self._limit)

    def _fresh_text(self) -> str:
        """Final text not sent yet, less a tail that may turn out to begin a stop string."""
        end = len(self._text) if self._stopped_at is None else self._stopped_at
        if self._stopped_at is None and self.config.stop:
            end -= max(_overlap(self._text, stop) for stop in self.config.stop)
        fresh = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return fresh

    def _rest(self) -> str:
        assert self.output is not None
        rest = self.output.text[self._sent :]
        self._sent = len(self.output.text)
        return rest

    def _finish(self) -> None:
        decoder, config = self.decoder, self.config
        assert decoder.finish is not None
        self.close()
        generated = decoder.generated.tolist()
        settled = min(decoder.settled, len(generated))
        first = decoder.first_eos
        counted = first + 1 if first is not None and first < settled else settled
        if self._stopped_at is not None:
            counted = self._taken
        counted = self._cut(counted)
        cut = self._limit is not None or self._stopped_at is not None
        token_ids = generated[: counted if cut else settled]
        text = self._text
        if self._stream is not None and self._stopped_at is None:
            text += self._stream.flush()
        if self._stopped_at is not None:
            text = text[: self._stopped_at]
        self.trace.token_ids = token_ids
        self.trace.finish = decoder.finish
        if self.tokenizer is not None:
            seen = {*self.trace.prompt_ids, *generated} - {decoder.mask_id}
            for record in self.trace.rounds:
                seen.update(a.token for a in record.spawned)
            self.trace.pieces = {t: self.tokenizer.piece(t) for t in sorted(seen)}
        records = self.trace.rounds
        self.output = Output(
            text=text,
            token_ids=token_ids,
            finish=decoder.finish,
            rounds=len(records),
            tokens=counted,
            tokens_paper=sum(token != decoder.mask_id for token in generated),
            seconds=sum(record.seconds for record in records),
            first_round_seconds=records[0].seconds if records else 0.0,
            config=config,
            trace=self.trace,
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
