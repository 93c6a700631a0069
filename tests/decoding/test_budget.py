"""Adaptive branches: made-up gains in, numbers of branches out."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from made_up import EOS, MadeUp, advance, drive, new_decoder

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding import branch_budget
from lopa.decoding.branch_budget import LEARN_EVERY, BranchBudget
from lopa.decoding.lookahead import Selection
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.decoding.row_budget import Offer, Pace, RowBudget

WINDOW = 64
MOST = AUTO_BRANCHES[-1]
ADDED = (1.6, 1.6, 2.2, 1.4)  # tokens by each choice to the one before, much as on built-in tasks
LINEAR = RoundCost(((WINDOW, 1.0), (2 * WINDOW, 2.0)))  # rows cost what they hold


def choice(
    budget: BranchBudget,
    cost: RoundCost,
    pace: Pace,
    top_prob: float = 0.7,
    candidates: int = MOST,
    **more: Any,
) -> int:
    """How many branches a sequence that is alone gets."""
    offer = budget.offer(WINDOW, candidates, top_prob, **more)
    return RowBudget(cost).allocate([offer], pace)[0]


def choices(
    cost: RoundCost, gains: dict[int, float], rounds: int = 60, top_prob: float = 0.7
) -> list[int]:
    """The choices, round by round, when `gains` are what each number of branches brings."""
    chosen, budget, pace = [], BranchBudget("score"), Pace()
    for index in range(rounds):
        tried = choice(budget, cost, pace, top_prob, index=index)
        if index % LEARN_EVERY == 0:
            budget.learn([gains[k] for k in AUTO_BRANCHES if k <= tried])
        pace.add(gains[tried], cost(WINDOW * (tried + 1)))
        chosen.append(tried)
    return chosen


@pytest.mark.parametrize("most", [2.0, 3.0, 5.0])  # cost of 16 rows against one
def test_lookahead_that_never_helps_is_nearly_given_up(most: float) -> None:
    cost = RoundCost(((WINDOW, 1.0), (16 * WINDOW, most)))
    chosen = choices(cost, dict.fromkeys(AUTO_BRANCHES, 4.0), rounds=300)
    assert chosen[0] > 0
    later = chosen[60:]
    assert set(later) <= {0, 1}
    assert sum(cost(WINDOW * (k + 1)) for k in later) < 1.1 * len(later)
    assert 1 in later  # and not for good


@pytest.mark.parametrize("slope", [0.6, 0.8, 1.0, 1.5])  # cost of another row, as a share of one
def test_trials_that_find_nothing_cost_little(slope: float) -> None:
    cost = RoundCost(((WINDOW, 1.0), (2 * WINDOW, 1.0 + slope)))
    chosen = choices(cost, dict.fromkeys(AUTO_BRANCHES, 4.0), rounds=300)
    assert set(chosen) == {0, 1}
    assert sum(cost(WINDOW * (k + 1)) for k in chosen) < 1.02 * 300


def test_a_first_branch_that_helps_leads_to_more() -> None:
    gains = {k: 4.0 * (1 + 0.8 * i) for i, k in enumerate(AUTO_BRANCHES)}
    cost = RoundCost(((WINDOW, 1.0), (16 * WINDOW, 3.0)))
    best = max(gains, key=lambda k: gains[k] / cost(WINDOW * (k + 1)))
    assert best == 3
    assert set(choices(cost, gains, rounds=100)[60:]) == {best}


def test_lookahead_that_always_helps_at_no_cost_goes_to_the_most() -> None:
    gains = {k: 4.0 + k for k in AUTO_BRANCHES}
    assert set(choices(EVERY_ROUND_THE_SAME, gains)) == {MOST}


@pytest.mark.parametrize("plain", [1.5, 2.0, 3.0, 5.0, 8.0])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3, 0.65, 1.0])  # cost of a row beside the first
def test_what_branches_usually_add_is_spent_at_the_best_rate(plain: float, slope: float) -> None:
    """Whatever a round without branches brings: nearly the best choice, of which only the share
    that lasts is counted, so that one too few may be chosen where two are almost as good."""
    top_prob = 0.7  # where the first branch's share is nearest to the others'
    gains = dict(zip(AUTO_BRANCHES, np.cumsum([plain, *ADDED]).tolist(), strict=True))
    cost = RoundCost(((WINDOW, 1.0), (16 * WINDOW, 1.0 + 15 * slope)))
    chosen = choices(cost, gains, rounds=200, top_prob=top_prob)[20:]
    rate = sum(gains[k] for k in chosen) / sum(cost(WINDOW * (k + 1)) for k in chosen)
    assert rate > 0.95 * max(gains[k] / cost(WINDOW * (k + 1)) for k in gains)


def test_a_first_branch_whose_token_is_confident_is_worth_less() -> None:
    cost = RoundCost(((WINDOW, 1.0), (2 * WINDOW, 1.6)))
    probs = (0.2, 0.95, 1.0000001)
    chosen = {prob: choice(BranchBudget("score"), cost, Pace(), prob, 1) for prob in probs}
    assert chosen == {0.2: 1, 0.95: 0, 1.0000001: 0}


def test_while_a_block_waits_for_the_next_only_what_costs_little_is_tried() -> None:
    def tried(slope: float, *, is_waiting: bool) -> int:
        cost = RoundCost(((WINDOW, 1.0), (16 * WINDOW, 1.0 + 15 * slope)))
        return choice(BranchBudget("score"), cost, Pace(), 0.2, is_waiting=is_waiting)

    assert tried(0.45, is_waiting=True) == 0 < tried(0.45, is_waiting=False)
    assert tried(0.15, is_waiting=True) < tried(0.15, is_waiting=False)
    assert tried(0.0, is_waiting=True) == tried(0.0, is_waiting=False) == MOST


def test_an_answer_without_eos_in_view_is_expected_to_go_faster() -> None:
    """So its time is worth more at first; in the end what it brought decides."""
    cost = RoundCost(((WINDOW, 1.0), (2 * WINDOW, 1.45)))

    def tried(rounds: int, *, is_open: bool) -> int:
        budget, pace = BranchBudget("score"), Pace()
        for _ in range(rounds):
            budget.learn([2])
            pace.add(2, cost(WINDOW))
        return choice(budget, cost, pace, is_open=is_open)

    assert tried(0, is_open=True) == 0 < tried(0, is_open=False)
    assert tried(40, is_open=True) == tried(40, is_open=False) == 1


def test_rounds_that_bring_little_are_not_where_the_time_goes() -> None:
    """A branch is worth the same after a poor round as after a rich one: all of them decide."""
    cost = RoundCost(((WINDOW, 1.0), (2 * WINDOW, 1.65)))

    def tried(rounds: list[int]) -> int:
        budget, pace = BranchBudget("score"), Pace()
        for tokens in rounds:
            budget.learn([tokens, tokens + 2])
            pace.add(tokens + 2, cost(WINDOW))
        return choice(budget, cost, pace)

    assert tried([0, 8] * 20) == tried([8, 0] * 20) == 0
    assert tried([0] * 40) == 1


def test_never_more_than_there_are_candidates() -> None:
    budget = BranchBudget("score")
    for candidates in range(MOST + 1):
        assert choice(budget, EVERY_ROUND_THE_SAME, Pace(), candidates=candidates) <= candidates


def test_winners_of_fewer_branches() -> None:
    budget = BranchBudget("score")
    scores = [-2.0, -0.5, -3.0, -0.5, -0.1, -1.0]  # five lookaheads, then the anchor
    # With 0, 1, 3, and all that there were in place of 7: ties go to the better ranked.
    assert budget.winners(scores) == [5, 5, 1, 4]
    assert budget.winners([-1.0, -1.0]) == [1, 0]


@pytest.mark.parametrize(
    ("chain", "ends"),
    [
        ([5], [5, 5, 5, 5]),  # the anchor alone
        ([5, 0], [5, 0, 0, 0]),
        ([5, 2, 0], [5, 5, 0, 0]),  # the first is of no use without the third
        ([5, 0, 4], [5, 0, 0, 4]),
        ([5, 3, 0, 1], [5, 5, 5, 1]),
    ],
)
def test_ends_of_a_chain_with_fewer_branches(chain: list[int], ends: list[int]) -> None:
    """Five drafts, so with 0, 1, 3, and all that there were in place of 7."""
    assert BranchBudget("score").chain_ends(chain, 5) == ends


def test_with_few_branches_a_chain_ends_at_all_of_them() -> None:
    budget = BranchBudget("score")
    assert budget.chain_ends([1, 0], 1) == [1, 0]
    assert budget.chain_ends([2, 1], 2) == [2, 2, 1]


def test_refused_branches_are_no_winners_of_fewer() -> None:
    budget = BranchBudget("score")
    scores = np.array([3.0, 5.0, 1.0, 0.5])  # the anchor last
    selection = Selection(2, scores, {0: "why", 1: "why"})
    assert budget.winners(selection.allowed) == [3, 3, 2]
    everyone = Selection(3, scores, dict.fromkeys(range(3), "why"))
    assert budget.winners(everyone.allowed) == [3, 3, 3]


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("accept", ["agreed", "exact"])
def test_the_budget_learns_of_branches_that_could_have_won(accept: str) -> None:
    """All of a round's branches are the most that it has: that it brought what it did is known."""
    decoder = new_decoder(auto(objective="tpf", accept=accept, threshold=0.5))
    assert decoder.auto is not None
    learnt = listen(decoder.auto.budget)
    records = drive(decoder, MadeUp(7))
    assert any(branch.refused for record in records for branch in record.branches)
    for record, tokens in zip(records, learnt, strict=True):
        if len(record.branches) == 1:
            assert not tokens  # nothing to compare
            continue
        assert tokens[-1] == len(record.fills) + len(record.branches[record.winner].lookaheads)
        if all(branch.refused for branch in record.branches[:-1]):
            assert len(set(tokens)) == 1


