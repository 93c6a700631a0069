"""How fast a request would be decoded on an engine, by what its rounds cost and what it runs.

A request with branches auto gets the fewer of them the more others run. The estimate is of requests
that are alike, with the prior of what branches add.
"""

from __future__ import annotations

from functools import lru_cache

from lopa.config import AUTO_BRANCHES, DecodeConfig
from lopa.decoding.branch_budget import BranchBudget
from lopa.decoding.round_cost import USUAL_ROW, RoundCost
from lopa.decoding.row_budget import Pace, RowBudget

_TOP_PROB = 0.5  # of the best candidate, neither confident nor not


@lru_cache(maxsize=4096)
def expected_rate(cost: RoundCost, running: int) -> float:
    """Tokens per second of one more request beside those that run."""
    offer = BranchBudget(DecodeConfig().accept).offer(USUAL_ROW, AUTO_BRANCHES[-1], _TOP_PROB)
    offers = [offer] * (running + 1)
    chosen = RowBudget(cost).allocate(offers, Pace())
    tokens = sum(offer.usual + offer.steps.gain_of(k) for k in chosen) / len(offers)
    return tokens / cost(USUAL_ROW * sum(k + 1 for k in chosen), chosen)
