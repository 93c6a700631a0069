"""A session: one request in progress. Its decoder, the text that is final so far, and its trace.

It touches no device: an `Engine` forwards its plans and hands it the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

from lopa.decoding.decoder import Decoder
from lopa.engine.output import Event, Output
from lopa.errors import ConfigError
from lopa.models.stream_decoder import StreamDecoder
from lopa.models.tokenizer import Tokenizer
from lopa.types import Plan, Stats, Trace


class Session:
    """A round is `plan`, then `choose` with its statistics, then `record`."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        *,
        replay: Sequence[Plan] = (),  # forwards that write its KV cache anew, before its next round
    ) -> None:
        self.config = config = decoder.config
        if config.stop and tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none")
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.replay = replay
        settings = config.settings()
        if decoder.auto is not None:
            settings["round_cost"] = decoder.auto.cost.settings()
        self.trace = Trace(
            decoder.tokens[: decoder.prompt].tolist(),
            settings,
            pinned_ids=[list(gap.after) for gap in decoder.gaps],
            gap_tokens=[length for (length,), _ in decoder.gaps],
        )
        self.output: Output | None = None
        # Set by the engine that runs it.
        self.slot = -1  # of the runner
        self.launched_at: float | None = None  # when its round was launched
        self._stream = StreamDecoder(tokenizer) if tokenizer else None
        self._text = ""  # final
        self._detokenized = 0  # new tokens that are in it
        self._sent = 0  # characters of it that events have carried
        self._stopped_at: int | None = None  # length of the text before the stop string

    @property
    def detokenized(self) -> int:
        """How many new tokens have become text."""
        return self._detokenized

    @property
    def capacity(self) -> int:
        """Tokens that it may come to hold, prompt included."""
        return len(self.decoder.tokens)

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete."""
        return self.decoder.finish is not None

    def plan(self) -> Plan | None:
        """What to forward next; None when the answer is complete."""
        return self.decoder.plan()

    def choose(self, stats: Stats) -> int:
        """Take a round's statistics: the winner, to be committed.

        `is_done` says from now on whether there is another round. What the device need not wait
        for, text and records, is left to `record`.
        """
        winner = self.decoder.choose(stats)
        if self.config.stop:
            self._detokenize()
        if self._stopped_at is not None:
            self.decoder.end("stop")
        elif self._is_full():
            self.decoder.end("filled" if self.decoder.gaps else "length")
        return winner

    def record(self, seconds: float) -> Event:
        """The event of the round that was chosen last."""
        record = self.decoder.record()
        record.seconds = seconds
        self.trace.rounds.append(record)
        self._detokenize()
        event = Event(record, self._fresh_text(), self.decoder.generated.tolist())
        if self.is_done:
            self._finish()
            event.text += self._rest()
            event.output = self.output
        return event

    def _detokenize(self) -> None:
        """Turn the tokens that are final by now into text, and look for a stop string."""
        if self._stream is None or self._stopped_at is not None:
            return
        end = self.decoder.settled
        first = self.decoder.first_eos
        if first is not None:
            end = min(end, first)
        end = self._cut(end)  # blocks may go beyond what was asked
        fresh = self.decoder.generated[self._detokenized : end].tolist()
        if not self.config.stop:
            self._text += self._stream.push(fresh)
            self._detokenized += len(fresh)
            return
        for token in fresh:
            self._text += self._stream.push([token])
            self._detokenized += 1
            found = [i for i in map(self._text.find, self.config.stop) if i >= 0]
            if found:
                self._stopped_at = min(found)
                return

    def _is_full(self) -> bool:
        """Whether all that was asked for is filled, without an EOS in it."""
        limit = self.decoder.limit
        if not self.config.early_stop or limit is None or self.decoder.settled < limit:
            return False
        first = self.decoder.first_eos
        return first is None or first >= limit

    def _cut(self, tokens: int) -> int:
        return tokens if self.decoder.limit is None else min(tokens, self.decoder.limit)

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
        decoder = self.decoder
        assert decoder.finish is not None
        generated = decoder.generated.tolist()
        settled = min(decoder.settled, len(generated))
        first = decoder.first_eos
        counted = first + 1 if first is not None and first < settled else settled
        if self._stopped_at is not None:
            counted = self._detokenized
        counted = self._cut(counted)
        cut = decoder.limit is not None or self._stopped_at is not None
        token_ids = generated[: counted if cut else settled]
        text = self._text
        if self._stream is not None and self._stopped_at is None:
            text += self._stream.flush()
        if self._stopped_at is not None:
            text = text[: self._stopped_at]
        self.trace.gap_tokens = [length for (length,), _ in decoder.gaps]
        self.trace.token_ids = token_ids
        self.trace.finish = decoder.finish
        if self.tokenizer is not None:
            seen = {*self.trace.prompt_ids, *generated} - {decoder.mask_id}
            seen.update(token for after in self.trace.pinned_ids for token in after)
            for record in self.trace.rounds:
                seen.update(f.token for f in record.fills)  # an edit may have replaced it
                seen.update(a.token for draft in record.spawned for a in draft)
                seen.update(o.token for branch in record.branches for o in branch.anchor)
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
            config=self.config,
            trace=self.trace,
            gaps=self._gap_texts(),
        )

    def _gap_texts(self) -> list[str]:
        """Of each gap; an answer that ended early may have none of the later ones."""
        if self.tokenizer is None:
            return []
        texts, begin, ids = [], 0, self.trace.token_ids
        for (length,), after in self.decoder.gaps:
            texts.append(self.tokenizer.decode(ids[begin : begin + length]))
            begin += length + len(after)
        return texts


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