def auto(**options: object) -> DecodeConfig:
    given = {"branches": "auto", "max_new_tokens": 32, "block_size": 8, **options}
    return DecodeConfig(**given)  # type: ignore[arg-type]


def test_the_decoder_varies_its_branches_the_same_way_every_time() -> None:
    runs = []
    for _ in range(2):
        decoder = new_decoder(auto(early_stop=False), cost=LINEAR)
        runs.append(drive(decoder, MadeUp(3)))
    assert runs[0] == runs[1]
    for record, following in zip(runs[0], runs[0][1:], strict=False):
        assert len(following.branches) <= len(record.spawned) + 1 <= MOST + 1
    assert len({len(record.branches) for record in runs[0]}) > 1


def test_a_number_that_is_kept_is_kept_for_so_many_rounds() -> None:
    """Without an offer meanwhile."""
    decoder, model = new_decoder(auto(early_stop=False, threshold=0.95), cost=LINEAR), MadeUp(3)

    def next_round() -> int:
        plan = decoder.plan()
        assert plan is not None
        advance(decoder, model.stats(decoder, plan))
        return len(plan.rows) - 1

    assert decoder.auto is not None
    next_round()
    kept = []
    for _ in range(2):
        assert decoder.auto.offered is not None
        decoder.take(2, rounds=3)
        for _ in range(3):
            assert decoder.auto.offered is None
            kept.append(next_round())
    assert decoder.auto.offered is not None
    assert kept == [2] * 6


