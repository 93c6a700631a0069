"""Where the host is what takes long, numbers of branches are weighed now and then, and kept."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from instant_runner import InstantRunner

from lopa import LLM, DecodeConfig
from lopa.decoding import row_budget
from lopa.decoding.auto_branches import AutoBranches
from lopa.decoding.branch_budget import LEARN_EVERY_KEPT
from lopa.decoding.round_cost import RoundCost
from lopa.decoding.row_budget import AnchorTokens, RowBudget
from lopa.engine import branch_choice
from lopa.engine.base import TOKEN_BUDGET
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.types import Gap

POINTS = ((8, 0.0010), (4096, 0.0012))
DEAR_HOST = RoundCost(POINTS, (0.00050, 0.00055, 0.00060, 0.00065, 0.00070))
CHEAP_HOST = RoundCost(POINTS, (0.00001,) * 5)
CONFIG = DecodeConfig(max_new_tokens=160, block_size=8, branches="auto")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu", dtype="float32")


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sessions were weighed each time."""
    found: list[int] = []

    def count(name: str) -> None:
        weigh = getattr(RowBudget, name)

        def counted(budget: RowBudget, offers: Any, *args: Any) -> Any:
            found.append(len(offers))
            return weigh(budget, offers, *args)

        monkeypatch.setattr(RowBudget, name, counted)

    count("allocate")
    count("number_for_all")
    return found


