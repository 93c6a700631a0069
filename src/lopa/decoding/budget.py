"""The budget: how many lookahead branches the next round is worth (`branches="auto"`).

A round returns the confidences of all its branches, so what fewer of them would have chosen, and
how many tokens that would have brought, is known without another forward. The budget keeps a
running estimate of what each step from one number of branches to the next adds, and takes the
number with the most tokens for the time that the round will take.

Nothing is drawn and no clock is read: what a round costs is given once for a run, so the same
statistics give the same choices on every rank. Old evidence fades, and what it fades to is the
hope that looking ahead helps; a sequence that has gone without branches for long tries one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lopa.config import AUTO_BRANCHES
from lopa.decoding.lookahead import Scores, select
from lopa.errors import ConfigError

HOPE = 0.3  # tokens that the first branch adds, as a share of those without
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
        x, y = zip(*self.points, strict=True)
        if tokens > x[-1] and len(x) > 1:
            slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
            return float(y[-1] + slope * (tokens - x[-1]))
        return float(np.interp(tokens, x, y))


EVERY_ROUND_THE_SAME = RoundCost(((1, 1.0),))  # for counting forwards


class Budget:
    """Learns from every round of one sequence and says how many branches the next may have."""

    def __init__(self, cost: RoundCost) -> None:
        self.cost = cost
        self._plain = _Mean()  # tokens of a round without branches
        self._steps = [
            _Mean() for _ in AUTO_BRANCHES[1:]
        ]  # what each choice adds to the one before

    def winners(self, scores: Scores) -> list[int]:
        """The row that would have won with each choice that this round covers, in turn."""
        ahead = len(scores) - 1  # the anchor is the last row
        covered = [k for k in AUTO_BRANCHES if k <= ahead]
        rows = [np.array([*range(k), ahead]) for k in covered]
        return [int(r[select(scores[r])]) for r in rows]

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
        added = HOPE * found[0]
        for step in self._steps:  # a doubling of the rows is hoped to add what the last one did
            added = step.value(added, HOPE_WEIGHT)
            found.append(found[-1] + added)
        return found

    def branches(self, tokens: Sequence[int]) -> int:
        """How many of the candidates to try; tokens: what a round with 0, 1, … of them forwards."""
        rates = {
            k: gain / self.cost(tokens[k])
            for k, gain in zip(AUTO_BRANCHES, self.gains(), strict=True)
            if k < len(tokens)
        }
        best = max(rates, key=rates.__getitem__)  # of equals the fewest branches
        forgotten = best == 0 and self._steps[0].weight < FORGOTTEN
        return min(1, len(tokens) - 1) if forgotten else best


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
