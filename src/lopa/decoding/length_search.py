"""Length search: how many tokens a gap should have, by trying several lengths in each forward.

How confident a gap is filled says little of its length: a model fills any number of masks with what
is likely there, given that there are so many. What can be compared between lengths is the
probability of the text, read from the left: of the filled gap, and of the text behind it.

Round 0 forwards the prompt once, with a gap of middle length: all rows read it from the cache. A
few rounds then fill every length, as rows of one forward. The last one hides the gap and the text
behind it, a few tokens at a time, each in a row of its own in which nothing behind them is visible,
and asks how likely they are. Nothing that is filled here is kept: decoding begins anew with the
length that was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lopa.config import DecodeConfig
from lopa.decoding.fill import passes
from lopa.types import BoolArray, Branch, FloatArray, Gap, IntArray, Plan, Round, Stats

MAX_LENGTHS = 40  # that are tried unless others are given
MOST_LENGTHS = 64  # that may be given
_EVERY_LENGTH = 32  # up to here each; behind it they grow
FILL_ROUNDS = 3
BEHIND = 12  # tokens of the text behind the gap that are read
CHUNK = 4  # tokens that are hidden together
# Weight of the gap's own log probability. Tokens that are hidden together are taken as independent,
# so that a long text seems less likely than it is.
FILL_WEIGHT = 0.5
_LEAST = 1e-9  # probability
LESS_LIKELY = "another length is likelier"


def lengths_to_try(most: int) -> tuple[int, ...]:
    """Up to `most` tokens: small ones all, large ones in growing steps."""
    if most <= MAX_LENGTHS:
        return tuple(range(1, most + 1))
    steps = np.geomspace(_EVERY_LENGTH, most, MAX_LENGTHS - _EVERY_LENGTH + 1)
    return tuple(sorted({*range(1, _EVERY_LENGTH + 1), *np.rint(steps).astype(int).tolist()}))


def canvas_of(gaps: Sequence[Gap], mask_id: int) -> list[int]:
    """What lies behind the prompt: masks, and the text behind each gap. Each has one length."""
    return [t for (length,), after in gaps for t in (*[mask_id] * length, *after)]


class LengthSearch:
    """Rounds of one gap, until `found` has its length."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        gaps: Sequence[Gap],
        mask_id: int,
        never: tuple[int, ...],
        config: DecodeConfig,
    ) -> None:
        (self.gap,) = gaps  # the lengths of several gaps are not searched together
        self.lengths = sorted(set(self.gap.lengths))
        self.prompt_ids = list(prompt_ids)
        self.mask_id, self.never, self.config = mask_id, never, config
        self.fills = [np.full(length, mask_id, np.int64) for length in self.lengths]
        self.round = 0
        self.found: tuple[Gap] | None = None

    @property
    def longest(self) -> tuple[Gap]:
        return (self.gap._replace(lengths=(self.lengths[-1],)),)

    @property
    def is_reading(self) -> bool:
        return self.round > FILL_ROUNDS

    def plan(self, index: int) -> Plan:
        start, after = len(self.prompt_ids), np.array(self.gap.after)
        cached, commit = start, 0
        if self.round == 0:
            middle = self.fills[len(self.fills) // 2]
            rows = [np.concatenate([self.prompt_ids, middle, after])]
            start, cached, commit = 0, 0, start
        elif not self.is_reading:
            rows = [np.concatenate([fill, after]) for fill in self._unfilled()]
        else:
            rows = [text[:end] for text in self._texts() for end in _chunk_ends(len(text))]
        row_ends = np.array([start + len(row) for row in rows])
        cells = np.arange(start, max(row_ends)) < row_ends[:, None]  # those that are tokens
        padded = np.zeros(cells.shape, np.int64)
        padded[cells] = np.concatenate(rows)
        wanted, expected = cells & (padded == self.mask_id), None
        if self.is_reading:
            wanted, expected = np.zeros_like(cells), padded.copy()
            for row, end in enumerate(map(len, rows)):
                wanted[row, (end - 1) // CHUNK * CHUNK : end] = True
            padded[wanted] = self.mask_id
        return Plan(
            index=index,
            start=start,
            cached=cached,
            commit=commit,
            rows=padded,
            row_ends=row_ends,
            wanted=wanted,
            block_ids=None,
            never=self.never,
            expected=expected,
        )

    def choose(self, plan: Plan, stats: Stats) -> Round:
        """Take a round's statistics: its record, with a branch for each length that was tried.

        Its winner is the likeliest, once the texts are read.
        """
        ends = plan.wanted.sum(axis=1).cumsum().tolist()
        rows = [slice(*span) for span in zip([0, *ends[:-1]], ends, strict=True)]
        lengths, scores = self.lengths, np.zeros(len(self.lengths))
        if self.round == 0:
            lengths, scores = [lengths[len(lengths) // 2]], scores[:1]
        elif not self.is_reading:
            for fill, row in zip(self._unfilled(), rows, strict=True):
                self._fill(fill, stats, row)
        else:
            logs = np.log(np.maximum(stats.max_prob, _LEAST))
            begin = 0
            for number, text in enumerate(self._texts()):
                gap, end = begin + lengths[number], begin + len(text)
                scores[number] = FILL_WEIGHT * logs[begin:gap].sum() + logs[gap:end].sum()
                begin = end
        winner = int(scores.argmax())
        if self.is_reading:
            self.found = (self.gap._replace(lengths=(lengths[winner],)),)
        self.round += 1
        if not self._unfilled():
            self.round = max(self.round, FILL_ROUNDS + 1)
        return self._record(plan, lengths, scores, winner)

    def _unfilled(self) -> list[IntArray]:
        return [fill for fill in self.fills if (fill == self.mask_id).any()]

    def _texts(self) -> list[IntArray]:
        """What is read of each length."""
        behind = self.gap.after[:BEHIND]
        return [np.concatenate([fill, behind]) for fill in self.fills]

    def _fill(self, fill: IntArray, stats: Stats, row: slice) -> None:
        """An equal share of the masks, the best-ranked, and all above the threshold."""
        ranking, left = stats.ranking[row], FILL_ROUNDS - self.round + 1  # rounds, with this one
        chosen: BoolArray = np.zeros(len(ranking), np.bool_)
        chosen[(-ranking).argsort(kind="stable")[: -(-len(ranking) // left)]] = True
        if self.config.threshold is not None:
            chosen |= passes(stats.max_prob[row], self.config.threshold)
        masks = (fill == self.mask_id).nonzero()[0]
        fill[masks[chosen]] = stats.token[row][chosen]

    def _record(self, plan: Plan, lengths: Sequence[int], scores: FloatArray, winner: int) -> Round:
        known = len(self.prompt_ids) + len(self.gap.after)
        branches = [
            Branch(
                lookaheads=[],
                score=score,
                masks=length,
                end=known + length,
                eos=False,
                refused=LESS_LIKELY if self.found and number != winner else "",
            )
            for number, (length, score) in enumerate(zip(lengths, scores.tolist(), strict=True))
        ]
        return Round(
            index=plan.index,
            start=plan.start,
            cached=plan.cached,
            committed=plan.commit,
            branches=branches,
            winner=winner,
            fills=[],
            spawned=[],
            blocks=[],
        )


def _chunk_ends(length: int) -> list[int]:
    return [min(start + CHUNK, length) for start in range(0, length, CHUNK)]
