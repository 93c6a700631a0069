"""Two rounds in flight: halves of the sessions in turn give the tokens of one session at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lopa import LLM, DecodeConfig
from lopa.decoding import row_budget
from lopa.decoding.round_cost import RoundCost
from lopa.decoding.row_budget import RowBudget
from lopa.engine import branch_choice
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.runner.backend_torch import PendingStats, TorchBackend
from lopa.runner.paged import PagedRunner

# Two halves cost what all do; a second forward costs too much; the host takes longer.
EVEN = RoundCost(((1, 0.0005), (1000, 0.9995)), (0.0005,) * 5, in_halves=True)
FLAT = RoundCost(((1, 0.99), (1000, 1.09)), (0.01,) * 5, in_halves=True)
HOST_BOUND = RoundCost(((1, 0.001), (1000, 0.0011)), (0.01,) * 5, in_halves=True)


class TwoLanes(TorchBackend):
    """Stages each lane by itself and leaves the writes of a commit to its lane's next forward."""

    is_async = True
    lanes = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stages: list[Any] = [([], [], None), ([], [], None)]
        self._writes: list[Any] = [None, None]
        self.in_flight: set[int] = set()
        self.most_in_flight = 0

    def launch(self, *args: Any) -> PendingStats:
        lane = args[3] if len(args) > 3 else 0
        self._write(lane)
        self._keys, self._values, self._hidden = [], [], None
        pending = super().launch(*args)
        self._stages[lane] = self._keys, self._values, self._hidden
        self.in_flight.add(lane)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

        def wait() -> Any:
            self.in_flight.discard(lane)
            return pending.wait()

        return PendingStats(wait)

    def commit(self, source: Any, target: Any, carries: Any, lane: int = 0) -> None:
        self._write(lane)
        self._writes[lane] = source, target, carries

    def flush(self) -> None:
        self._write(0)
        self._write(1)

    def _write(self, lane: int) -> None:
        if self._writes[lane] is not None:
            writes, self._writes[lane] = self._writes[lane], None
            self._keys, self._values, self._hidden = self._stages[lane]
            super().commit(*writes)

    def open(self, slot: int, pages: Sequence[int]) -> None:
        self.flush()
        super().open(slot, pages)


def two_lanes(llm: LLM, cost: RoundCost, **limits: int) -> Scheduler:
    runner = PagedRunner(llm.model, 4096, backend=TwoLanes)
    return Scheduler(runner, cost=cost, **limits)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu")


def configs(attention: str) -> list[DecodeConfig]:
    given: dict[str, Any] = {"max_new_tokens": 24, "block_size": 8, "attention": attention}
    return [
        DecodeConfig(branches=0, **given),
        DecodeConfig(branches=3, threshold=0.3, **given),
        DecodeConfig(branches=2, accept="exact", **given),
        DecodeConfig(branches=2, temperature=0.7, seed=3, **given),
    ]


@pytest.mark.parametrize(("attention", "token_budget"), [("full", 60), ("block", 8192)])
def test_the_tokens_are_those_of_one_at_a_time(llm: LLM, attention: str, token_budget: int) -> None:
    chance = random.Random(1)
    begin = [chance.randrange(1, 60) for _ in range(20)]  # some prompts begin alike
    prompts = [
        begin[: chance.choice((0, 9, 20))] + [chance.randrange(1, 60) for _ in range(1 + i % 5)]
        for i in range(14)
    ]
    settings = [configs(attention)[i % 4] for i in range(14)]
    alone = [llm.generate(ids, one).token_ids for ids, one in zip(prompts, settings, strict=True)]
    engine = two_lanes(llm, EVEN, max_running=9, token_budget=token_budget)
    sessions = [llm.session(ids, one) for ids, one in zip(prompts, settings, strict=True)]
    waiting = list(sessions)
    while waiting or engine.busy:  # they come a few at a time
        for session in waiting[:2]:
            engine.add(session)
        del waiting[:2]
        engine.step()
    assert [s.output.token_ids for s in sessions if s.output is not None] == alone
    assert engine.runner.backend.most_in_flight == 2  # type: ignore[attr-defined]
    engine.runner.prefix_cache.clear()  # type: ignore[attr-defined]
    assert engine.runner.kv_pages is not None
    assert engine.runner.kv_pages[0] == 0  # nothing is held


