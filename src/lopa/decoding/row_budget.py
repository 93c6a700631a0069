"""The row budget: how many branches each session of a round may have, all of them weighed together.

A round of all sessions is one forward, and what it costs depends on the tokens of all rows, and on
what their branches cost the host. Every session offers what more and more branches are expected to
bring. The steps of all sessions are ranked by their gain per second. They are taken as far as they
gain more than the same time brings at the pace of the rounds so far: going by the round's own rate
would spend too much where it brings little anyway. The anchors are always forwarded. Where numbers
are kept for several rounds all sessions have the same one: the one with which usual rounds bring
the most tokens per second. A usual round brings the tokens of its anchor alone, which are learned,
and what so many branches usually add.

Pure: the same offers and cost give the same numbers on every rank.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import NO_HOST, HostPart, RoundCost

PRIOR_ROUNDS = 3.0  # that what sessions usually bring counts for, as long as nothing is known
PACE_DECAY = 0.95  # weight of a round against the one after it
# The same for anchor tokens. Slower: noise would change the number that is kept, and each change
# takes the host time.
ANCHOR_DECAY = 0.98
# Where the sessions' part of a round is at least this share of the rest of it, they keep their
# number for several rounds: to weigh the candidates of each takes the host time, too.
KEEP_FROM_SHARE = 0.25
# Seconds of a session on the host, from which on weighing it in every round, some 10 µs, is no
# matter. Without an asynchronous runner its forward is part of them.
LONG_HOST = 0.001
# Rows that rounds forward for each of AUTO_BRANCHES, where it is kept to the end: there an answer
# has fewer masks than that.
USUAL_ROWS = (0.0, 0.9, 2.6, 5.7, 10.5)
_LEAST_SLOPE = 1e-15  # seconds a token: rows that cost nothing are no division by 0
_MOST_STEPS = len(AUTO_BRANCHES) - 1  # of an offer
_COLUMNS = 6  # of a ranked step: see `_rank`
_BRANCHES = 5  # the last of them
_NO_STEP = (math.inf, *[0.0] * _BRANCHES)  # ranks last
_PACKED = struct.Struct(f"{_MOST_STEPS * _COLUMNS}d").pack
_MOST_KEPT = 4096  # of steps ranked, of rounds


@dataclass(frozen=True, slots=True, eq=False)  # one by itself: what is made of it can be kept
class Steps:
    """What more and more branches are expected to bring, as `concave_steps` makes it."""

    # Branches that each step adds, tokens that it brings: fewer per branch from step to step
    each: tuple[tuple[int, float], ...] = ()

    def gain_of(self, branches: int) -> float:
        """Tokens that so many branches are expected to bring over none."""
        gained = 0.0
        for added, gain in self.each:
            branches -= added
            if branches < 0:
                break
            gained += gain
        return gained


NO_STEPS = Steps()


class Offer(NamedTuple):
    """What a session expects of the branches of its next round."""

    row_length: int  # tokens of a row
    usual: float  # tokens that a round of its anchor alone usually brings
    steps: Steps
    least: int = 0  # branches that it has in any case
    # Of a usual round, where a number is kept for several: tokens of its row at least, and steps
    usual_row: int = 0
    usual_steps: Steps = NO_STEPS


class Rest(NamedTuple):
    """The sessions of a round whose branches are no choice, all together."""

    sessions: int = 0
    forwarded: int = 0  # tokens of all their rows
    tokens: float = 0.0  # that a round of them brings
    host: HostPart = NO_HOST


@dataclass(slots=True)
class Pace:
    """What the rounds so far have brought and cost; older ones count for less."""

    tokens: float = 0.0
    seconds: float = 0.0
    prior_rounds: float = PRIOR_ROUNDS  # that what sessions usually bring counts for beside it

    def add(self, tokens: float, seconds: float) -> None:
        # An EOS may cut off tokens of rounds that count for less by now.
        brought = PACE_DECAY * self.tokens + tokens
        self.tokens = brought if brought > 0.0 else 0.0
        self.seconds = PACE_DECAY * self.seconds + seconds
        self.prior_rounds *= PACE_DECAY

    def rate_with(self, tokens: float, seconds: float) -> float:
        """Tokens per second. Given: what a round of such sessions usually brings and takes."""
        brought = self.tokens + self.prior_rounds * tokens
        return brought / (self.seconds + self.prior_rounds * seconds)


@dataclass(slots=True)
class AnchorTokens:
    """Tokens that a round of the anchor alone brings, learned where a number of branches is kept.

    They are what rounds brought, less what so many branches usually add.
    """

    tokens: float = 0.0
    rounds: float = 0.0  # of one session

    def add(self, tokens: float, sessions: int = 1) -> None:
        """Of a round of so many sessions."""
        self.tokens = ANCHOR_DECAY * self.tokens + tokens
        self.rounds = ANCHOR_DECAY * self.rounds + sessions

    def mean(self, prior: float) -> float:
        found = (self.tokens + PRIOR_ROUNDS * prior) / (self.rounds + PRIOR_ROUNDS)
        return max(0.0, found)


NO_OTHERS = Rest()
NOTHING_KNOWN = AnchorTokens()


class RowBudget:
    """Shares out the branches of rounds that cost so much."""

    def __init__(self, cost: RoundCost, most_tokens: int | None = None) -> None:
        """most_tokens: of a round, with more of which sessions have to take turns."""
        self.cost = cost
        self.most_tokens = most_tokens
        self._ranks: dict[float, _Ranks] = {}  # by the slope of the cost
        # Seconds of usual rounds by AUTO_BRANCHES, of so many anchors' tokens and sessions, and of
        # what else is in the round
        self._usual_seconds: dict[tuple[int, int, int, int, HostPart], list[float]] = {}
        self._host_shares: dict[tuple[int, int], float] = {}  # by anchors' tokens and sessions
        self._first_kept: dict[Offer, int | None] = {}

    def allocate(
        self,
        offers: Sequence[Offer],  # at least one
        pace: Pace,
        rest: Rest = NO_OTHERS,
    ) -> list[int]:
        """The number of branches of each offer. The device may wait meanwhile: no call too many."""
        if len(offers) == 1:
            return [self._allocate_one(offers[0], pace, rest)]
        cost, count = self.cost, len(offers)
        lengths, usual_tokens, all_steps, least, *_ = zip(*offers, strict=True)
        usual, anchors = rest.tokens + sum(usual_tokens), rest.forwarded + sum(lengths)
        ranked = self._ranks_at(cost.slope(anchors))
        each = map(ranked.__getitem__, zip(all_steps, lengths, strict=True))
        steps = np.frombuffer(b"".join(each)).reshape(-1, _COLUMNS)
        # Stable: a session's own steps stay in their order; of equals the first session goes first.
        order = steps[:, 0].argsort(kind="stable")
        # With none of the steps, with the first, with the first two, … in the order of their worth
        sums = np.zeros((len(steps) + 1, _COLUMNS))
        np.add.accumulate(steps.take(order, axis=0), 0, out=sums[1:])
        _, forwarded, gained, waited, records, _ = sums.T
        none = cost.host_by_number[0]
        waited += rest.host.waited + count * none.waited
        records += rest.host.records + count * none.records
        on_host = HostPart(waited, records)
        seconds = cost.of_rounds(forwarded + anchors, on_host, count + rest.sessions)
        # What such sessions usually bring, in rounds of the best size for that
        likely = int(((gained + usual) / seconds).argmax())
        rate = pace.rate_with(usual + float(gained[likely]), float(seconds[likely]))
        taken = order[: (gained - rate * seconds).argmax()]  # of equals the fewest
        chosen = np.bincount(taken // _MOST_STEPS, steps[taken, _BRANCHES], count).astype(np.int64)
        return list(map(max, chosen.tolist(), least))

    def are_kept(self, anchors: int, sessions: int) -> bool:
        """Whether such sessions keep their number. anchors: tokens of their anchors."""
        if self.cost.host_by_number[0].waited > LONG_HOST:
            return False
        kept = self._host_shares
        share = kept.get((anchors, sessions))
        if share is None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            share = kept[anchors, sessions] = self.cost.host_share(anchors, [0] * sessions)
        return share >= KEEP_FROM_SHARE

    def first_numbers(self, offers: Sequence[Offer]) -> list[int]:
        """Of sessions that run together, with nothing known of earlier rounds."""
        count = len(offers)
        if self.are_kept(sum(offer.row_length for offer in offers), count):
            return [self.number_for_all(offers, NOTHING_KNOWN)] * count
        return self.allocate(offers, Pace())

    def first_kept(self, offer: Offer) -> int | None:
        """Of a new session that is alone; None: its number is not kept.

        Most are alike, and to weigh one takes the host time: what came of an offer is remembered.
        """
        known = self._first_kept
        if offer not in known:
            if len(known) >= _MOST_KEPT:
                known.clear()
            is_kept = self.are_kept(offer.row_length, 1)
            known[offer] = self.number_for_all((offer,), NOTHING_KNOWN) if is_kept else None
        return known[offer]

    def number_for_all(
        self, offers: Sequence[Offer], anchor_tokens: AnchorTokens, rest: Rest = NO_OTHERS
    ) -> int:
        """The number of branches of all offers, where it is kept for several rounds."""
        count = len(offers)
        if count == 1:
            (one,) = offers
            anchors, prior = max(one.row_length, one.usual_row), one.usual
            gains: Sequence[float] = _gains(one.usual_steps)
        else:
            anchors = sum([max(offer.row_length, offer.usual_row) for offer in offers])
            prior = sum([offer.usual for offer in offers])
            kinds = Counter([offer.usual_steps for offer in offers])  # few: most offer the same
            each = [[of * gain for gain in _gains(steps)] for steps, of in kinds.items()]
            gains = each[0] if len(each) == 1 else list(map(sum, zip(*each, strict=True)))
        usual = rest.tokens + count * anchor_tokens.mean(prior / count)
        seconds = self._seconds_of_all(anchors, count, rest)
        return AUTO_BRANCHES[_quickest(usual, gains, seconds)]

    def _seconds_of_all(self, anchors: int, count: int, rest: Rest) -> list[float]:
        """Until all have had a usual round, by AUTO_BRANCHES, kept: sizes are few."""
        cost, kept = self.cost, self._usual_seconds
        key = anchors, count, rest.sessions, rest.forwarded, rest.host
        found = kept.get(key)
        if found is None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            found = kept[key] = []
            for rows in USUAL_ROWS:
                tokens, sessions = rest.forwarded + anchors * (1.0 + rows), count + rest.sessions
                turns = 1 if self.most_tokens is None else math.ceil(tokens / self.most_tokens)
                own = zip(rest.host, cost.host_of(rows), strict=True)
                host = HostPart(*((others + count * part) / turns for others, part in own))
                one = cost.of_round(tokens / turns, host, math.ceil(sessions / turns))
                found.append(turns * one)
        return found

    def _ranks_at(self, slope: float) -> _Ranks:
        found = self._ranks.get(slope)
        if found is None or len(found) > _MOST_KEPT:
            found = self._ranks[slope] = _Ranks(slope, self.cost.host_by_number)
        return found

    def _allocate_one(self, offer: Offer, pace: Pace, rest: Rest) -> int:
        """The same for a single offer, whose steps have an order: without arrays."""
        cost, taken, gained = self.cost, 0, 0.0
        numbers, gains, each = [], [], []
        for added, gain in ((0, 0.0), *offer.steps.each):
            taken, gained = taken + added, gained + gain
            tokens = offer.row_length * (taken + 1)
            if rest.sessions:
                own = zip(rest.host, cost.host_by_number[taken], strict=True)
                host = HostPart(*map(sum, own))
                seconds = cost.of_round(rest.forwarded + tokens, host, rest.sessions + 1)
            else:
                seconds = cost.of_one(tokens, taken)
            numbers.append(taken)
            gains.append(gained)
            each.append(seconds)
        return max(_best(numbers, gains, each, rest.tokens + offer.usual, pace), offer.least)


def _best(
    numbers: Sequence[int],  # of branches
    gained: Sequence[float],  # tokens, with each of them
    seconds: Sequence[float],  # of its round
    usual: float,  # tokens without branches
    pace: Pace,
) -> int:
    # What such sessions usually bring, in rounds of the best size for that
    likely = _quickest(usual, gained, seconds)
    rate = pace.rate_with(usual + gained[likely], seconds[likely])
    most, best = -math.inf, 0
    for index, of in enumerate(seconds):
        left = gained[index] - rate * of
        if left > most:  # of equals the fewest
            most, best = left, index
    return numbers[best]


def _quickest(usual: float, gained: Sequence[float], seconds: Sequence[float]) -> int:
    """The index of the number with the most tokens per second; of equals the first.

    By number: tokens gained, seconds. usual: tokens without branches.
    """
    highest, found = -1.0, 0
    for index, of in enumerate(seconds):
        if usual + gained[index] > highest * of:
            highest, found = (usual + gained[index]) / of, index
    return found


class _Ranks(dict[tuple[Steps, int], bytes]):
    """What `_rank` makes of steps and the tokens of a row; sessions offer the same for long."""

    def __init__(self, slope: float, host: Sequence[HostPart]) -> None:
        super().__init__()
        self.slope, self.host = slope, host

    def __missing__(self, key: tuple[Steps, int]) -> bytes:
        found = self[key] = _rank(*key, self.slope, self.host)
        return found


def _rank(steps: Steps, row_length: int, slope: float, host: Sequence[HostPart]) -> bytes:
    """[_MOST_STEPS, _COLUMNS] fp64: minus a step's worth; tokens, gain, `HostPart`, branches.

    A step is worth what it brings for its time, and never more than the one before it. The first
    branch may cost the host more than those behind it: a step that is worth less than the next one
    goes with it, and both are worth what they bring together. What records take is no part of that:
    the device is taken to work for longer. slope: seconds a token; host: by the number of branches.
    """
    rows: list[tuple[float, ...]] = []
    runs: list[tuple[float, float, int]] = []  # steps that go together: gain, seconds, how many
    slope, taken = max(slope, _LEAST_SLOPE), 0
    for added, gain in steps.each:
        # A given cost may say that more branches take the host less time: then they take none.
        parts = zip(host[taken], host[taken + added], strict=True)
        waited, records = (max(0.0, more - fewer) for fewer, more in parts)
        tokens = added * row_length
        taken += added
        rows.append((tokens, gain, waited, records, added))
        gained, seconds, count = gain, tokens * slope + waited, 1
        while runs and runs[-1][0] * seconds < gained * runs[-1][1]:
            before = runs.pop()
            gained, seconds, count = gained + before[0], seconds + before[1], count + before[2]
        runs.append((gained, seconds, count))
    found: list[float] = []
    worth = math.inf
    for gained, seconds, count in runs:
        worth = min(worth, gained / seconds)  # products and quotients are rounded differently
        for row in rows[len(found) // _COLUMNS :][:count]:
            found += -worth, *row
    found += _NO_STEP * (_MOST_STEPS - len(rows))
    return _PACKED(*found)


@lru_cache(maxsize=_MOST_KEPT)
def _gains(steps: Steps) -> tuple[float, ...]:
    """By AUTO_BRANCHES."""
    return tuple(map(steps.gain_of, AUTO_BRANCHES))


@lru_cache(maxsize=_MOST_KEPT)  # a session's gains are the same for several rounds
def concave_steps(choices: tuple[int, ...], gains: tuple[float, ...], share: float = 1.0) -> Steps:
    """Steps from one choice to the next, with falling gains per branch.

    choices: numbers of branches, rising from 0; gains: of each over none, of which a share counts.
    A choice that gains less per branch than the one behind it is passed over, and so is one that
    gains nothing.
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
    return Steps(tuple((b1 - b0, (g1 - g0) * share) for (b0, g0), (b1, g1) in pairwise(hull)))
