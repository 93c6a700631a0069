"""The branch budget: what lookahead branches are worth to a sequence (`branches="auto"`).

A round returns the confidences of all its branches, so what fewer of them would have chosen, and
how many tokens that would have brought, is known without another forward. The budget keeps a
running estimate of the gain of each step from one number of branches to the next. The `row_budget`
weighs that against what rows cost.

Nothing is sampled and no clock is read, so the same statistics give the same offers on every rank.
Single rounds differ widely, so an estimate starts from a prior, measured on the built-in tasks, and
leaves it slowly. A sequence that has gone without branches for long tries one again, except where
the number is kept for several rounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left as bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from lopa.config import AUTO_BRANCHES, AcceptName
from lopa.decoding.lookahead import merge, wins_alone
from lopa.decoding.outcome import Outcome
from lopa.decoding.row_budget import NO_STEPS, Offer, Steps, concave_steps
from lopa.types import BoolArray

# Prior of the tokens that each choice gains over the one before, by the way branches are accepted:
# rounded means over rounds of `words`, where a round without branches brings five, and of
# `functions`, where it brings two (measurements/prior_gains.py).
PRIOR_GAINS: dict[AcceptName, tuple[float, ...]] = {
    "score": (1.8, 1.8, 2.0, 1.4),
    "agreed": (1.4, 1.8, 2.8, 2.9),
    "exact": (0.5, 0.8, 0.4, 0.3),
}
# Rounds, one of so many is learned of: usually, and where the number of branches is kept (there
# the host is what takes long)
LEARN_EVERY, LEARN_EVERY_KEPT = 8, 32
PRIOR_COUNT = 3.5  # rounds learned of that this prior counts for
EMA_DECAY = 0.92  # weight of a round against the next one that is learned of
# Some of a gain would have come a round later by itself, and a first token that is right makes
# later rounds better: what counts is this share of it. For the first branch it also depends on the
# probability of its token, (up to, share): a confident one was about to be filled anyway. What
# `exact` gains is the whole of a later round.
FIRST_GAIN_SHARES = ((0.8, 0.85), (math.inf, 0.7))
GAIN_SHARES: dict[AcceptName, tuple[float, ...]] = {
    "score": (1.0, 0.9, 0.9, 0.9),
    "agreed": (1.55, 0.9, 0.7, 0.5),
    "exact": (1.0, 1.0, 1.0, 1.0),
}
# The same over all rounds, where a number of branches is kept for several of them: what is left of
# PRIOR_GAINS in the tokens per forward of fixed numbers (measurements/load_time.py). From one to
# three branches that is 1.0 of `words` and 0.7 of `functions`. It counts for `words`: at a load
# where those take one or three, seven are best for `functions`.
USUAL_GAIN_SHARES: dict[AcceptName, tuple[float, ...]] = {
    **GAIN_SHARES,
    "agreed": (1.2, 1.0, 0.68, 0.5),
}
# Of all that, while the first block is alone and waits for the next: what gave the most throughput
# with simulated rounds of a 7B model (lopa study load --cost, 96 problems of each task).
WAITING_GAIN_SHARE: dict[AcceptName, float] = {"score": 0.3, "agreed": 1.0, "exact": 0.3}
# Prior of the tokens that a round without branches brings. As long as no EOS is in view (open) the
# answer is a long one, and those start slowly and get faster.
PRIOR_TOKENS, PRIOR_TOKENS_OPEN = 2.4, 5.0
EXPLORE_AFTER = 10  # rounds learned of without a branch, until one is tried: it may help by now


class BranchBudget:
    """Learns from rounds of one sequence and offers the branches of the next."""

    def __init__(self, accept: AcceptName, usual_row: int = 0) -> None:
        """usual_row: tokens that most of its rows have at least."""
        self.accept = accept
        self._usual_row = usual_row
        self._steps = [_DecayedMean() for _ in AUTO_BRANCHES[1:]]  # gain of a choice over the last
        self._unexplored = 0  # rounds learned of since the last one with a branch
        # Tokens that each choice gains over none, by FIRST_GAIN_SHARES; and the steps of a usual
        # round, where a number is kept for several
        self._gains, self.usual_steps = prior_expectations(accept)

    def observe(self, outcome: Outcome) -> None:
        """Learn what a round would have brought with each number of branches."""
        if outcome.selection is None:
            self.learn(())  # nothing to compare the anchor with
            return
        config, scores = outcome.fill_rule.config, outcome.selection.allowed
        if config.accept == "exact":
            winners = self.chain_ends(outcome.chain, len(outcome.drafts))
        else:
            winners = self.winners(scores, wins_alone(scores, outcome.drafts, config))
        merged = _merged(outcome, scores, winners) if config.merge else []
        self.learn(outcome.brought(winners, merged))

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

    def learn(self, tokens: Sequence[int]) -> None:
        """tokens: what each of those winners brought, its lookahead token included.

        None where there were no branches.
        """
        self._unexplored = 0 if len(tokens) > 1 else self._unexplored + 1
        for mean in self._steps:
            mean.decay()
        for step, fewer, more in zip(self._steps, tokens, tokens[1:], strict=False):
            step.add(more - fewer)
        # Now, while the device works: `offer` keeps it waiting.
        self._expect()

    def _expect(self) -> None:
        """What choices gain by now, of which a part is still the prior."""
        gains = []
        kept = 1.0  # a choice that gains less than its prior lowers the prior of the next
        for step, prior in zip(self._steps, PRIOR_GAINS[self.accept], strict=True):
            gains.append(step.value(prior * kept, PRIOR_COUNT))
            kept = min(1.0, gains[-1] / prior)
        self._gains, self.usual_steps = _expected(self.accept, gains)

    def offer(
        self,
        row_length: int,
        candidates: int,
        top_prob: float,
        *,
        index: int = 0,
        is_waiting: bool = False,
        is_open: bool = False,
    ) -> Offer:
        """What the candidates are worth in a round whose rows have so many tokens.

        top_prob: of the best candidate's token; index: of the round; is_waiting: the first block
        waits for the next; is_open: no EOS is in view. The device waits meanwhile: no call too
        many.
        """
        first_share = bisect(FIRST_GAIN_SHARES, (top_prob,))
        candidates = min(candidates, AUTO_BRANCHES[-1])
        choices = _choices(candidates)
        share = WAITING_GAIN_SHARE[self.accept] if is_waiting else 1.0
        steps = concave_steps(choices, self._gains[first_share][: len(choices)], share)
        explores = self._unexplored >= EXPLORE_AFTER and index % LEARN_EVERY == 0
        least = min(candidates, int(explores))
        usual = self.usual_offer(row_length, is_open=is_open)
        return usual._replace(steps=steps, least=least)

    def usual_offer(self, row_length: int, *, is_open: bool) -> Offer:
        """What a usual round expects, whatever its candidates are."""
        prior = PRIOR_TOKENS_OPEN if is_open else PRIOR_TOKENS
        return Offer(row_length, prior, NO_STEPS, 0, self._usual_row, self.usual_steps)


def _expected(accept: AcceptName, gains: Sequence[float]) -> tuple[list[tuple[float, ...]], Steps]:
    """Tokens that each choice gains over none, by FIRST_GAIN_SHARES, and the usual steps.

    gains: of each choice over the one before.
    """
    usual = [g * s for g, s in zip(gains, USUAL_GAIN_SHARES[accept], strict=True)]
    first, *more = (g * s for g, s in zip(gains, GAIN_SHARES[accept], strict=True))
    shares = [1.0 if accept == "exact" else share for _, share in FIRST_GAIN_SHARES]
    each = [(0.0, *accumulate((share * first, *more))) for share in shares]
    return each, concave_steps(AUTO_BRANCHES, (0.0, *accumulate(usual)))


@lru_cache
def prior_expectations(accept: AcceptName) -> tuple[list[tuple[float, ...]], Steps]:
    """Of a sequence that nothing is known of: every request begins with it."""
    return _expected(accept, PRIOR_GAINS[accept])


@lru_cache
def _choices(candidates: int) -> tuple[int, ...]:
    """Numbers of branches to choose from."""
    return *(k for k in AUTO_BRANCHES if k < candidates), candidates


def _merged(outcome: Outcome, scores: list[float], winners: list[int]) -> list[BoolArray | None]:
    """What each of the winners takes from others, if there are no more branches than its choice."""
    config, anchor = outcome.fill_rule.config, len(outcome.drafts)
    found = []
    for count, winner in zip(_choices(anchor), winners, strict=True):
        among = scores[:count] + [-math.inf] * (anchor - count) + scores[anchor:]
        found.append(merge(outcome.view, outcome.drafts, among, winner, config))
    return found


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