def test_counting_forwards_tries_more_than_counting_time() -> None:
    def tried(**options: object) -> int:
        decoder = new_decoder(auto(**options), cost=LINEAR)
        return sum(len(record.branches) for record in drive(decoder, MadeUp(5)))

    assert tried(objective="tpf") > tried(objective="speed")


@pytest.mark.usefixtures("every_round")
def test_what_a_round_brought_is_what_the_budget_learns() -> None:
    decoder = new_decoder(auto(objective="tpf"))
    assert decoder.auto is not None
    learnt = listen(decoder.auto.budget)
    records = drive(decoder, MadeUp(7))
    for record, tokens in zip(records, learnt, strict=True):
        if len(record.branches) == 1:
            continue
        placed = len(record.branches[record.winner].lookaheads)
        assert tokens[-1] == len(record.fills) + placed


def test_it_learns_of_some_rounds() -> None:
    """And explores in those alone."""
    decoder = new_decoder(auto(objective="tpf", threshold=0.9, max_new_tokens=64))
    assert decoder.auto is not None
    learnt = listen(decoder.auto.budget)
    records = drive(decoder, MadeUp(7))
    assert len(learnt) == len(records) // LEARN_EVERY > 1


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_budget, "LEARN_EVERY", 1)


def listen(budget: BranchBudget) -> list[list[int]]:
    """What it learns from now on."""
    learnt = []
    learn = budget.learn

    def note(tokens: Sequence[int]) -> None:
        learnt.append(list(tokens))
        learn(tokens)

    budget.learn = note  # type: ignore[method-assign]
    return learnt


def test_a_cached_prompt_changes_no_choice() -> None:
    steep = RoundCost(((8, 1.0), (64, 3.0)))
    chosen = []
    for cached in (0, 40):
        decoder = new_decoder(auto(), prompt=40, cost=steep)
        decoder.reuse(cached)
        chosen.append([len(r.branches) for r in drive(decoder, MadeUp(5))])
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1


