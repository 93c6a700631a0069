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


def candidates(anchor: Anchor, threshold: float) -> Candidates:
    """What the round says of the masks that are left.

    Of all rows the one that has the most of the new anchor's tokens, and no others, tells best.
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
    blocks = found.columns // anchor.view.size
    best = _best_of_blocks(blocks, found.ranking, anchor.may_force)
    chances: dict[tuple[int, ...], float] = {}
    for shift in SHIFTS:
        for chance, chosen in _likely_sets(odds + shift, config.most_branches + 1):
            for block, index in best:  # a fully activated block forces its best
                if not chosen[blocks == block].any():
                    chosen[index] = True
            members = tuple(chosen.nonzero()[0].tolist())
            if members:
                chances[members] = chances.get(members, 0.0) + chance
    ranked = sorted(chances, key=lambda members: -chances[members])
    listed = zip(
        (found.columns + anchor.view.offset).tolist(),
        found.token.tolist(),
        found.ranking.tolist(),
        found.max_prob.tolist(),
        strict=True,
    )
    lookaheads = [Lookahead(*each) for each in listed]
    return [
        tuple(lookaheads[index] for index in members) for members in ranked[: config.most_branches]
    ]


def _nearest(anchor: Anchor) -> tuple[int, BoolArray]:
    """The row with the most tokens of the new anchor, and the new tokens that it has not: [N]."""
    offset, tokens = anchor.view.offset, anchor.tokens
    best, most = anchor.row, -1
    for row, draft in enumerate([*anchor.drafts, ()]):
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


def _best_of_blocks(
    blocks: IntArray, ranking: FloatArray, may_force: BoolArray
) -> list[tuple[int, int]]:
    """(block, index of its best mask) of each fully activated block."""
    found = []
    for block in np.unique(blocks).tolist():
        if block < len(may_force) and may_force[block]:
            inside = (blocks == block).nonzero()[0]
            found.append((block, int(inside[ranking[inside].argmax()])))
    return found


def _likely_sets(odds: FloatArray, count: int) -> Iterator[tuple[float, BoolArray]]:
    """The most probable sets of independent masks, the best first: (probability, [M] members)."""
    likely = odds > 0
    costs = np.abs(odds)
    chance = float(np.exp(-np.log1p(np.exp(-costs)).sum()))
    order = costs.argsort(kind="stable")[:_MOST_FLIPS]
    flips = costs[order].tolist()
    yield chance, likely.copy()
    # Subsets of flips by their sum: each is made from a cheaper one by adding the next flip, or by
    # putting the next in place of the last.
    heap: list[tuple[float, tuple[int, ...]]] = [(flips[0], (0,))]
    for _ in range(count - 1):
        if not heap:
            return
        cost, members = heapq.heappop(heap)
        chosen = likely.copy()
        chosen[order[list(members)]] ^= True
        yield chance * math.exp(-cost), chosen
        last = members[-1]
        if last + 1 < len(flips):
            heapq.heappush(heap, (cost + flips[last + 1], (*members, last + 1)))
            heapq.heappush(heap, (cost - flips[last] + flips[last + 1], (*members[:-1], last + 1)))
