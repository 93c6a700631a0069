"""The branch budget: how many lookahead branches the next round is worth (`branches="auto"`).

A round returns the confidences of all its branches, so what fewer of them would have chosen, and
how many tokens that would have brought, is known without another forward. The budget keeps a
running estimate of the gain of each step from one number of branches to the next. A step is worth
its time if it gains more than the same time brings at the rate of this sequence so far; going by
each round's own rate would spend too much where a round brings little anyway.

Nothing is sampled and no clock is read: what a round costs is given once for a run, so the same
statistics give the same choices on every rank. Single rounds differ widely, so an estimate starts
from a prior, measured on the built-in tasks, and leaves it slowly. A sequence that has gone without
branches for long explores one again, as far as a small share of its tokens allows.
"""

from __future__ import annotations

import math
from bisect import bisect_left as bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from lopa.config import AUTO_BRANCHES, AcceptName
from lopa.decoding.lookahead import Scores, merge, wins_alone
from lopa.decoding.outcome import Outcome
from lopa.errors import ConfigError
from lopa.types import BoolArray

# Prior of the tokens that each choice gains over the one before, by the way branches are accepted:
# rounded means over rounds of `words`, where a round without branches brings five, and of
# `functions`, where it brings two.
PRIOR_GAINS: dict[AcceptName, tuple[float, ...]] = {
    "score": (1.8, 1.8, 2.0, 1.4),
    "agreed": (1.4, 1.8, 2.8, 2.9),
    "exact": (0.5, 0.8, 0.4, 0.3),
}
PRIOR_COUNT = 20.0  # rounds that this prior counts for
EMA_DECAY = 0.99  # weight of a round against the one after it
# Some of a gain would have come a round later by itself: what counts is this share of it. For the
# first branch it depends on the probability of its token, (up to, share): a confident one was about
# to be filled anyway. What `exact` gains is the whole of a later round.
FIRST_GAIN_SHARES = ((0.5, 1.0), (0.8, 0.85), (math.inf, 0.5))
NEXT_GAIN_SHARE = 0.9  # of the gain of more branches
WAITING_GAIN_SHARE = 0.05  # of all that, while the first block waits: it would fill up anyway
# Prior of the tokens that a round without branches brings. As long as no EOS is in view (open) the
# answer is a long one, and those start slowly and get faster.
PRIOR_TOKENS, PRIOR_TOKENS_OPEN = 1.8, 5.0
PRIOR_RATE_COUNT = 3.0  # rounds that the prior of the rate counts for
EXPLORE_SHARE = 0.01  # of the tokens, that may be lost on finding out whether a branch helps by now
EXPLORE_BELOW = 0.5  # explore when all that is known of branches has decayed below this weight


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
                (t0, s0), (t1, s1) = hull[-2:]
                if (s1 - s0) * (tokens - t0) < (seconds - s0) * (t1 - t0):
                    break
                hull.pop()
            hull.append((tokens, seconds))
        return RoundCost(tuple(hull))


_MOST_COSTS = 1024  # kept at a time

EVERY_ROUND_THE_SAME = RoundCost(((1, 1.0),))  # for counting forwards


