"""Drafts for `accept="exact"`: the sets of tokens that the next round will most likely fill.

A branch is taken only if it is exactly what the anchor's own fill rule leads to, so a draft is a
whole set. Each mask has its odds of being filled next with the token that is predicted for it now,
by a logistic regression on four figures of the round (measurements/fit_exact_drafts.py). With the
masks taken as independent, the drafts are the most probable sets. Fills come in bursts: the same
with all odds shifted up or down counts too.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left as bisect
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from lopa.config import DecodeConfig
from lopa.decoding.round_view import Anchor
from lopa.types import BoolArray, Draft, FloatArray, IntArray, Lookahead

# Log-odds that a mask is filled next: weights of the columns of `features`, and a constant.
WEIGHTS = np.array((1.47, 3.88, -0.94, -0.29))
BIAS = 0.9
SHIFTS = np.array((-1.5, 0.0, 1.5))  # of all log-odds at once
_MOST_FLIPS = 16  # masks with the most even odds, which sets differ in


class Candidates(NamedTuple):
    """Masks that the next round may fill: [M] each."""

    columns: IntArray
    token: IntArray
    max_prob: FloatArray
    ranking: FloatArray
    features: FloatArray  # [M, features]

    def lookahead(self, index: int, anchor: Anchor) -> Lookahead:
        return Lookahead(
            anchor.view.offset + self.columns.item(index),
            self.token.item(index),
            self.ranking.item(index),
            self.max_prob.item(index),
        )


def candidates(anchor: Anchor, threshold: float) -> Candidates:
    """What the round says of the masks that are left.

    Of all rows the one that has the most of the new anchor's tokens, and no others, tells best;
    where an answer has to fit, it is the winner's own.
    """
    view, columns = anchor.view, anchor.free.nonzero()[0]
    row, unseen = _nearest(anchor)
    # A shorter row does not tell of all masks.
    at = np.where(view.masks[row, columns], row, anchor.row), columns
    token, max_prob, ranking = view.token[at], view.max_prob[at], view.ranking[at]
    new = unseen.nonzero()[0]
    distance = np.abs(columns[:, None] - new).min(axis=1, initial=view.size)
    features = np.empty((len(columns), len(WEIGHTS)))
    features[:, 0] = _logit(max_prob) - _logit(np.float64(threshold))
    features[:, 1] = np.exp(-distance / 2)  # to the nearest token that the row has not seen
    features[:1, 2] = True  # its left neighbour is filled
    features[1:, 2] = columns[1:] - columns[:-1] > 1
    features[:, 3] = np.log1p(np.arange(len(columns)))  # masks to its left
    return Candidates(columns, token, max_prob, ranking, features)


def _logit(prob: FloatArray | np.float64) -> FloatArray:
    prob = np.minimum(np.maximum(prob, 1e-3), 1 - 1e-3)
    odds: FloatArray = np.log(prob / (1 - prob))
    return odds


def spawn(anchor: Anchor, config: DecodeConfig) -> list[Draft]:
    """The most probable sets of fills of the next round, the best first."""
    found = candidates(anchor, config.threshold)
    if not len(found.columns):
        return []
    odds = found.features @ WEIGHTS + BIAS
    forced = _forced(found, anchor)
    chances: dict[int, float] = {}  # by set, a bit for each candidate
    for chance, members in likely_sets(odds + SHIFTS[:, None], config.most_branches + 1):
        for block, best in forced:
            if not members & block:
                members |= best
        if members:
            chances[members] = chances.get(members, 0.0) + chance
    ranked = sorted(chances, key=lambda members: -chances[members])[: config.most_branches]
    used = reduce(or_, ranked, 0)
    lookaheads = {index: found.lookahead(index, anchor) for index in bits(used)}
    return [tuple(lookaheads[index] for index in bits(members)) for members in ranked]


def bits(members: int) -> Iterator[int]:
    """The numbers of the bits that are set, from the lowest on."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def _nearest(anchor: Anchor) -> tuple[int, BoolArray]:
    """The row with the most tokens of the new anchor, and the new tokens that it has not: [N]."""
    offset, tokens = anchor.view.offset, anchor.tokens.tolist()
    best, most = anchor.row, -1
    for row, draft in enumerate([*anchor.drafts, ()]):
        if anchor.by_own_row and row != anchor.row:
            continue
        fits = all(
            a.position - offset < len(tokens) and tokens[a.position - offset] == a.token
            for a in draft
        )
        if fits and (len(draft) > most or (len(draft) == most and row == anchor.row)):
            best, most = row, len(draft)
    unseen = anchor.view.masks[-1, : len(tokens)] & ~anchor.free
    if best < len(anchor.drafts):
        unseen[[a.position - offset for a in anchor.drafts[best]]] = False
    return best, unseen


def _forced(found: Candidates, anchor: Anchor) -> list[tuple[int, int]]:
    """Of each fully activated block: the set of its masks, and of its best one, which is forced."""
    columns, size = found.columns.tolist(), anchor.view.size
    sets = []
    for block in anchor.may_force.nonzero()[0].tolist():
        first, last = bisect(columns, block * size), bisect(columns, (block + 1) * size)
        if first < last:
            best = first + int(found.ranking[first:last].argmax())
            sets.append(((1 << last) - (1 << first), 1 << best))
    return sets


def likely_sets(odds: FloatArray, count: int) -> Iterator[tuple[float, int]]:
    """The most probable sets of independent masks, the best first: (probability, bits).

    odds: [M]; or [S, M]: those by the first odds, then those by the next.
    """
    odds = odds.reshape(-1, odds.shape[-1])
    costs = np.abs(odds)
    surprises = np.log1p(np.exp(-costs)).sum(axis=1).tolist()
    likely = np.packbits(odds > 0, axis=1, bitorder="little")
    order = costs.argsort(axis=1, kind="stable")[:, : min(count, _MOST_FLIPS)].tolist()
    for row, surprise in enumerate(surprises):
        flips = [(costs.item(row, index), 1 << index) for index in order[row]]
        members = int.from_bytes(likely[row].tobytes(), "little")
        yield from _flipped(math.exp(-surprise), members, flips, count)


def _flipped(
    chance: float, likely: int, flips: list[tuple[float, int]], count: int
) -> Iterator[tuple[float, int]]:
    """A set and those that differ from it, by the sum of their flips: (cost, bit), rising."""
    yield chance, likely
    # Each is made from a cheaper one by adding the next flip, or by putting the next in place of
    # the last. (sum, number of the last, flipped bits)
    heap = [(flips[0][0], 0, flips[0][1])]
    for _ in range(count - 1):
        if not heap:
            return
        cost, last, flipped = heapq.heappop(heap)
        yield chance * math.exp(-cost), likely ^ flipped
        if last + 1 < len(flips):
            more, bit = flips[last + 1]
            heapq.heappush(heap, (cost + more, last + 1, flipped | bit))
            before, old = flips[last]
            heapq.heappush(heap, (cost - before + more, last + 1, flipped ^ old | bit))
