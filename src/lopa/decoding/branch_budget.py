"""The budget: how many lookahead branches the next round is worth (`branches="auto"`).

A round returns the confidences of all its branches, so what fewer of them would have chosen, and
how many tokens that would have brought, is known without another forward. The budget keeps a
running estimate of what each step from one number of branches to the next adds. A step is worth its
time if it adds more than the same time brings at the rate at which this sequence has gone so far;
going by each round's own rate would spend too much where a round brings little anyway.

Nothing is drawn and no clock is read: what a round costs is given once for a run, so the same
statistics give the same choices on every rank. Single rounds differ widely, so an estimate begins
with what branches add on the built-in tasks and moves away from it slowly. A sequence that has gone
without branches for long tries one again, as far as a small share of its tokens allows.
"""

from __future__ import annotations

import math
from bisect import bisect_left as bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from lopa.config import AUTO_BRANCHES
from lopa.errors import ConfigError

# Tokens that each choice adds to the one before, with which `auto` does well both on `words`, where
# a round without branches brings five, and on `functions`, where it brings two (docs/results.md).
HOPES = (1.8, 1.8, 2.0, 1.4)
HOPE_WEIGHT = 20.0  # rounds that a hope counts for
FADING = 0.99  # weight of a round against the one after it
# Some of that would have come a round later by itself: what counts is this share. Of a first branch
# it depends on how probable its token is: (up to, share). A sure one was about to be filled anyway.
FIRST_LASTS = ((0.5, 1.0), (0.8, 0.85), (math.inf, 0.5))
MORE_LASTS = 0.9
ALONE_LASTS = 0.05  # of all that, while the first block waits for the next: it would fill up anyway
# Tokens hoped for in a round without branches: as long as no end of the text is in view an answer
# is a long one, and those begin slowly and go faster later.
PLAIN, PLAIN_OPEN = 1.8, 5.0
PLAIN_WEIGHT = 3.0  # rounds that the rate hoped for counts for
TRIALS = 0.01  # share of the tokens that may be lost on finding out whether a branch helps by now
FORGOTTEN = 0.5  # weight of all that is known of branches below which one is tried again


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The cost of a round by the tokens it forwards: straight lines between measured points.

    Before the first point it is flat, behind the last one the last line goes on.
    """

    points: tuple[tuple[int, float], ...]  # (tokens, seconds), tokens rising

    def __post_init__(self) -> None:
        tokens = [t for t, _ in self.points]
        if not tokens or tokens != sorted(set(tokens)) or min(s for _, s in self.points) <= 0:
            raise ConfigError("a round's cost is (tokens, seconds) points: tokens rising, above 0")

    def __call__(self, tokens: int) -> float:
        points = self.points
        place = bisect(points, (tokens,))  # the first point that is not before
        if place == 0 or len(points) == 1:
            return points[0][1]
        if place == len(points):
            (at, seconds), (to, then) = points[-2:]
            return then + max(0.0, (then - seconds) / (to - at)) * (tokens - to)
        (at, seconds), (to, then) = points[place - 1 : place + 1]
        return seconds + (then - seconds) * (tokens - at) / (to - at)

    def convex(self) -> RoundCost:
        """Without the points above a line between two others.

        What counts is the cost of more tokens, a small difference of two times that are each known
        to some percent. So it is taken not to fall as rounds get larger, which is nearly so.
        """
        hull: list[tuple[int, float]] = []
        for tokens, seconds in self.points:
            while len(hull) > 1:
                (at, began), (to, then) = hull[-2:]
                if (then - began) * (tokens - at) < (seconds - began) * (to - at):
                    break
                hull.pop()
            hull.append((tokens, seconds))
        return RoundCost(tuple(hull))


_MOST_PRICES = 1024  # kept at a time

EVERY_ROUND_THE_SAME = RoundCost(((1, 1.0),))  # for counting forwards


class Budget:
    """Learns from every round of one sequence and says how many branches the next may have."""

    def __init__(self, cost: RoundCost) -> None:
        self.cost = cost
        self._prices = _prices(cost)
        self._steps = [_Mean() for _ in AUTO_BRANCHES[1:]]  # what a choice adds to the one before
        self._gains = self._expected()
        self._tokens = self._spent = 0.0  # what all rounds have brought and cost
        self._lost = 0.0  # tokens that trials are expected to have cost

    def winners(self, scores: Sequence[float], lone: bool | None = None) -> list[int]:
        """The row that would have won with each choice that this round covers, in turn.

        The last one is covered by as many branches as there were candidates. lone: whether the
        first branch would have won against the anchor alone, where the scores do not tell.
        """
        anchor = len(scores) - 1
        found, best = [], anchor  # of equals the best-ranked lookahead, last of all the anchor
        for row in range(anchor + 1):
            if row in AUTO_BRANCHES or row == anchor:
                found.append(anchor if row == 1 and lone is False else best)
            if scores[row] > scores[best] or (best == anchor and scores[row] == scores[best]):
                best = row
        return found

    def learn(self, tokens: Sequence[int], forwarded: int) -> None:
        """tokens: what each of those winners brought, its lookahead token included.

        forwarded: tokens that the round is charged for.
        """
        self._tokens += tokens[-1]
        self._spent += self._prices.believed(forwarded)
        for step in self._steps:
            step.fade()
        for step, fewer, more in zip(self._steps, tokens, tokens[1:], strict=False):
            step.add(more - fewer)
        self._gains = self._expected()  # now, while the device works, not when a round waits

    def _expected(self) -> list[list[float]]:
        """Tokens that each choice adds to a round without branches, a list for each FIRST_LASTS."""
        added = []
        kept = 1.0  # share of what was hoped: one that brings less lowers the hope in the next
        for step, hope in zip(self._steps, HOPES, strict=True):
            added.append(step.value(hope * kept, HOPE_WEIGHT))
            kept = min(1.0, added[-1] / hope)
        first, *more = added
        return [
            [0.0, *accumulate((MORE_LASTS * x for x in more), initial=share * first)]
            for _, share in FIRST_LASTS
        ]

    def branches(
        self,
        row: int,
        candidates: int,
        sure: float,
        *,
        alone: bool = False,
        is_open: bool = False,
    ) -> int:
        """How many of the candidates to try in a round whose rows have so many tokens.

        sure: probability of the best candidate's token; alone: the first block waits for others;
        is_open: no end of the text is in view. The device waits meanwhile: no call too many.
        """
        choices, costs = self._prices[row, min(candidates, AUTO_BRANCHES[-1])]
        gains = self._gains[bisect(FIRST_LASTS, (sure,))]
        if alone:
            gains = [ALONE_LASTS * gain for gain in gains]
        # Tokens for the time: as it has been so far, and as hoped while little is known.
        plain = PLAIN_OPEN if is_open else PLAIN
        rates = [(plain + gains[i]) / cost for i, cost in enumerate(costs)]
        hope = rates.index(max(rates))
        tokens = self._tokens + PLAIN_WEIGHT * (plain + gains[hope])
        rate = tokens / (self._spent + PLAIN_WEIGHT * costs[hope])
        worth = [gains[i] - rate * cost for i, cost in enumerate(costs)]
        best = worth.index(max(worth))  # of equals the fewest
        if best == 0 and self._steps[0].weight < FORGOTTEN and len(worth) > 1:
            loss = worth[0] - worth[1]
            if self._lost + loss <= TRIALS * self._tokens:
                self._lost += loss
                best = 1
        return choices[best]


class _Prices(dict[tuple[int, int], tuple[list[int], list[float]]]):
    """By tokens of a row and candidates: the numbers of branches to choose from, and their cost."""

    def __init__(self, cost: RoundCost) -> None:
        self.believed = cost.convex()

    def __missing__(self, key: tuple[int, int]) -> tuple[list[int], list[float]]:
        if len(self) == _MOST_PRICES:  # a canvas is as long as its prompt
            self.clear()
        row, candidates = key
        choices = [*(k for k in AUTO_BRANCHES if k < candidates), candidates]
        self[key] = choices, [self.believed(row * (k + 1)) for k in choices]
        return self[key]


@lru_cache(maxsize=16)
def _prices(cost: RoundCost) -> _Prices:
    """The same for all sequences: a run has one cost."""
    return _Prices(cost)


class _Mean:
    """A mean over past rounds in which older ones count for less."""

    def __init__(self) -> None:
        self.sum = self.weight = 0.0

    def fade(self) -> None:
        self.sum *= FADING
        self.weight *= FADING

    def add(self, value: float) -> None:
        self.sum += value
        self.weight += 1.0

    def value(self, hope: float, hope_weight: float) -> float:
        return (self.sum + hope * hope_weight) / (self.weight + hope_weight)
