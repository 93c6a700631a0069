"""The simulated ramp: what is replayed is what would be decoded."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from lopa import LLM, DecodeConfig
from lopa.decoding.round_cost import RoundCost
from lopa.engine.base import MAX_RUNNING
from lopa.studies import load

MEASUREMENTS = Path(__file__).parents[2] / "measurements"
COST = RoundCost(((8, 0.001), (512, 0.004)), (0.0001, 0.0002, 0.0003, 0.0004, 0.0005))


@pytest.mark.parametrize("branches", [0, 2])
def test_fixed_numbers_are_replayed_as_they_would_be_decoded(
    branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(MEASUREMENTS))
    ramp = importlib.import_module("simulated_ramp")
    llm = LLM("dummy:dream-tiny", device="cpu", dtype="float32")
    config = DecodeConfig(max_new_tokens=16, block_size=8, branches=branches)
    prompts = [[5 + (7 * seed + 3 * i) % 200 for i in range(6 + seed % 3)] for seed in range(4)]
    samples = load.simulate(llm, prompts, config, 1, COST)
    # One by one, more at once than run, and after a pause; the last two are not in their order.
    due = [0.0, 0.01, *[0.2 + 0.0001 * n for n in range(MAX_RUNNING + 8)], 9.0, 9.2, 9.1]
    replayed = ramp.replayed(samples, due, COST)
    decoded = ramp.simulated(llm, prompts, config, due, COST)
    assert [a.seconds for a in replayed] == pytest.approx([a.seconds for a in decoded])
    assert [(a.tokens, a.branches) for a in replayed] == [(a.tokens, a.branches) for a in decoded]
    assert min(a.seconds for a in replayed) > 0
    # Some wait until others have ended.
    assert max(a.seconds for a in replayed) > 1.5 * replayed[0].seconds
    rates = [100.0, 4000.0, 10.0]
    steps = [due[:2], due[2:-3], due[-3:]]
    assert [len(one.answers) for one in ramp.offered(replayed, steps, rates)] == [
        2,
        MAX_RUNNING + 8,
        3,
    ]
