"""What comes out of decoding: an event per round of a stream, and the finished output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lopa.config import DecodeConfig
from lopa.engine.filling_order import FillingOrder
from lopa.types import FinishReason, Round, Trace

_SHOWN = 60  # characters of text in a repr


@dataclass(slots=True, repr=False)
class Output:
    """A finished answer. Token counts state their rule in the name; see docs/decoding.md."""

    text: str  # empty where the model has no tokenizer
    token_ids: list[int]  # up to and including the EOS; all of them in parity mode
    finish: FinishReason
    rounds: int
    tokens: int  # up to and including the EOS
    tokens_paper: int  # all that were filled, filler behind the EOS included
    seconds: float  # spent in its rounds
    first_round_seconds: float
    config: DecodeConfig
    trace: Trace
    # Infilling: the text of each gap. `text` is all from the first to the last, with what is pinned
    # between them.
    gaps: list[str] = field(default_factory=list)

    @property
    def tpf(self) -> float:
        """Tokens per forward: up to and including the EOS, the first round counted."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tpf_paper(self) -> float:
        """The paper's counting: whole blocks over rounds + 1."""
        return self.tokens_paper / (self.rounds + 1)

    @property
    def mean_branches(self) -> float:
        """Lookahead branches of a round, on average."""
        rounds = self.trace.rounds
        return sum(len(r.branches) - 1 for r in rounds) / len(rounds) if rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second_paper(self) -> float:
        """The paper's counting: whole blocks, the first round's time left out."""
        rest = self.seconds - self.first_round_seconds
        return self.tokens_paper / rest if rest > 0 else 0.0

    def show(self) -> FillingOrder:
        """The order in which its tokens were filled: a notebook draws it, and so does `print`."""
        title = (
            f"{self.config.decoder} · {self.rounds} rounds · {self.tokens} tokens · "
            f"TPF {self.tpf:.2f}"
        )
        return FillingOrder(self.trace, title)

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "text": self.text,
            **({"gaps": self.gaps, "gap_tokens": self.trace.gap_tokens} if self.gaps else {}),
            "token_ids": self.token_ids,
            "rounds": self.rounds,
            "tpf": self.tpf,
            "tpf_paper": self.tpf_paper,
            "mean_branches": self.mean_branches,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_paper": self.tokens_per_second_paper,
            "finish": self.finish,
            "decoder": self.config.decoder,
            "settings": self.config.settings(),
        }

    def __repr__(self) -> str:
        return (
            f"Output(text={_short(self.text)}, tokens={self.tokens}, rounds={self.rounds}, "
            f"tpf={self.tpf:.2f}, finish={self.finish!r})"
        )


@dataclass(slots=True, repr=False)
class Event:
    """One round of a stream."""

    round: Round
    text: str  # what became final in this round, in order; never half a character
    tokens: list[int]  # the new tokens as they stand, masks included
    output: Output | None = None  # with the last event

    def __repr__(self) -> str:
        last = "" if self.output is None else f", output={self.output!r}"
        return f"Event(round={self.round.index}, text={_short(self.text)}{last})"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
