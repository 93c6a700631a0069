"""What it takes to share out the branches of a round among sessions, or to find one number for all
of them, without a device.

    python measurements/row_budget.py [--cost FILE] [--sessions 2,8,32] [--rounds 300]

Offers are made up: gains of each session at random, rows of one to three blocks of 32. A tenth of
the sessions offers something new each round, as sessions do that have learned. The median over the
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from lopa.config import AUTO_BRANCHES
from lopa.decoding.branch_budget import BranchBudget
from lopa.decoding.round_cost import RoundCost
from lopa.decoding.row_budget import NOTHING_KNOWN, Offer, Pace, RowBudget, concave_steps

COST = Path(__file__).parent / "h200" / "round_cost_tiny_bf16.json"
NEW_SHARE = 0.1  # of the sessions that offer something new
MOST_GAINED = 2.5  # tokens of a step
BLOCK = 32


def made_up(rng: np.random.Generator) -> Offer:
    gains = rng.uniform(0.0, MOST_GAINED, len(AUTO_BRANCHES) - 1).cumsum().tolist()
    steps = concave_steps(AUTO_BRANCHES, (0.0, *gains))
    usual = BranchBudget("agreed").usual_offer(BLOCK * int(rng.integers(1, 4)), is_open=True)
    return usual._replace(steps=steps)


def measure(cost: RoundCost, sessions: int, rounds: int, seed: int) -> tuple[float, float]:
    """Seconds of a round: of a number for each, and of one for all."""
    rng = np.random.default_rng(seed)
    budget, pace = RowBudget(cost), Pace()
    offers = [made_up(rng) for _ in range(sessions)]
    each, for_all = [], []
    for _ in range(rounds):
        offers = [made_up(rng) if rng.random() < NEW_SHARE else offer for offer in offers]
        began = time.perf_counter()
        chosen = budget.allocate(offers, pace)
        ended = time.perf_counter()
        budget.number_for_all(offers, NOTHING_KNOWN)
        for_all.append(time.perf_counter() - ended)
        each.append(ended - began)
        gained = sum(o.usual + o.steps.gain_of(k) for o, k in zip(offers, chosen, strict=True))
        tokens = sum(o.row_length * (k + 1) for o, k in zip(offers, chosen, strict=True))
        pace.add(gained, cost(tokens, chosen))
    return statistics.median(each), statistics.median(for_all)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cost", type=Path, default=COST, help="of rounds")
    parser.add_argument("--sessions", default="2,8,32")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cost = RoundCost.read(options.cost)
    for sessions in map(int, options.sessions.split(",")):
        each, for_all = measure(cost, sessions, options.rounds, options.seed)
        print(f"{sessions} sessions: {1e6 * each:.0f} µs, one for all {1e6 * for_all:.0f} µs")


if __name__ == "__main__":
    main()
