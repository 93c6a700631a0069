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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lopa.config import DecodeConfig
from lopa.decoding.round_view import Anchor
from lopa.types import BoolArray, Draft, FloatArray, IntArray, Lookahead

# Log-odds that a mask is filled next: weights of the columns of `features`, and a constant.
WEIGHTS = (1.47, 3.88, -0.94, -0.29)
BIAS = 0.9
SHIFTS = (-1.5, 0.0, 1.5)  # of all log-odds at once
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
            anchor.view.offset + int(self.columns[index]),
            int(self.token[index]),
            float(self.ranking[index]),
            float(self.max_prob[index]),
        )


def candidates(anchor: Anchor, threshold: float) -> Candidates:
    """What the round says of the masks that are left.

    Of all rows the one that has the most of the new anchor's tokens, and no others, tells best;
    where an answer has to fit, it is the winner's own.
    """
    view, columns = anchor.view, anchor.free.nonzero()[0]
    row, unseen = _nearest(anchor)
    told = view.masks[row, columns]  # a shorter row does not tell of all masks
    token, max_prob, ranking = (
        np.where(told, x[row, columns], x[anchor.row, columns])
        for x in (view.token, view.max_prob, view.ranking)
    )
    new = unseen.nonzero()[0]
    distance = np.abs(columns[:, None] - new).min(axis=1, initial=view.size)
    features = np.stack(
        [
            _logit(max_prob) - _logit(threshold),
            np.exp(-distance / 2),  # to the nearest token that the row has not seen
            np.concatenate([[True], ~anchor.free[:-1]])[columns],  # its left neighbour is filled
            np.log1p(np.arange(len(columns))),  # masks to its left
        ],
        axis=1,
    )
    return Candidates(columns, token, max_prob, ranking, features)


def _logit(prob: FloatArray | float) -> FloatArray:
    prob = np.clip(prob, 1e-3, 1 - 1e-3)
    odds: FloatArray = np.log(prob / (1 - prob))
    return odds


def spawn(anchor: Anchor, config: DecodeConfig) -> list[Draft]:
    """The most probable sets of fills of the next round, the best first."""
    found = candidates(anchor, config.threshold)
    if not len(found.columns):
        return []
    odds = found.features @ np.array(WEIGHTS) + BIAS
    forced = _forced(found, anchor)
    chances: dict[int, float] = {}  # by set, a bit for each candidate
    for shift in SHIFTS:
        for chance, members in likely_sets(odds + shift, config.most_branches + 1):
            for block, best in forced:
                if not members & block:
                    members |= best
            if members:
                chances[members] = chances.get(members, 0.0) + chance
    ranked = sorted(chances, key=lambda members: -chances[members])[: config.most_branches]
    return [tuple(found.lookahead(index, anchor) for index in bits(members)) for members in ranked]


def as_bits(members: BoolArray) -> int:
    return int.from_bytes(np.packbits(members, bitorder="little").tobytes(), "little")


def bits(members: int) -> Iterator[int]:
    """The numbers of the bits that are set, from the lowest on."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def _nearest(anchor: Anchor) -> tuple[int, BoolArray]:
    """The row with the most tokens of the new anchor, and the new tokens that it has not: [N]."""
    offset, tokens = anchor.view.offset, anchor.tokens
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
    blocks = found.columns // anchor.view.size
    sets = []
    for block in anchor.may_force.nonzero()[0].tolist():
        inside = blocks == block
        if inside.any():
            best = int(np.where(inside, found.ranking, -math.inf).argmax())
            sets.append((as_bits(inside), 1 << best))
    return sets


def likely_sets(odds: FloatArray, count: int) -> Iterator[tuple[float, int]]:
    """The most probable sets of independent masks, the best first: (probability, bits)."""
    costs = np.abs(odds)
    chance = math.exp(-float(np.log1p(np.exp(-costs)).sum()))
    likely = as_bits(odds > 0)
    order = costs.argsort(kind="stable")[:_MOST_FLIPS].tolist()
    flips = [(float(costs[index]), 1 << index) for index in order]
    yield chance, likely
    # Sets of flips by their sum: each is made from a cheaper one by adding the next flip, or by
    # putting the next in place of the last. (sum, number of the last, flipped bits)
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
