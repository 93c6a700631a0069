"""Where a number of branches is kept, choosing it takes the host hardly anything."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import pytest
from instant_runner import InstantRunner

from lopa import LLM, DecodeConfig
from lopa.config import AUTO_BRANCHES
from lopa.decoding import row_budget
from lopa.decoding.round_cost import RoundCost
from lopa.engine.scheduler import Scheduler

BRANCHES = 3
AT_ONCE = 8
MORE_CALLS = 0.02  # of Python functions, for `auto` over a fixed number
DEAR_HOST = RoundCost(((8, 0.0010), (4096, 0.0012)), (0.0005,) * 5)


def calls_of_a_round(llm: LLM, branches: Any) -> float:
    """By session, while others end and begin."""
    made_up: Any = InstantRunner()
    engine = Scheduler(made_up, max_running=AT_ONCE)
    config = DecodeConfig(max_new_tokens=96, branches=branches)
    for seed in range(3 * AT_ONCE):
        prompt = [3 + (7 * seed + 5 * i) % 200 for i in range(9 + seed)]
        engine.add(llm.session(prompt, config, cost=DEAR_HOST))
    rounds, profile = 0, cProfile.Profile()
    while engine.busy:
        profile.enable()
        events = engine.step()
        profile.disable()
        rounds += len(events)
        assert {len(event.round.branches) - 1 for _, event in events} <= set(range(BRANCHES + 1))
    stats: Any = pstats.Stats(profile)
    return float(stats.total_calls) / rounds


def test_auto_calls_hardly_more_than_the_number_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32")
    monkeypatch.setattr(row_budget, "_quickest", lambda *_: AUTO_BRANCHES.index(BRANCHES))
    calls_of_a_round(llm, "auto")  # the first one imports
    fixed, auto = calls_of_a_round(llm, BRANCHES), calls_of_a_round(llm, "auto")
    assert auto < (1 + MORE_CALLS) * fixed