def test_goes_to_another_process_in_the_middle() -> None:
    """As when a rank is lost: what has been learnt goes along."""
    decoder, source = new_decoder(auto()), MadeUp(3)
    for _ in range(3):
        plan = decoder.plan()
        assert plan is not None
        advance(decoder, source.stats(decoder, plan))
    copy = pickle.loads(pickle.dumps(decoder))
    assert drive(copy, source) == drive(decoder, MadeUp(3))


def test_one_without_rivals_may_not_have_won() -> None:
    budget = BranchBudget("score")
    scores = [3.0, 5.0, 1.0, 2.5]  # the anchor last
    assert budget.winners(scores) == budget.winners(scores, True) == [3, 0, 1]
    assert budget.winners(scores, False) == [3, 3, 1]


def test_no_lookahead_places_eos_nor_looks_behind_it() -> None:
    placed = {True: 0, False: 0}
    for allowed in placed:
        config = DecodeConfig(
            branches=3, max_new_tokens=32, block_size=8, early_stop=False, lookahead_eos=allowed
        )
        decoder = new_decoder(config)
        source = MadeUp(11, eos_share=0.3)
        while (plan := decoder.plan()) is not None:
            record = advance(decoder, source.stats(decoder, plan))
            end = decoder.first_eos
            for (ahead,) in record.spawned:
                behind = end is not None and ahead.position > decoder.prompt + end
                placed[allowed] += ahead.token == EOS or behind
    assert placed[True] > 0
    assert placed[False] == 0


def test_with_a_floor_unconfident_lookaheads_are_left_out() -> None:
    decoder = new_decoder(auto(objective="tpf", lookahead_floor=0.6))
    spawned = [a for record in drive(decoder, MadeUp(3)) for (a,) in record.spawned]
    assert spawned
    assert min(a.max_prob for a in spawned) >= np.float32(0.6)


@pytest.mark.parametrize("window", ["pipeline", "blocks", "canvas"])
@pytest.mark.parametrize("score", ["mean", "fills"])
def test_auto_on_every_window_and_with_eos(window: str, score: str) -> None:
    options = {"window": window, "score": score, "max_new_tokens": 16}
    sizes = {} if window == "canvas" else {"block_size": 8}
    config = DecodeConfig(branches="auto", **options, **sizes)  # type: ignore[arg-type]
    decoder = new_decoder(config, cost=LINEAR)
    drive(decoder, MadeUp(11, eos_share=0.2))
    assert decoder.finish in ("eos", "length")


@pytest.mark.usefixtures("every_round")
def test_tokens_behind_eos_do_not_count() -> None:
    config = auto(objective="tpf", early_stop=False, threshold=0.5)
    decoder = new_decoder(config)
    assert decoder.auto is not None
    learnt = listen(decoder.auto.budget)
    while (plan := decoder.plan()) is not None:
        stats = MadeUp(13).stats(decoder, plan)
        stats.token[:] = EOS  # all that is filled is EOS
        advance(decoder, stats)
    # The first of them, and a lookahead
    assert max(max(tokens, default=0) for tokens in learnt) <= 2


@pytest.mark.parametrize("eos_share", [0.0, 0.05, 1.0])
def test_the_budget_is_told_whether_no_eos_is_in_view(
    eos_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None that is filled, or that a mask of the winner would be filled with."""
    told, expected = [], []
    config = DecodeConfig(branches="auto", max_new_tokens=24, block_size=8, early_stop=False)
    decoder = new_decoder(config)
    source = MadeUp(3, eos_share=eos_share)
    assert decoder.auto is not None
    offer = decoder.auto.budget.offer

    def note(*args: Any, is_open: bool, **more: Any) -> Offer:
        told.append(is_open)
        return offer(*args, is_open=is_open, **more)

    monkeypatch.setattr(decoder.auto.budget, "offer", note)
    while (plan := decoder.plan()) is not None:
        stats = source.stats(decoder, plan)
        before = len(told)
        winner = decoder.choose(stats)
        decoder.record()
        rows, _ = plan.wanted.nonzero()
        is_in_view = bool((stats.token[rows == winner] == EOS).any())
        is_there = EOS in decoder.tokens[decoder.prompt :].tolist()
        if len(told) > before:
            expected.append(plan.index > 1 and not is_in_view and not is_there)
    assert told == expected
    assert len(told) > 2
    assert not told[0]  # the first forward shows too little
    assert any(told) == (eos_share < 1)
    assert all(told[1:]) == (eos_share == 0)
