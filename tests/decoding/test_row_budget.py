"""The rows of a round as one budget: offers in, numbers of branches out; against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME as ONE
from lopa.decoding.round_cost import HostPart, RoundCost
from lopa.decoding.row_budget import (
    NO_OTHERS,
    NO_STEPS,
    NOTHING_KNOWN,
    PRIOR_ROUNDS,
    USUAL_ROWS,
    AnchorTokens,
    Offer,
    Pace,
    Rest,
    RowBudget,
    concave_steps,
)

CHOICES = (0, 1, 3, 7)
FLAT_THEN_STEEP = RoundCost(((64, 1.0), (512, 1.2), (2048, 6.0)))


def offer(
    gains: Sequence[float], row_length: int = 64, usual: float = 2.0, least: int = 0
) -> Offer:
    """gains: of 1, 3 and 7 branches over none."""
    return Offer(row_length, usual, concave_steps(CHOICES, (0.0, *gains)), least)


def rate(
    offers: Sequence[Offer],
    gains: Sequence[Sequence[float]],
    counts: Sequence[int],
    cost: RoundCost,
    rest: Rest = NO_OTHERS,
) -> float:
    """Tokens per second of a round with so many branches each, the plain way."""
    tokens = rest.tokens + sum(o.usual for o in offers)
    forwarded, (waited, records) = rest.forwarded, rest.host
    for o, of, count in zip(offers, gains, counts, strict=True):
        tokens += (0.0, *of)[CHOICES.index(count)]
        forwarded += o.row_length * (count + 1)
        waited += dict(zip(AUTO_BRANCHES, cost.host, strict=False)).get(count, 0.0)
        records += dict(zip(AUTO_BRANCHES, cost.records, strict=False)).get(count, 0.0)
    host = HostPart(waited, records)
    seconds = cost.of_rounds(np.array([float(forwarded)]), host, len(offers) + rest.sessions)
    return tokens / float(seconds[0])


_gain = st.floats(0.05, 3.0)
_gains = st.lists(_gain, min_size=4, max_size=4).map(lambda g: sorted(g, reverse=True))
_falling = st.lists(_gain, min_size=3, max_size=3).map(
    lambda g: [x * (1 - i / 100) for i, x in enumerate(sorted(g, reverse=True))]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_falling, min_size=1, max_size=4),
    st.sampled_from([32, 64]),
    st.floats(0.0, 0.02),
    st.integers(0, 3),
    st.one_of(st.just(()), st.lists(st.floats(0.0, 0.5), min_size=5, max_size=5)),
)
def test_no_other_numbers_bring_more_per_second(
    falling: list[list[float]], length: int, slope: float, others: int, host: Sequence[float]
) -> None:
    """Gains per branch fall, rows are of one length and the cost is a line: then it is the best.

    The host's part may grow with branches in any way. Where nothing is known of earlier rounds,
    the rate to beat is the best one of this round.
    """
    gains = [
        list(itertools.accumulate(g * n for g, n in zip(one, (1, 2, 4), strict=True)))
        for one in falling
    ]
    offers = [offer(one, length) for one in gains]
    line = ((1, 1.0 + slope), (10_000, 1.0 + 10_000 * slope))
    cost = RoundCost(line, tuple(sorted(host)))
    rest = Rest(others, others * 64, others * 3.0, HostPart(others * 0.1, 0.0))
    chosen = RowBudget(cost).allocate(offers, Pace(), rest)
    best = max(
        rate(offers, gains, counts, cost, rest)
        for counts in itertools.product(CHOICES, repeat=len(offers))
    )
    assert rate(offers, gains, chosen, cost, rest) == pytest.approx(best)


def test_where_the_host_is_the_longer_part_branches_count_there() -> None:
    """Rows that the device has for nothing cost the host of every session."""
    flat = ((64, 1.0), (100_000, 1.001))
    offers = [offer((0.5, 1.0, 1.5)) for _ in range(16)]
    assert RowBudget(RoundCost(flat, (0.05,) * 5)).allocate(offers, Pace()) == [7] * 16
    dear = RoundCost(flat, (0.05, 0.3, 0.35, 0.4, 0.4))
    assert RowBudget(dear).allocate(offers, Pace()) == [0] * 16
    assert RowBudget(dear).allocate(offers[:1], Pace()) == [7]


def test_records_that_take_longer_than_the_device_count() -> None:
    flat = ((64, 1.0), (100_000, 1.001))
    offers = [offer((0.5, 1.0, 1.5)) for _ in range(16)]
    short, long = (0.01, 0.02, 0.03, 0.04, 0.05), (0.1, 0.4, 0.5, 0.6, 0.7)
    for records, expected in ((short, 7), (long, 0)):
        budget = RowBudget(RoundCost(flat, records=records))
        assert budget.allocate(offers, Pace()) == [expected] * 16
        assert budget.allocate(offers[:1], Pace()) == [7]


@pytest.mark.parametrize("count", [1, 2, 8, 32])
def test_the_more_sessions_the_fewer_branches_each(count: int) -> None:
    offers = [offer((1.5, 3.0, 5.0)) for _ in range(count)]
    tried = sum(RowBudget(FLAT_THEN_STEEP).allocate(offers, Pace())) / count
    fewer = sum(RowBudget(FLAT_THEN_STEEP).allocate([*offers, *offers], Pace())) / (2 * count)
    assert fewer < tried or tried == 0
    if count == 1:
        assert tried == 7
    if count == 32:
        assert tried == 0


def test_who_gains_most_is_served_first() -> None:
    poor, rich = offer((0.1, 0.2, 0.3)), offer((2.0, 4.0, 7.0))
    assert RowBudget(FLAT_THEN_STEEP).allocate([poor, rich, poor], Pace()) == [0, 3, 0]
    assert RowBudget(FLAT_THEN_STEEP).allocate([poor, rich, poor], Pace(10.0, 20.0)) == [0, 7, 0]


def test_short_rows_are_served_before_long_ones() -> None:
    short, long = offer((1.0, 2.0, 3.0), 32), offer((1.0, 2.0, 3.0), 128)
    chosen = RowBudget(RoundCost(((160, 1.0), (2000, 6.0)))).allocate([long, short], Pace())
    assert chosen[1] > chosen[0]


def test_at_a_high_pace_less_is_spent_on_the_same_branches() -> None:
    """Time is worth what all rounds brought in it, and not what this one does."""
    cost = RoundCost(((64, 1.0), (1024, 4.0)))
    one = [offer((1.0, 2.0, 3.0))]
    tried = [
        RowBudget(cost).allocate(one, Pace(tokens, 20.0)) for tokens in (10.0, 40.0, 80.0, 160.0)
    ]
    assert tried == [[7], [3], [1], [0]]


def test_a_pace_forgets() -> None:
    pace = Pace()
    for _ in range(200):
        pace.add(4.0, 2.0)
    assert pace.tokens / pace.seconds == pytest.approx(2.0)
    for _ in range(60):
        pace.add(9.0, 1.0)
    assert pace.tokens / pace.seconds > 8.0


def test_an_eos_that_cuts_off_old_tokens_makes_no_pace_negative() -> None:
    pace = Pace()
    pace.add(10.0, 1.0)
    for _ in range(20):
        pace.add(0.0, 1.0)
    pace.add(-9.0, 1.0)
    assert pace.tokens == 0.0
    assert pace.rate_with(4.0, 1.0) > 0.0


def test_what_is_usual_counts_for_fewer_and_fewer_rounds() -> None:
    pace = Pace()
    assert pace.rate_with(6.0, 2.0) == pytest.approx(3.0)
    found = []
    for _ in range(100):
        pace.add(4.0, 2.0)
        found.append(pace.rate_with(6.0, 2.0))
    assert found == sorted(found, reverse=True)
    assert found[0] > 2.7
    assert found[-1] == pytest.approx(2.0, abs=1e-3)


def test_rows_that_are_no_choice_count() -> None:
    """Beside long rows of others a branch comes on the steep part of the cost."""
    one = [offer((1.0, 2.0, 3.0))]
    assert RowBudget(FLAT_THEN_STEEP).allocate(one, Pace()) == [7]
    assert RowBudget(FLAT_THEN_STEEP).allocate(one, Pace(), Rest(6, 1000, 30.0)) == [0]


def test_a_padded_round_is_filled_up() -> None:
    """What fits into the padding costs nothing."""
    cost = RoundCost(((64, 1.0), (1024, 16.0)), padding=((1024, 256),))
    assert RowBudget(cost).allocate([offer((0.1, 0.3, 0.4))], Pace()) == [3]


def test_a_session_that_explores_has_its_branch() -> None:
    dear = RoundCost(((64, 1.0), (128, 2.0)))
    offers = [offer((0.1, 0.2, 0.3)), offer((0.1, 0.2, 0.3), least=1)]
    assert RowBudget(dear).allocate(offers, Pace()) == [0, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(_falling, min_size=2, max_size=5), min_size=2, max_size=6))
def test_what_is_kept_changes_nothing(rounds: list[list[list[float]]]) -> None:
    """A budget that has shared out other rounds shares out the next one as a new one does."""
    cost = RoundCost(FLAT_THEN_STEEP.points, (0.01, 0.05, 0.06, 0.08, 0.1))
    used = RowBudget(cost)
    for number, gains in enumerate(rounds):
        offers = [offer(one, 32 * (1 + (number + i) % 3)) for i, one in enumerate(gains)]
        expected = RowBudget(cost).allocate(offers, Pace(9.0, 2.0))
        assert [used.allocate(offers, Pace(9.0, 2.0)) for _ in range(2)] == [expected] * 2


def test_a_host_that_takes_less_for_more_branches_is_no_reason_for_another_order() -> None:
    falls = RoundCost(((64, 0.001), (4096, 0.01)), (0.002, 0.001, 0.003, 0.004, 0.005))
    one = offer((2.0, 2.5, 2.6))
    assert RowBudget(falls).allocate([one, one], Pace(4.0, 0.01)) == [1, 1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(_gains, st.sampled_from([32, 64, 96])), min_size=1, max_size=6),
    st.floats(0.0, 0.02),
    st.integers(0, 3),
    st.lists(st.floats(0.0, 0.5), min_size=5, max_size=5),
    st.lists(st.floats(0.0, 2.0), min_size=5, max_size=5),
    st.one_of(st.none(), st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 100.0))),
)
def test_no_other_number_for_all_brings_more_per_second(
    given: list[tuple[list[float], int]],
    slope: float,
    others: int,
    host: list[float],
    records: list[float],
    known: tuple[float, float] | None,
) -> None:
    """By what usual rounds bring and forward. known: tokens of a round, and of how many rounds."""
    usual, learned = 2.0, NOTHING_KNOWN
    if known is not None:
        brought, rounds = known
        learned = AnchorTokens(brought * rounds, rounds)
        usual = (PRIOR_ROUNDS * 2.0 + rounds * brought) / (PRIOR_ROUNDS + rounds)
    steps = [concave_steps(AUTO_BRANCHES, (0.0, *itertools.accumulate(g))) for g, _ in given]
    offers = [
        Offer(length, 2.0, NO_STEPS, usual_steps=of)
        for (_, length), of in zip(given, steps, strict=True)
    ]
    line = ((1, 1.0 + slope), (10_000, 1.0 + 10_000 * slope))
    cost = RoundCost(line, tuple(sorted(host)), tuple(sorted(records)))
    rest = Rest(others, others * 64, others * 3.0, HostPart(others * 0.1, others * 0.2))
    rates = {}
    for number, rows in zip(AUTO_BRANCHES, USUAL_ROWS, strict=True):
        tokens = rest.tokens + sum(usual + of.gain_of(number) for of in steps)
        forwarded = rest.forwarded + sum(length * (1 + rows) for _, length in given)
        parts = [np.interp(rows, AUTO_BRANCHES, part) for part in (cost.host, cost.records)]
        own = [before + len(given) * one for before, one in zip(rest.host, parts, strict=True)]
        seconds = cost.of_rounds(np.array([forwarded]), HostPart(*own), len(given) + others)
        rates[number] = tokens / float(seconds[0])
    chosen = RowBudget(cost).number_for_all(offers, learned, rest)
    assert rates[chosen] == pytest.approx(max(rates.values()))


def test_a_number_for_all_goes_by_usual_rounds() -> None:
    """The more they bring without branches, the less those are worth."""
    rich = concave_steps(AUTO_BRANCHES, (0.0, 2.0, 4.0, 7.0, 8.0))
    offers = [Offer(64, 2.0, NO_STEPS, usual_steps=rich)] * 2
    budget = RowBudget(FLAT_THEN_STEEP)
    assert budget.allocate(offers, Pace()) == [0, 0]
    assert budget.number_for_all(offers, NOTHING_KNOWN) > 0
    each = [AnchorTokens(100 * tokens, 100) for tokens in (0.5, 5.0, 50.0)]
    numbers = [budget.number_for_all(offers, learned) for learned in each]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]


@pytest.mark.parametrize("count", [1, 3])
def test_a_number_for_all_goes_by_usual_rows(count: int) -> None:
    """Short rows, as answers begin with, would have more branches."""
    rich = concave_steps(AUTO_BRANCHES, (0.0, 2.0, 4.0, 7.0, 8.0))
    short, usual, long = (
        Offer(next_row, 2.0, NO_STEPS, usual_row=row, usual_steps=rich)
        for next_row, row in ((16, 0), (16, 128), (128, 0))
    )
    numbers = [
        RowBudget(FLAT_THEN_STEEP).number_for_all([one] * count, NOTHING_KNOWN)
        for one in (short, usual, long)
    ]
    assert numbers[0] > numbers[1] == numbers[2]


def test_anchor_tokens_are_learned_from_the_latest_rounds() -> None:
    learned = AnchorTokens()
    assert learned.mean(2.4) == 2.4
    learned.add(6.0)
    assert 2.4 < learned.mean(2.4) < 6.0
    for _ in range(400):
        learned.add(32 * 5.0, sessions=32)
    assert learned.mean(2.4) == pytest.approx(5.0, rel=0.01)
    for _ in range(400):
        learned.add(32 * 1.0, sessions=32)
    assert learned.mean(2.4) == pytest.approx(1.0, rel=0.02)
    for _ in range(400):
        learned.add(-32.0, sessions=32)  # they brought less than their branches add elsewhere
    assert learned.mean(2.4) == 0.0


def test_sessions_that_begin_have_what_they_would_keep() -> None:
    """Where the host takes long, the number for all; elsewhere what each has of its candidates."""
    rich = concave_steps(AUTO_BRANCHES, (0.0, 2.0, 4.0, 7.0, 8.0))
    offers = [Offer(64, 2.0, NO_STEPS, usual_steps=rich)] * 3
    points = ((64, 0.001),)
    quick, slow = RoundCost(points, (0.00001,) * 5), RoundCost(points, (0.0001,) * 5)
    assert not RowBudget(quick).are_kept(192, 3)
    assert RowBudget(slow).are_kept(192, 3)
    slower = RoundCost(points, (0.002,) * 5)  # weighing takes next to nothing of that
    assert not RowBudget(slower).are_kept(192, 3)
    assert RowBudget(quick).first_numbers(offers) == [0, 0, 0]
    assert RowBudget(slow).first_numbers(offers) == [15, 15, 15]


def test_steps_have_falling_gains_per_branch() -> None:
    steps = concave_steps((0, 1, 3, 7, 15), (0.0, 1.0, 4.0, 5.0, 5.0))
    assert steps.each == (
        (3, 4.0),
        (4, 1.0),
    )  # one branch gains less than each of three; 15 add nothing
    for nothing in (((0,), (0.0,)), ((0, 1), (0.0, -0.5)), ((0, 1, 2), (0.0, 0.0, 0.0))):
        assert concave_steps(*nothing).each == ()
        assert RowBudget(ONE).allocate([Offer(64, 2.0, concave_steps(*nothing))], Pace()) == [0]
