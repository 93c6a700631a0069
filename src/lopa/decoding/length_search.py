"""Length search: how many tokens a gap should have, by trying several lengths in each forward.

How confident a gap is filled says little of its length: a model fills any number of masks with
something that is likely there. So a length is judged by the text as a whole, read from the left.
The candidates are filled in a few rounds, all lengths as rows of one forward. Then the text behind
the gap is hidden, and each candidate says how likely it is to come next. With the candidate's own
probability that is the probability of the text, which can be compared between lengths.

The prompt is forwarded once, with a gap of middle length, and read from the cache by all rows.
Nothing that is filled here is kept: decoding begins anew with the length that was chosen.
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
CHECK_TOKENS = 8  # of the text behind the gap
FILL_WEIGHT = 0.5  # of a candidate's own log probability, beside that of the text behind it
OTHER_SHARE = 0.1  # of the probability that another token leaves, which the right one may have
_LEAST = 1e-9  # probability
SHORTER = "another length is likelier"


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
    """Rounds of one gap, until `found` has its length. Rows are the lengths, shortest first."""

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
        self.chances = np.zeros(len(self.lengths))  # log probability of what is filled
        self.round = 0
        self.found: tuple[Gap] | None = None

    @property
    def longest(self) -> tuple[Gap]:
        return (self.gap._replace(lengths=(self.lengths[-1],)),)

    def plan(self, index: int) -> Plan:
        """Round 0 caches the prompt, the next ones fill, the last one checks the text behind."""
        prompt, after = self.prompt_ids, list(self.gap.after)
        start = len(prompt)
        if self.round == 0:
            middle = self.fills[len(self.fills) // 2]
            rows, start, cached, commit = [np.array([*prompt, *middle, *after])], 0, 0, start
        else:
            hidden = [self.mask_id] * len(after[:CHECK_TOKENS])
            behind = hidden if self.round > FILL_ROUNDS else after
            rows = [np.concatenate([fill, behind]) for fill in self.fills]
            cached, commit = start, 0
        row_ends = np.array([start + len(row) for row in rows])
        width = max(map(len, rows))
        padded = np.zeros((len(rows), width), np.int64)
        for to, row in zip(padded, rows, strict=True):
            to[: len(row)] = row
        inside = np.arange(start, start + width) < row_ends[:, None]
        return Plan(
            index=index,
            start=start,
            cached=cached,
            commit=commit,
            rows=padded,
            row_ends=row_ends,
            wanted=(padded == self.mask_id) & inside,
            block_ids=None,
            never=self.never,
        )

    def choose(self, plan: Plan, stats: Stats) -> Round:
        """Take a round's statistics: its record. The winner is the likeliest length so far."""
        counts = plan.wanted.sum(axis=1)
        ends = counts.cumsum()
        rows = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        found = [Stats(stats.token[r], stats.max_prob[r], stats.ranking[r]) for r in rows]
        scores = np.zeros(len(found))
        if 0 < self.round <= FILL_ROUNDS:
            for row, of_row in enumerate(found):
                if len(of_row.token):
                    self._fill(row, of_row)
            scores = self.chances / self.lengths
        elif self.round:
            scores = FILL_WEIGHT * self.chances
            scores += [self._behind(of_row) for of_row in found]
        winner = int(scores.argmax())
        if self.round > FILL_ROUNDS:
            self.found = (self.gap._replace(lengths=(self.lengths[winner],)),)
        self.round += 1
        if self.round > 1 and not any((fill == self.mask_id).any() for fill in self.fills):
            self.round = max(self.round, FILL_ROUNDS + 1)
        return self._record(plan, found, scores, winner)

    def _fill(self, row: int, found: Stats) -> None:
        """An equal share of the masks, the best-ranked, and all above the threshold."""
        left = FILL_ROUNDS - self.round + 1  # rounds, with this one
        chosen: BoolArray = np.zeros(len(found.token), np.bool_)
        chosen[(-found.ranking).argsort(kind="stable")[: -(-len(chosen) // left)]] = True
        if self.config.threshold is not None:
            chosen |= passes(found.max_prob, self.config.threshold)
        masks: IntArray = (self.fills[row] == self.mask_id).nonzero()[0]
        self.fills[row][masks[chosen]] = found.token[chosen]
        self.chances[row] += _log(found.max_prob[chosen]).sum()

    def _behind(self, found: Stats) -> float:
        """Log probability of the text behind the gap, as far as the statistics tell it."""
        expected = np.array(self.gap.after[: len(found.token)])
        other = OTHER_SHARE * (1 - found.max_prob)
        return float(_log(np.where(found.token == expected, found.max_prob, other)).sum())

    def _record(self, plan: Plan, found: Sequence[Stats], scores: FloatArray, winner: int) -> Round:
        branches = [
            Branch(
                lookaheads=[],
                score=float(score),
                masks=len(of_row.token),
                end=int(end),
                eos=False,
                refused="" if row == winner else SHORTER,
                landscape=(of_row.max_prob * 255 + 0.5).astype(np.uint8).tobytes().hex(),
            )
            for row, (of_row, score, end) in enumerate(
                zip(found, scores, plan.row_ends, strict=True)
            )
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


def _log(probability: FloatArray) -> FloatArray:
    logs: FloatArray = np.log(np.maximum(probability, _LEAST))
    return logs