@pytest.fixture
def weighed_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of rows that numbers for all are weighed by."""
    found: list[int] = []

    def noted(_: RowBudget, offers: Any, *more: Any) -> int:
        found.extend(max(offer.row_length, offer.usual_row) for offer in offers)
        return 1

    monkeypatch.setattr(RowBudget, "number_for_all", noted)
    return found


def session(llm: LLM, seed: int, cost: RoundCost, **changes: Any) -> Session:
    prompt = [3 + (7 * seed + 5 * i) % 200 for i in range(9)]
    return llm.session(prompt, CONFIG.changed(**changes), cost=cost)


def instant_engine(*, is_async: bool = False) -> Scheduler:
    """Of a model that is rarely confident: answers take many rounds."""
    runner: Any = InstantRunner(is_async=is_async, confidence=0.1)
    return Scheduler(runner, max_running=8)


def running(
    llm: LLM, count: int, steps: int, cost: RoundCost = DEAR_HOST, *, is_async: bool = False
) -> Scheduler:
    """An engine that has so many sessions and has made so many steps."""
    engine = instant_engine(is_async=is_async)
    for seed in range(count):
        engine.add(session(llm, seed, cost))
    for _ in range(steps):
        engine.step()
    return engine


def branches(of: Session) -> list[int]:
    return [len(record.branches) - 1 for record in of.trace.rounds]


def auto_of(of: Session) -> AutoBranches:
    assert of.decoder.auto is not None
    return of.decoder.auto


def test_one_that_joins_has_the_same_number(llm: LLM, weighed: list[int]) -> None:
    engine = running(llm, 3, 4)
    late = session(llm, 3, DEAR_HOST)
    engine.add(late)
    for _ in range(branch_choice.WEIGH_EVERY):
        engine.step()
    kept = [auto_of(one)._kept.branches for one in engine.running]
    engine.close()
    assert weighed == [3, 4]  # all that ran, when they first left it open; all, the next time
    assert len(kept) == 4
    assert len(set(kept)) == 1
    assert 0 < max(branches(late)) <= kept[0]


def test_one_that_joins_with_few_candidates_has_no_more_than_those(llm: LLM) -> None:
    engine = running(llm, 3, 3)
    late = session(llm, 3, DEAR_HOST, block_size=4)
    engine.add(late)
    engine.step()
    candidates = len(late.decoder.drafts)
    engine.step()
    each = [branches(one)[-1] for one in engine.running]
    engine.close()
    assert branches(late)[1] == candidates < max(each)
    assert engine._branches_each == pytest.approx(sum(each) / len(each))  # as many as are counted


def test_one_with_few_candidates_decides_for_nobody(llm: LLM, weighed: list[int]) -> None:
    """Nor for itself later on: it has as many as the other, as soon as it has the candidates."""
    engine = instant_engine()
    few, other = session(llm, 0, DEAR_HOST, block_size=4), session(llm, 1, DEAR_HOST)
    engine.add(few)
    engine.add(other)
    for _ in range(3):
        engine.step()
    late = session(llm, 3, DEAR_HOST)
    engine.add(late)
    for _ in range(8):
        engine.step()
    engine.close()
    assert weighed[0] == 2
    first, number = branches(few)[1], branches(other)[1]
    assert first < number
    assert branches(late)[1] == number
    assert first < max(branches(few)) <= number


def test_one_that_accepts_otherwise_has_the_same_number(llm: LLM, weighed: list[int]) -> None:
    engine = running(llm, 3, 3)
    late = session(llm, 3, DEAR_HOST, accept="exact")
    engine.add(late)
    for _ in range(2):
        engine.step()
    kept = [auto_of(one)._kept.branches for one in engine.running]
    engine.close()
    assert weighed == [3]
    assert len(kept) == 4
    assert len(set(kept)) == 1


def test_one_that_joins_another_is_weighed_with_it(llm: LLM, weighed: list[int]) -> None:
    """As soon as the number of the one that was alone is weighed again."""
    for steps in (1, 3, 4, 5):
        weighed.clear()
        engine = running(llm, 1, steps)
        engine.add(session(llm, 1, DEAR_HOST))
        for _ in range(2 * branch_choice.WEIGH_EVERY):
            engine.step()
        kept = {auto_of(one)._kept.branches for one in engine.running}
        engine.close()
        assert weighed[-1] == 2
        assert len(kept) == 1


def test_one_that_is_decoded_again_has_the_branches_it_had(llm: LLM) -> None:
    """And from then on those of the others, with whom it is weighed."""
    engine = running(llm, 2, 3)
    late = session(llm, 3, DEAR_HOST)
    auto_of(late).known = (0, 2, 1, 2)
    engine.add(late)
    for _ in range(3 * branch_choice.WEIGH_EVERY):
        engine.step()
    kept = {auto_of(one)._kept.branches for one in engine.running}
    engine.close()
    assert branches(late)[:4] == [0, 2, 1, 2]
    assert len(kept) == 1


def test_a_prompt_is_no_part_of_the_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def noted(_: RowBudget, offers: Any, *more: Any) -> int:
        lengths.extend(offer.row_length for offer in offers)
        return 3

    monkeypatch.setattr(RowBudget, "number_for_all", noted)
    engine = running(llm, 2, 3)
    for _ in range(2 * branch_choice.WEIGH_EVERY):
        prompt = [3 + i % 200 for i in range(300)]
        if len(engine.running) < 6:
            engine.add(llm.session(prompt, CONFIG, cost=DEAR_HOST))
        engine.step()
    engine.close()
    assert len(lengths) > 6
    assert max(lengths) < 100


@pytest.mark.parametrize("changes", [{}, {"max_new_tokens": 24}, {"append_at": 1.0}])
def test_rows_are_those_of_the_middle_of_an_answer(
    llm: LLM, weighed_rows: list[int], changes: dict[str, Any]
) -> None:
    """The first rounds of most answers have shorter ones."""
    engine = instant_engine()
    sessions = [session(llm, seed, DEAR_HOST, **{"block_size": 16, **changes}) for seed in (0, 1)]
    for one in sessions:
        engine.add(one)
    for _ in range(2 * branch_choice.WEIGH_EVERY):
        engine.step()
    engine.close()
    rows = [
        record.branches[-1].end - max(record.start, one.decoder.prompt)
        for one in sessions
        for record in one.trace.rounds
    ]
    assert min(weighed_rows) == statistics.mode(rows)
    assert max(weighed_rows) <= max(rows)


def test_in_a_gap_rows_have_the_text_behind_it(llm: LLM, weighed_rows: list[int]) -> None:
    engine = instant_engine()
    behind = tuple(3 + i % 200 for i in range(300))
    gaps = [Gap((24,), behind)]
    for _ in range(2):
        engine.add(llm.session_from_ids([5, 6, 7], CONFIG, gaps=gaps, cost=DEAR_HOST))
    for _ in range(4):
        engine.step()
    engine.close()
    assert min(weighed_rows) > 300


def test_who_comes_one_by_one_decides_for_nobody_else(llm: LLM, weighed: list[int]) -> None:
    """All are weighed when the load has doubled: what the next one gets is not everybody's."""
    engine = running(llm, 2, 0)
    for seed in range(2, 8):
        for _ in range(2):
            engine.step()
        engine.add(session(llm, seed, DEAR_HOST))
    for _ in range(2):
        engine.step()
    count = len(engine.running)
    engine.close()
    assert count == 8
    assert weighed == [2, 5]


