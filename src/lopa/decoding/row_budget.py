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
from typing import NamedTuple

import numpy as np

from lopa.decoding.round_cost import RoundCost
from lopa.types import FloatArray, IntArray

PRIOR_ROUNDS = 3.0  # that what sessions usually bring counts for beside what they have brought
PACE_DECAY = 0.95  # weight of a round against the one after it


class Offer(NamedTuple):
    """What a session expects of the branches of its next round."""

    row_length: int  # tokens of a row
    usual: float  # tokens that a round of its anchor alone usually brings
    branches: IntArray  # [steps] that each step adds
    gains: FloatArray  # [steps] tokens that each step brings; fewer per branch from step to step
    least: int = 0  # branches that it has in any case

    def gain_of(self, branches: int) -> float:
        """Tokens that so many branches are expected to bring over none."""
        return float(self.gains[self.branches.cumsum() <= branches].sum())


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
    """The number of branches of each offer."""
    count = len(offers)
    lengths = np.array([offer.row_length for offer in offers])
    owner = np.arange(count).repeat([len(offer.gains) for offer in offers])
    branches = np.concatenate([offer.branches for offer in offers])
    gains = np.concatenate([offer.gains for offer in offers])
    added = branches * lengths[owner]
    # Stable: a session's own steps stay in their order, and of equals the first session goes first.
    order = (-gains / added).argsort(kind="stable")
    # With none of the steps, with the first, with the first two, …
    forwarded = np.concatenate([[rest.forwarded + lengths.sum()], added[order]]).cumsum()
    gained = np.concatenate([[0.0], gains[order]]).cumsum()
    seconds = cost.of_rounds(forwarded, count + rest.sessions)
    # What such sessions usually bring, in rounds of the best size for that
    expected = rest.tokens + sum(offer.usual for offer in offers) + gained
    likely = int((expected / seconds).argmax())
    tokens = pace.tokens + PRIOR_ROUNDS * expected[likely]
    rate = tokens / (pace.seconds + PRIOR_ROUNDS * seconds[likely])
    taken = order[: (gained - rate * seconds).argmax()]  # of equals the fewest
    chosen = np.bincount(owner[taken], branches[taken], count).astype(np.int64).tolist()
    return [max(k, offer.least) for k, offer in zip(chosen, offers, strict=True)]


def concave_steps(choices: Sequence[int], gains: Sequence[float]) -> tuple[IntArray, FloatArray]:
    """(branches, tokens) that each step adds, with falling gains per branch.

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
    steps = np.diff(np.array(hull), axis=0)
    return steps[:, 0].astype(np.int64), steps[:, 1]
