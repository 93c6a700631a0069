"""The row budget: how many branches each session of a round may have, all of them weighed together.

A round of all sessions is one forward, and what it costs depends on the tokens of all rows, and on
what their branches cost the host. Every session offers what more and more branches are expected to
bring. The steps of all sessions are ranked by their gain per second. They are taken as far as they
gain more than the same time brings at the pace of the rounds so far: going by the round's own rate
would spend too much where it brings little anyway. The anchors are always forwarded.

Pure: the same offers and cost give the same numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import RoundCost
from lopa.types import FloatArray, IntArray

PRIOR_ROUNDS = 3.0  # that what sessions usually bring counts for beside what they have brought
PACE_DECAY = 0.95  # weight of a round against the one after it
_LEAST_SLOPE = 1e-15  # seconds a token: rows that cost nothing are no division by 0


class Offer(NamedTuple):
    """What a session expects of the branches of its next round."""

    row_length: int  # tokens of a row
    usual: float  # tokens that a round of its anchor alone usually brings
    # Branches that each step adds, tokens that it brings: fewer per branch from step to step
    steps: tuple[tuple[int, float], ...]
    least: int = 0  # branches that it has in any case
    # The same for a round as they usually are, where a number is kept for several
    usual_steps: tuple[tuple[int, float], ...] = ()

    def gain_of(self, branches: int) -> float:
        """Tokens that so many branches are expected to bring over none."""
        gained = 0.0
        for added, gain in self.steps:
            branches -= added
            if branches < 0:
                break
            gained += gain
        return gained


class Rest(NamedTuple):
    """The sessions of a round whose branches are no choice, all together."""

    sessions: int = 0
    forwarded: int = 0  # tokens of all their rows
    tokens: float = 0.0  # that a round of them brings
    host: float = 0.0  # seconds, their part of a round


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
    if len(offers) == 1:
        return [_allocate_one(offers[0], cost, pace, rest)]
    count = len(offers)
    steps = [step for offer in offers for step in offer.steps]
    branches, gains = np.array(steps, np.float64).reshape(-1, 2).T
    owner = np.arange(count).repeat([len(offer.steps) for offer in offers])
    lengths = np.array([offer.row_length for offer in offers])
    tokens, anchors = branches * lengths[owner], rest.forwarded + int(lengths.sum())
    host = _host_steps(branches, owner, cost)
    # With none of the steps, with the first, with the first two, … in the order of their worth
    forwarded, gained, on_host = sums = np.zeros((3, len(owner) + 1))
    each = np.array([tokens, gains, host])
    # Stable: a session's own steps stay in their order; of equals the first session goes first.
    order = (-_worth(gains, tokens, host, owner, anchors, cost)).argsort(kind="stable")
    each = each[:, order]
    each.cumsum(axis=1, out=sums[:, 1:])
    forwarded += anchors
    on_host += rest.host + count * cost.host_of_none
    seconds = cost.of_rounds(forwarded, on_host, count + rest.sessions)
    # What such sessions usually bring, in rounds of the best size for that
    expected = gained + (rest.tokens + sum(offer.usual for offer in offers))
    likely = int((expected / seconds).argmax())
    brought = pace.tokens + PRIOR_ROUNDS * float(expected[likely])
    rate = brought / (pace.seconds + PRIOR_ROUNDS * float(seconds[likely]))
    taken = order[: (gained - rate * seconds).argmax()]  # of equals the fewest
    chosen = np.bincount(owner[taken], branches[taken], count).tolist()
    return [max(int(k), offer.least) for k, offer in zip(chosen, offers, strict=True)]


def _allocate_one(offer: Offer, cost: RoundCost, pace: Pace, rest: Rest) -> int:
    """The same for a single offer, whose steps have an order: without arrays."""

    def seconds_of(branches: int) -> float:
        tokens = offer.row_length * (branches + 1)
        if not rest.sessions:
            return cost.of_one(tokens, branches)
        host = rest.host + cost.host_of_all((branches,))
        return cost.of_round(rest.forwarded + tokens, host, rest.sessions + 1)

    taken, gained = 0, 0.0
    found = [(0, 0.0, seconds_of(0))]  # branches, tokens gained, seconds
    for added, gain in offer.steps:
        taken, gained = taken + added, gained + gain
        found.append((taken, gained, seconds_of(taken)))
    # What such sessions usually bring, in rounds of the best size for that
    usual = rest.tokens + offer.usual
    _, more, seconds = max(found, key=lambda one: (usual + one[1]) / one[2])
    brought = pace.tokens + PRIOR_ROUNDS * (usual + more)
    rate = brought / (pace.seconds + PRIOR_ROUNDS * seconds)
    best = max(found, key=lambda one: one[1] - rate * one[2])  # of equals the fewest
    return max(best[0], offer.least)


def _host_steps(branches: FloatArray, owner: IntArray, cost: RoundCost) -> FloatArray:
    """Seconds that each step costs the host beside the steps before it."""
    if not cost.host:
        return np.zeros(len(branches))
    after = branches.cumsum()
    after -= (after - branches)[owner.searchsorted(owner)]  # of this session alone
    return cost.host_of(after) - cost.host_of(after - branches)


def _worth(
    gains: FloatArray,
    tokens: FloatArray,
    host: FloatArray,
    owner: IntArray,
    anchors: int,  # tokens of a round without the steps
    cost: RoundCost,
) -> FloatArray:
    """What each step brings for its time, never rising within a session.

    The first branch may cost the host more than those behind it: a step is worth what it brings
    together with the steps behind it, where that is more.
    """
    if not cost.host:
        return gains / tokens
    whole = float(tokens.sum())
    fewest, most = cost.of_rounds(np.array([anchors, anchors + whole]), 0.0, 1).tolist()
    seconds = tokens * max((most - fewest) / max(whole, 1.0), _LEAST_SLOPE) + host
    worth: FloatArray = gains / seconds
    gained, spent = gains, seconds
    for more in range(1, len(AUTO_BRANCHES) - 1):
        gained, spent = gained[:-1] + gains[more:], spent[:-1] + seconds[more:]
        here = worth[:-more]
        np.maximum(here, gained / spent, out=here, where=owner[:-more] == owner[more:])
    same = owner[1:] == owner[:-1]
    for _ in AUTO_BRANCHES[2:]:
        worth[1:] = np.where(same, np.minimum(worth[1:], worth[:-1]), worth[1:])
    return worth


@lru_cache(maxsize=1024)  # sessions that have learned nothing yet have the same gains
def concave_steps(
    choices: tuple[int, ...], gains: tuple[float, ...]
) -> tuple[tuple[int, float], ...]:
    """Branches and tokens that each step adds, with falling gains per branch.

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
    return tuple((b1 - b0, g1 - g0) for (b0, g0), (b1, g1) in pairwise(hull))