@pytest.mark.parametrize("seed", range(3))
def test_kept_numbers_that_change_change_no_exact_answer(
    llm: LLM, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions come and go, in halves, and the number is another one each time."""
    chance = random.Random(seed)
    monkeypatch.setattr(row_budget, "KEEP_FROM_SHARE", 0.0)
    monkeypatch.setattr(branch_choice, "WEIGH_EVERY", 2)
    monkeypatch.setattr(RowBudget, "number_for_all", lambda *_: chance.choice((0, 1, 3, 7)))
    plain = DecodeConfig(branches=0, max_new_tokens=24, block_size=8, threshold=0.3)
    auto = plain.changed(branches="auto", accept="exact")
    prompts = [[chance.randrange(1, 60) for _ in range(1 + i % 9)] for i in range(16)]
    alone = [llm.generate(ids, plain).token_ids for ids in prompts]
    engine = two_lanes(llm, EVEN, max_running=7)
    sessions = [llm.session(ids, auto, cost=EVEN) for ids in prompts]
    waiting, aborted = list(sessions), []
    while waiting or engine.busy:
        for session in waiting[: chance.randrange(4)]:
            engine.add(session)
            waiting.remove(session)
        if engine.running and chance.random() < 0.1:
            aborted.append(chance.choice(list(engine.running)))
            engine.abort(aborted[-1])
        engine.step()
    tried = {len(one.branches) - 1 for session in sessions for one in session.trace.rounds}
    assert len(tried) > 2
    for session, expected in zip(sessions, alone, strict=True):
        assert (session.output is None) == (session in aborted)
        if session.output is not None:
            assert session.output.token_ids == expected


def test_an_aborted_session_leaves_the_others_as_they_are(llm: LLM) -> None:
    config = configs("full")[1]
    prompts = [[5, 6, 7 + i] for i in range(8)]
    alone = [llm.generate(ids, config).token_ids for ids in prompts]
    for at in range(1, 6):
        engine = two_lanes(llm, EVEN)
        sessions = [llm.session(ids, config) for ids in prompts]
        for session in sessions:
            engine.add(session)
        for _ in range(at):
            engine.step()
        gone = [sessions[at % 8], sessions[(at + 4) % 8]]
        for session in gone:
            engine.abort(session)
        while engine.busy:
            engine.step()
        for session, ids in zip(sessions, alone, strict=True):
            if session not in gone:
                assert session.output is not None
                assert session.output.token_ids == ids


def in_flight(llm: LLM, cost: RoundCost | None, count: int) -> list[int]:
    """Sessions of each round in flight after some steps."""
    engine = Scheduler(PagedRunner(llm.model, 4096, backend=TwoLanes), cost=cost)
    for i in range(count):
        engine.add(llm.session([5, 6, 7 + i], configs("full")[0]))
    for _ in range(4):
        engine.step()
    found = [len(one.sessions) for one in engine.in_flight]
    engine.close()
    return found


def test_they_go_in_halves_where_that_takes_less_time(llm: LLM) -> None:
    assert sorted(in_flight(llm, EVEN, 7)) == [3, 4]
    assert in_flight(llm, EVEN, 1) == [1]
    assert in_flight(llm, FLAT, 7) == [7]
    assert in_flight(llm, HOST_BOUND, 7) == [7]
    assert in_flight(llm, None, 7) == [7]


def test_halves_pay_where_the_host_costs_more_than_a_second_forward() -> None:
    """A forward takes 4 ms and 20 µs a token."""
    host = (0.0005, 0.001, 0.001, 0.001, 0.001)
    cost = RoundCost(((1, 0.00402), (10_001, 0.20402)), host, in_halves=True)
    assert not cost.halves_pay(64, 0, 4)  # 2 ms of the host, 4 of a second forward
    assert not cost.halves_pay(512, 0, 6)
    assert cost.halves_pay(512, 1, 6)  # branches cost the host
    assert cost.halves_pay(512, 0, 9)
    assert cost.halves_pay(2048, 0, 32)
    assert not cost.halves_pay(512, 0, 40)  # the device never waits for long
    assert not replace(cost, in_halves=False).halves_pay(512, 0, 9)
    assert not replace(cost, records=(0.002,) * 5).halves_pay(512, 0, 9)


def test_one_that_is_left_goes_on_alone(llm: LLM) -> None:
    engine = two_lanes(llm, EVEN)
    sessions: list[Session] = [llm.session([5, 6, 7], one) for one in configs("full")[:2]]
    for session in sessions:
        engine.add(session)
    while len(engine.running) != 1:
        engine.step()
    assert len(engine.in_flight) == 1
    while engine.busy:
        engine.step()
    assert all(session.output is not None for session in sessions)