def test_what_is_expected_goes_by_the_branches_of_each_round(llm: LLM) -> None:
    engine, one = instant_engine(), session(llm, 0, DEAR_HOST)
    engine.add(one)
    expected: dict[int, set[float]] = {}
    while engine.busy:
        engine.step()
        if len(branches(one)) <= LEARN_EVERY_KEPT:  # from then on less is expected
            number = branches(one)[-1]
            expected.setdefault(number, set()).add(auto_of(one).expected_gain)
    numbers = sorted(expected)
    assert len(numbers) > 3  # towards the end there are ever fewer masks
    assert expected[0] == {0.0}
    assert [min(expected[k]) for k in numbers] == sorted(min(expected[k]) for k in numbers)
    assert max(expected[numbers[-1]]) > max(expected[numbers[1]])


def test_all_are_weighed_again_together(llm: LLM, weighed: list[int]) -> None:
    running(llm, 4, 2 + 2 * branch_choice.WEIGH_EVERY).close()
    assert weighed == [4] * 3


def test_where_they_take_turns_each_has_its_rounds_in_between(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed: list[int] = []  # rounds that all had had by then
    engine = running(llm, 4, 0)
    sessions = list(engine.waiting)

    def noted(*_: Any) -> int:
        weighed.append(sum(len(one.trace.rounds) for one in sessions))
        return 1

    monkeypatch.setattr(RowBudget, "number_for_all", noted)
    engine.token_budget = 60
    while engine.chooser.rounds < 100:
        assert len(engine.step()) < 4
    engine.close()
    between = [after - before for before, after in pairwise(weighed)]
    assert len(between) > 1
    assert all(0 <= one - 4 * branch_choice.WEIGH_EVERY < 4 for one in between)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_rounds_bring_without_branches_is_learned(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Each round brought that and what its own number of branches usually adds."""
    seen: list[AnchorTokens] = []

    def noted(_: RowBudget, __: Any, learned: AnchorTokens, *more: Any) -> int:
        seen.append(learned)
        return (3, 1, 7)[len(seen) % 3]

    monkeypatch.setattr(RowBudget, "number_for_all", noted)
    monkeypatch.setattr(row_budget, "ANCHOR_DECAY", 1.0)
    engine = running(llm, 3, 0, is_async=is_async)
    sessions = list(engine.waiting)
    # While they have as many candidates as branches, but for the first round, which has none.
    for _ in range(3 * branch_choice.WEIGH_EVERY):
        engine.step()
    numbers = [(branches(one)[1], *branches(one)[1:]) for one in sessions]
    assert set(numbers[0]) == {1, 3, 7}
    learned = engine.chooser.anchor_tokens
    assert all(one is learned for one in seen)
    assert learned.rounds == sum(map(len, numbers))
    gain_of = auto_of(sessions[0]).budget.usual_steps.gain_of
    gains = sum(gain_of(number) for each in numbers for number in each)
    assert learned.tokens == pytest.approx(sum(one.decoder.filled for one in sessions) - gains)
    engine.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_every_round_is_learned_of(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.setattr(row_budget, "ANCHOR_DECAY", 1.0)
    engine = running(llm, 3, 0, is_async=is_async)
    sessions = list(engine.waiting)
    while engine.busy:
        engine.step()
    rounds = [record for one in sessions for record in one.trace.rounds]
    assert engine.chooser.anchor_tokens.rounds == len(rounds)


@pytest.mark.parametrize("is_async", [False, True])
def test_who_is_alone_learns_that_of_its_own_rounds(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    seen: list[AnchorTokens] = []

    def noted(_: RowBudget, __: Any, learned: AnchorTokens, *more: Any) -> int:
        seen.append(replace(learned))
        return 3

    monkeypatch.setattr(RowBudget, "number_for_all", noted)
    engine = running(llm, 3, 2 * branch_choice.WEIGH_EVERY, is_async=is_async)
    engine.close()
    seen.clear()
    alone = session(llm, 4, DEAR_HOST, max_new_tokens=24)
    engine.add(alone)
    while engine.busy:
        engine.step()
    first, *later = seen
    assert first.rounds == 0
    of_all = auto_of(alone).anchor_tokens
    assert of_all.rounds == len(alone.trace.rounds) > max(one.rounds for one in later) > 0
    gain = auto_of(alone).budget.usual_steps.gain_of(3)
    assert of_all.tokens == pytest.approx(alone.decoder.filled - gain * of_all.rounds)


def test_who_is_alone_by_now_goes_by_its_rounds_among_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def noted(_: RowBudget, __: Any, learned: AnchorTokens, *more: Any) -> int:
        seen.append(learned.rounds)
        return 3

    monkeypatch.setattr(RowBudget, "number_for_all", noted)
    engine = running(llm, 4, 2 * branch_choice.WEIGH_EVERY)
    for other in list(engine.running)[1:]:
        engine.abort(other)
    (alone,) = engine.running
    seen.clear()
    engine.step()
    engine.close()
    assert seen == [len(alone.trace.rounds) - 1]


def test_one_that_goes_on_from_elsewhere_may_be_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offer was made where it began: with ranks that are lost, say."""
    monkeypatch.setattr(RowBudget, "number_for_all", lambda *_: 1)
    one = session(llm, 0, DEAR_HOST)
    runner: Any = InstantRunner()
    slot = runner.open(one.config, one.capacity, one.trace.prompt_ids)
    for _ in range(9):
        plan = one.plan()
        assert plan is not None
        (stats,) = runner.launch([(slot, plan)]).wait()
        one.choose(stats)
        one.record(0.0)
    assert auto_of(one).offered is not None
    engine = instant_engine()
    engine.add(one)
    engine.step()
    engine.close()
    assert branches(one)[-2] > branches(one)[-1] == 1


def test_the_tokens_of_a_round_may_be_told_later(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def noted(budget: RowBudget, *_: Any) -> int:
        seen.append(budget.most_tokens)
        return 1

    monkeypatch.setattr(RowBudget, "number_for_all", noted)
    engine = running(llm, 3, 3)
    engine.token_budget = 100  # as ranks are
    for _ in range(branch_choice.WEIGH_EVERY):
        engine.step()
    engine.close()
    assert seen == [TOKEN_BUDGET, 100]


def test_another_number_is_for_all_from_the_round_after_the_next_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([3, 1, 5])
    monkeypatch.setattr(RowBudget, "number_for_all", lambda *_: next(numbers, 5))
    engine = running(llm, 3, 0)
    sessions = list(engine.waiting)
    for _ in range(3 * branch_choice.WEIGH_EVERY):
        engine.step()
    engine.close()
    every = branch_choice.WEIGH_EVERY
    expected = [0, *[3] * every, *[1] * every, *[5] * every]
    for one in sessions:
        assert branches(one) == expected[: len(branches(one))]
    assert {5} == {branches(one)[-1] for one in sessions}


def test_who_is_alone_has_the_same_branches_whatever_ran_before(llm: LLM) -> None:
    engine = instant_engine()
    found = []
    for seed in (0, 1, 2, 0):
        one = session(llm, seed, DEAR_HOST, max_new_tokens=64)
        engine.add(one)
        while engine.busy:
            engine.step()
        found.append(branches(one))
    assert found[0] == found[-1] != found[1]


@pytest.mark.parametrize("cost", [DEAR_HOST, CHEAP_HOST])
def test_a_new_one_that_is_alone_has_what_weighing_would_give(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, cost: RoundCost
) -> None:
    def answers(engine: Scheduler) -> list[list[int]]:
        """One after the other, of several lengths; some twice."""
        found = []
        for seed, tokens in ((0, 64), (1, 8), (2, 96), (0, 64), (1, 8)):
            one = session(llm, seed, cost, max_new_tokens=tokens)
            engine.add(one)
            while engine.busy:
                engine.step()
            found.append(branches(one))
        return found

    remembered = answers(instant_engine())
    weighing = instant_engine()
    monkeypatch.setattr(
        weighing.chooser, "_weigh_first", lambda one: weighing.chooser._weigh_again([one])
    )
    assert answers(weighing) == remembered
    assert max(map(max, remembered)) > 0


def test_where_the_device_is_what_takes_long_by_now_nothing_is_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, weighed: list[int]
) -> None:
    engine = running(llm, 2, 3)
    monkeypatch.setattr(row_budget, "KEEP_FROM_SHARE", 1e9)
    for _ in range(2 * branch_choice.WEIGH_EVERY):
        engine.step()
    engine.close()
    assert engine.chooser.kept is None or engine.chooser.kept.branches is None
    assert len(weighed) > branch_choice.WEIGH_EVERY  # every round, once it was noticed


def test_all_are_weighed_at_once_when_the_load_has_changed(llm: LLM, weighed: list[int]) -> None:
    """Seven where there were two, and one when the others have gone: all are weighed anew."""
    engine = running(llm, 2, 3)
    for seed in range(2, 7):
        engine.add(session(llm, seed, DEAR_HOST))
    for _ in range(3):
        engine.step()
    assert weighed == [2, 7]
    for other in list(engine.running)[1:]:
        engine.abort(other)
    for _ in range(2):
        engine.step()
    engine.close()
    assert weighed == [2, 7, 1]


def test_where_numbers_are_kept_no_more_drafts_are_made(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the first ones come, nor when the load doubles or falls to one."""
    monkeypatch.setattr(RowBudget, "number_for_all", lambda *_: 2)
    engine = instant_engine()
    sessions = [session(llm, seed, DEAR_HOST, max_new_tokens=32 + 8 * seed) for seed in range(8)]
    for number, one in enumerate(sessions):
        engine.add(one)
        if number in (1, 5):
            for _ in range(3):
                engine.step()
    while engine.busy:
        engine.step()
    spawned = [len(record.spawned) for one in sessions for record in one.trace.rounds]
    assert max(spawned) == 2


def test_where_the_device_is_what_takes_long_every_round_is_weighed(
    llm: LLM, weighed: list[int]
) -> None:
    running(llm, 2, 6, CHEAP_HOST).close()
    assert weighed == [2] * 5  # the first round has nothing to look ahead at


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_alone_nothing_is_taken_over_from_others(
    before: int, ended: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowBudget, "number_for_all", lambda _, offers, *more: len(offers))
    engine = instant_engine()
    for seed in range(before):  # their answers are of one length
        engine.add(session(llm, seed, DEAR_HOST, max_new_tokens=16))
    for _ in range(4):
        engine.step()
    if not ended:
        engine.close()
    while engine.busy:
        engine.step()
    one = session(llm, 9, DEAR_HOST)
    engine.add(one)
    for _ in range(6):
        engine.step()
    engine.close()
    assert branches(one) == [0, 1, 1, 1, 1, 1]
