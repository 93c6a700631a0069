"""The row budget: how many branches each session of a round may have, all of them weighed together.

A round of all sessions is one forward, and what it costs depends on the tokens of all rows. Every
session offers what more and more branches are expected to bring. The steps of all sessions are
ranked by their gain per token. They are taken as far as they gain more than the same time brings at
the pace of the rounds so far: going by the round's own rate would spend too much where it brings
little anyway. The anchors are always forwarded.

Pure: the same offers and cost give the same numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lopa.decoding.round_cost import RoundCost
from lopa.types import FloatArray

PRIOR_ROUNDS = 3.0  # that what sessions usually bring counts for beside what they have brought
PACE_DECAY = 0.95  # weight of a round against the one after it


class Offer(NamedTuple):
    """What a session expects of the branches of its next round."""

    row_length: int  # tokens of a row
    usual: float  # tokens that a round of its anchor alone usually brings
    # [2, steps] branches that each step adds, tokens that it brings; fewer per branch from step to
    # step
    steps: FloatArray
    least: int = 0  # branches that it has in any case

    def gain_of(self, branches: int) -> float:
        """Tokens that so many branches are expected to bring over none."""
        added, gains = self.steps
        return float(gains[added.cumsum() <= branches].sum())


class Rest(NamedTuple):
    """The sessions of a round whose branches are no choice, all together."""

    sessions: int = 0
    forwarded: int = 0  # tokens of all their rows
    tokens: float = 0.0  # that a round of them brings


@dataclass(slots=True)
class Pace:
    """What the rounds so far have brought and cost; older ones count for less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = PACE_DECAY * self.tokens + tokens
        self.seconds = PACE_DECAY * self.seconds + seconds


NO_OTHERS = Rest()


def allocate(
    offers: Sequence[Offer],  # at least one
    cost: RoundCost,
    pace: Pace,
    rest: Rest = NO_OTHERS,
) -> list[int]:
    """The number of branches of each offer. The device may wait meanwhile: no call too many."""
    branches, gains = np.concatenate([offer.steps for offer in offers], axis=1)
    per_offer = [offer.steps.shape[1] for offer in offers]
    lengths = np.repeat([offer.row_length for offer in offers], per_offer)
    tokens = branches * lengths
    # Stable: a session's own steps stay in their order, and of equals the first session goes first.
    order = np.argsort(-gains / tokens, kind="stable")
    # With none of the steps, with the first, with the first two, …
    forwarded, gained = np.zeros((2, len(order) + 1))
    np.cumsum(tokens[order], out=forwarded[1:])
    np.cumsum(gains[order], out=gained[1:])
    forwarded += rest.forwarded + sum(offer.row_length for offer in offers)
    seconds = cost.of_rounds(forwarded, len(offers) + rest.sessions)
    # What such sessions usually bring, in rounds of the best size for that
    expected = gained + (rest.tokens + sum(offer.usual for offer in offers))
    likely = int((expected / seconds).argmax())
    brought = pace.tokens + PRIOR_ROUNDS * float(expected[likely])
    rate = brought / (pace.seconds + PRIOR_ROUNDS * float(seconds[likely]))
    taken = order[: (gained - rate * seconds).argmax()]  # of equals the fewest
    owner = np.repeat(np.arange(len(offers)), per_offer)
    chosen = np.bincount(owner[taken], branches[taken], len(offers)).tolist()
    return [max(int(k), offer.least) for k, offer in zip(chosen, offers, strict=True)]


def concave_steps(choices: Sequence[int], gains: Sequence[float]) -> FloatArray:
    """[2, steps] branches and tokens that each step adds, with falling gains per branch.

    choices: numbers of branches, rising from 0; gains: of each over none. A choice that gains less
    per branch than the one behind it is passed over, and so is one that gains nothing.
    """
    hull = [(0, 0.0)]
    for count, gain in zip(choices, gains, strict=True):
        while len(hull) > 1:
            (b0, g0), (b1, g1) = hull[-2:]
            if (g1 - g0) * (count - b0) > (gain - g0) * (b1 - b0):
                break
            hull.pop()
        if gain > hull[-1][1]:
            hull.append((count, gain))
    steps = [(b1 - b0, g1 - g0) for (b0, g0), (b1, g1) in pairwise(hull)]
    return np.array(steps).reshape(-1, 2).T
