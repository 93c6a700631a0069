from __future__ import annotations

import pytest
import torch

from lopa import LLM
from lopa.evaluation.likelihood import log_likelihood


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:dream-tiny", device="cpu")


def test_one_token_by_hand(llm: LLM) -> None:
    """With one token to mask every sample is the same: the log-probability of that token."""
    before = [5, 6, 7]
    logits = llm.forward([*before, llm.config.mask_id])[len(before) - llm.config.shift].clone()
    logits[llm.config.mask_id] = -torch.inf
    expected = logits.log_softmax(-1)
    found, greedy = log_likelihood(llm, before, [9], mask_samples=4)
    assert found == pytest.approx(float(expected[9]), abs=1e-4)
    best = int(expected.argmax())
    assert greedy == (best == 9)
    assert log_likelihood(llm, before, [best], mask_samples=1)[1]


def test_the_same_draws_every_time(llm: LLM) -> None:
    found = [log_likelihood(llm, [5, 6], [7, 8, 9, 10], mask_samples=8) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][0] < 0
