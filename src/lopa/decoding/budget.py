"""The budget: how many lookahead branches the next round is worth (`branches="auto"`).

A round returns the confidences of all its branches, so what fewer of them would have chosen, and
how many tokens that would have brought, is known without another forward. The budget keeps a
running estimate of what each step from one number of branches to the next adds, and takes the
number with the most tokens for the time that the round will take.

Nothing is drawn and no clock is read: what a round costs is given once for a run, so the same
statistics give the same choices on every rank. Old evidence fades, and what it fades to is the
hope that looking ahead helps as much as it does on the built-in tasks (docs/results.md). A sequence
that has gone without branches for long tries one again, as far as a small share of its time allows.
"""

from __future__ import annotations

from bisect import bisect_left as bisect
from collections.abc import Sequence
from dataclasses import dataclass

from lopa.config import AUTO_BRANCHES
from lopa.errors import ConfigError

# Tokens that each choice adds to the one before, as a share of those without branches: what it does
# on `words`, where looking ahead adds less than on `functions` (the study `speed`).
HOPES = (0.3, 0.25, 0.25, 0.25)
TRIALS = 0.02  # share of the time that may be lost on finding out whether a branch helps by now
HOPE_WEIGHT = 2.0  # rounds that a hope counts for
FADING = 0.97  # weight of a round against the one after it
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


EVERY_ROUND_THE_SAME = RoundCost(((1, 1.0),))  # for counting forwards


class Budget:
    """Learns from every round of one sequence and says how many branches the next may have."""

    def __init__(self, cost: RoundCost) -> None:
        self.cost = cost
        self._plain = _Mean()  # tokens of a round without branches
        self._steps = [_Mean() for _ in AUTO_BRANCHES[1:]]  # what a choice adds to the one before
        self._spent = 0.0  # cost of all rounds
        self._lost = 0.0  # of it, what trials are expected to have lost

    def winners(self, scores: Sequence[float]) -> list[int]:
        """The row that would have won with each choice that this round covers, in turn.

        The last one is covered by as many branches as there were candidates.
        """
        anchor = len(scores) - 1
        found, best = [], anchor  # of equals the best-ranked lookahead, last of all the anchor
        for row in range(anchor + 1):
            if row in AUTO_BRANCHES or row == anchor:
                found.append(best)
            if scores[row] > scores[best] or (best == anchor and scores[row] == scores[best]):
                best = row
        return found

    def learn(self, tokens: Sequence[int]) -> None:
        """tokens: what each of those winners brought, its lookahead token included."""
        for mean in (self._plain, *self._steps):
            mean.fade()
        self._plain.add(tokens[0])
        for step, fewer, more in zip(self._steps, tokens, tokens[1:], strict=False):
            step.add(more - fewer)

    def gains(self) -> list[float]:
        """Tokens expected of a round, by choice."""
        found = [self._plain.value(1.0, 0.0)]
        added, before = found[0], 1.0
        for step, hope in zip(self._steps, HOPES, strict=True):
            # One that brings more than was hoped raises the hope in the next.
            added = step.value(added * hope / before, HOPE_WEIGHT)
            found.append(found[-1] + added)
            before = hope
        return found

    def branches(self, row: int, candidates: int) -> int:
        """How many of the candidates to try in a round whose rows have so many tokens."""
        choices = [k for k in AUTO_BRANCHES if k < candidates]
        if candidates <= AUTO_BRANCHES[-1]:
            choices.append(candidates)
        costs = {k: self.cost(row * (k + 1)) for k in choices}
        gains = dict(zip(costs, self.gains(), strict=False))
        rates = {k: gain / costs[k] for k, gain in gains.items()}
        best = max(rates, key=rates.__getitem__)  # of equals the fewest branches
        if best == 0 and 1 in costs and self._steps[0].weight < FORGOTTEN:
            loss = costs[1] - gains[1] / rates[0]  # against making those tokens without branches
            if self._lost + loss <= TRIALS * (self._spent + costs[1]):
                self._lost += loss
                best = 1
        self._spent += costs[best]
        return best


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
        weight = self.weight + hope_weight
        return (self.sum + hope * hope_weight) / weight if weight else hope
