"""The order in which an answer was filled, drawn as HTML: what `Output.show` gives a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from lopa.atomic_write import write_lines
from lopa.types import Trace

# From the first round to the last, as on the server's page; dark text is readable on each.
_COLOURS = (
    "oklch(0.82 0.1 305)",
    "oklch(0.83 0.09 285)",
    "oklch(0.84 0.085 262)",
    "oklch(0.86 0.08 235)",
    "oklch(0.87 0.08 210)",
    "oklch(0.88 0.085 180)",
    "oklch(0.895 0.095 152)",
    "oklch(0.91 0.11 122)",
    "oklch(0.92 0.125 98)",
)
_GIVEN = "oklch(0.93 0 0)"
_TOKEN = "color:#1b1b1f;border-radius:3px;padding:1px 1px;white-space:pre-wrap"
_NUMBER = "font-size:0.6em;opacity:0.65;vertical-align:super;padding-left:1px"
_BOX = "font-family:ui-monospace,monospace;font-size:14px;line-height:1.9;max-width:60em"
_WORDS = {
    "threshold": "its probability was above the threshold",
    "forced": "the most probable of its round",
    "count": "one of so many a round",
    "merged": "taken along from another branch",
    "edited": "replaced what stood there",
    "lookahead": "placed ahead by the branch that won",
}


class Filled(NamedTuple):
    """When and how a token came to its place."""

    round: int
    probability: float
    kind: str


@dataclass(frozen=True, slots=True, repr=False)
class FillingOrder:
    """Notebooks draw it; `save` writes it as a page, and `str` is plain text."""

    trace: Trace
    title: str

    def filled(self) -> list[tuple[str, Filled | None]]:
        """Each token of the answer as it is shown, with how it was filled; None: it was given."""
        places: dict[int, Filled] = {}
        for record in self.trace.rounds:
            for ahead in record.branches[record.winner].lookaheads:
                places[ahead.position] = Filled(record.index, ahead.max_prob, "lookahead")
            for fill in record.fills:
                places[fill.position] = Filled(record.index, fill.max_prob, fill.kind)
        start = len(self.trace.prompt_ids)
        return [
            (self.trace.pieces.get(token, f"⟨{token}⟩"), places.get(start + index))
            for index, token in enumerate(self.trace.token_ids)
        ]

    def save(self, path: str | Path) -> None:
        head = f'<!doctype html><meta charset="utf-8"><title>{escape(self.title)}</title>'
        write_lines(Path(path), [f"{head}<body>{self._repr_html_()}</body>"])

    def _repr_html_(self) -> str:
        tokens = "".join(self._token(piece, how) for piece, how in self.filled())
        return f'<div style="{_BOX}"><div>{escape(self.title)}</div>{self._legend()}{tokens}</div>'

    def _token(self, piece: str, how: Filled | None) -> str:
        shown = escape(piece).replace("\n", "↵")
        line_break = "<br>" * piece.count("\n")
        if how is None:
            return f'<span style="{_TOKEN};background:{_GIVEN}" title="given">{shown}</span>'
        tip = f"round {how.round}, probability {how.probability:.3f}: {_WORDS[how.kind]}"
        return (
            f'<span style="{_TOKEN};background:{self._colour(how.round)}" title="{escape(tip)}">'
            f'{shown}<span style="{_NUMBER}">{how.round}</span></span>{line_break}'
        )

    def _legend(self) -> str:
        rounds = range(1, len(self.trace.rounds) + 1)
        marks = "".join(
            f'<span style="{_TOKEN};padding:1px 6px;background:{self._colour(number)}">{number}'
            "</span>"
            for number in rounds
        )
        return f'<div style="margin-bottom:6px">filled in round {marks}</div>'

    def _colour(self, number: int) -> str:
        last = max(1, len(self.trace.rounds) - 1)
        return _COLOURS[round((number - 1) / last * (len(_COLOURS) - 1))]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Every round with what it filled, from left to right."""
        yield self.title
        filled = self.filled()
        for number in range(1, len(self.trace.rounds) + 1):
            pieces = [piece for piece, how in filled if how is not None and how.round == number]
            yield f"{number:4}  {' '.join(repr(piece)[1:-1].strip() for piece in pieces)}"

    __repr__ = __str__