class BranchBudget:
    """Learns from every round of one sequence and chooses how many branches the next may have."""

    def __init__(self, cost: RoundCost, accept: AcceptName) -> None:
        self.cost = cost
        self.accept = accept
        self._costs = _cost_table(cost)
        self._steps = [_DecayedMean() for _ in AUTO_BRANCHES[1:]]  # gain of a choice over the last
        self._gains = self._expected_gains()
        self._tokens = self._spent = 0.0  # what all rounds have brought and cost
        self._lost = 0.0  # tokens that exploring is expected to have cost

    def observe(self, outcome: Outcome) -> None:
        """Learn what a round would have brought with each number of branches."""
        plan, winners = outcome.plan, [0]
        merged: list[BoolArray | None] = []
        if outcome.selection is not None:
            config, scores = outcome.fill_rule.config, outcome.selection.allowed
            if config.accept == "exact":
                winners = self.chain_ends(outcome.chain, len(outcome.drafts))
            else:
                winners = self.winners(scores.tolist(), wins_alone(scores, outcome.drafts, config))
            if config.merge:
                merged = _merged(outcome, scores, winners)
        # The prompt, which the first round has too, is no choice, and may be in the cache already.
        start = max(plan.start, outcome.view.offset) if plan.index == 1 else plan.start
        self.learn(outcome.brought(winners, merged), int((plan.row_ends - start).sum()))

    def winners(self, scores: Sequence[float], lone: bool | None = None) -> list[int]:
        """The row that would have won with each choice that this round covers, in turn.

        The last one is covered by as many branches as there were candidates. lone: whether the
        first branch would have won against the anchor alone, where the scores do not tell.
        """
        anchor = len(scores) - 1
        found, best = [], anchor  # ties go to the best-ranked lookahead, last of all to the anchor
        for row in range(anchor + 1):
            if row in AUTO_BRANCHES or row == anchor:
                found.append(anchor if row == 1 and lone is False else best)
            if scores[row] > scores[best] or (best == anchor and scores[row] == scores[best]):
                best = row
        return found

    def chain_ends(self, chain: Sequence[int], anchor: int) -> list[int]:
        """The same where rows are taken in turn: without one of them the chain ends before it."""
        ends = []
        for count in _choices(anchor):
            end = anchor
            for row in chain[1:]:
                if row >= count:
                    break
                end = row
            ends.append(end)
        return ends

    def learn(self, tokens: Sequence[int], forwarded: int) -> None:
        """tokens: what each of those winners brought, its lookahead token included.

        forwarded: tokens that the round is charged for.
        """
        self._tokens += tokens[-1]
        self._spent += self._costs.cost(forwarded)
        for step in self._steps:
            step.decay()
        for step, fewer, more in zip(self._steps, tokens, tokens[1:], strict=False):
            step.add(more - fewer)
        # Now, while the device works: `choose_branches` keeps it waiting.
        self._gains = self._expected_gains()

    def _expected_gains(self) -> list[list[float]]:
        """Tokens that each choice gains over no branches, a list for each FIRST_GAIN_SHARES."""
        gains = []
        kept = 1.0  # a choice that gains less than its prior lowers the prior of the next
        for step, prior in zip(self._steps, PRIOR_GAINS[self.accept], strict=True):
            gains.append(step.value(prior * kept, PRIOR_COUNT))
            kept = min(1.0, gains[-1] / prior)
        first, *more = gains
        if self.accept == "exact":
            return [[0.0, *accumulate(more, initial=first)]] * len(FIRST_GAIN_SHARES)
        return [
            [0.0, *accumulate((NEXT_GAIN_SHARE * x for x in more), initial=share * first)]
            for _, share in FIRST_GAIN_SHARES
        ]

    def choose_branches(
        self,
        row_length: int,
        candidates: int,
        top_prob: float,
        *,
        is_waiting: bool = False,
        is_open: bool = False,
    ) -> int:
        """How many of the candidates to try in a round whose rows have so many tokens.

        top_prob: of the best candidate's token; is_waiting: the first block waits for the next;
        is_open: no EOS is in view. The device waits meanwhile: no call too many.
        """
        choices, costs = self._costs[row_length, min(candidates, AUTO_BRANCHES[-1])]
        gains = self._gains[bisect(FIRST_GAIN_SHARES, (top_prob,))]
        if is_waiting:
            gains = [WAITING_GAIN_SHARE * gain for gain in gains]
        # Tokens for the time: what all rounds brought, and the best of the prior on top.
        prior = PRIOR_TOKENS_OPEN if is_open else PRIOR_TOKENS
        rates = [(prior + gains[i]) / cost for i, cost in enumerate(costs)]
        likely = rates.index(max(rates))
        tokens = self._tokens + PRIOR_RATE_COUNT * (prior + gains[likely])
        rate = tokens / (self._spent + PRIOR_RATE_COUNT * costs[likely])
        worth = [gains[i] - rate * cost for i, cost in enumerate(costs)]
        best = worth.index(max(worth))  # of equals the fewest
        if best == 0 and self._steps[0].weight < EXPLORE_BELOW and len(worth) > 1:
            loss = worth[0] - worth[1]
            if self._lost + loss <= EXPLORE_SHARE * self._tokens:
                self._lost += loss
                best = 1
        return choices[best]


def _choices(candidates: int) -> list[int]:
    """Numbers of branches to choose from."""
    return [*(k for k in AUTO_BRANCHES if k < candidates), candidates]


def _merged(outcome: Outcome, scores: Scores, winners: list[int]) -> list[BoolArray | None]:
    """What each of the winners takes from others, if there are no more branches than its choice."""
    config, anchor = outcome.fill_rule.config, len(outcome.drafts)
    found = []
    for count, winner in zip(_choices(anchor), winners, strict=True):
        among = scores.copy()
        among[count:anchor] = -math.inf
        found.append(merge(outcome.view, outcome.drafts, among, winner, config))
    return found


class _CostTable(dict[tuple[int, int], tuple[list[int], list[float]]]):
    """By row length and candidates: the numbers of branches to choose from, and their costs."""

    def __init__(self, cost: RoundCost) -> None:
        self.cost = cost.convex()

    def __missing__(self, key: tuple[int, int]) -> tuple[list[int], list[float]]:
        if len(self) == _MOST_COSTS:  # a canvas is as long as its prompt
            self.clear()
        row_length, candidates = key
        choices = _choices(candidates)
        self[key] = choices, [self.cost(row_length * (k + 1)) for k in choices]
        return self[key]


@lru_cache(maxsize=16)
def _cost_table(cost: RoundCost) -> _CostTable:
    """The same for all sequences: a run has one cost."""
    return _CostTable(cost)


class _DecayedMean:
    """A mean over past rounds in which older ones count for less."""

    def __init__(self) -> None:
        self.sum = self.weight = 0.0

    def decay(self) -> None:
        self.sum *= EMA_DECAY
        self.weight *= EMA_DECAY

    def add(self, value: float) -> None:
        self.sum += value
        self.weight += 1.0

    def value(self, prior: float, prior_count: float) -> float:
        return (self.sum + prior * prior_count) / (self.weight + prior_count)
