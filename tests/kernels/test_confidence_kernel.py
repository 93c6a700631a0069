"""The confidence kernel against lopa.runner.statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lopa import DecodeConfig
from lopa.kernels.triton.confidence import BLOCK, RANKINGS, confidence
from lopa.runner.statistics import statistics


@pytest.mark.parametrize("ranking", list(RANKINGS))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [50, 2 * BLOCK + 90])
def test_equals_plain_statistics(ranking: Any, temperature: float, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = 4 * torch.randn(6, vocab)
    mask = 17
    logits[0, mask] = 40  # the mask is never predicted, but keeps its share
    logits[1, 30] = logits[1, 20] = 30  # a tie
    logits[2, -1] = logits[2, 20] = 30  # and one between the first part and the last
    logits[3, -1] = 30
    positions, rounds = torch.randint(0, 1000, (2, 6))
    config = DecodeConfig(ranking=ranking, temperature=temperature, seed=2**60 + 11)
    token, max_prob, expected = statistics(logits, positions, rounds, mask, config)
    settings = torch.stack(
        [positions, rounds, torch.full((6,), config.seed), torch.full((6,), RANKINGS[ranking])], 1
    )
    settings[5, 3] = -1  # padding: left alone
    out = torch.full((3, 6), -7, dtype=torch.int32)
    confidence(logits, settings, torch.full((6,), temperature), mask, out, sampling=temperature > 0)
    assert out[:, 5].tolist() == [-7] * 3
    assert out[0, :5].tolist() == token[:5].tolist()
    torch.testing.assert_close(out[1, :5].view(torch.float32), max_prob[:5], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(out[2, :5].view(torch.float32), expected[:5], rtol=1e-5, atol=1e-6)
