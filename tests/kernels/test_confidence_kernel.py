"""The confidence kernel against lopa.runner.statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lopa import DecodeConfig
from lopa.kernels.triton.confidence import BLOCK, RANKINGS, confidence
from lopa.runner.statistics import statistics


@pytest.mark.parametrize("ranking", list(RANKINGS))
@pytest.mark.parametrize(("temperature", "early_stop"), [(0.0, True), (0.7, True), (0.7, False)])
@pytest.mark.parametrize("vocab", [50, 2 * BLOCK + 90])
def test_equals_plain_statistics(
    ranking: Any, temperature: float, early_stop: bool, vocab: int
) -> None:
    torch.manual_seed(vocab)
    logits = 4 * torch.randn(6, vocab)
    mask = 17
    logits[0, mask] = 40  # the mask is never predicted, but keeps its share
    logits[1, 30] = logits[1, 20] = 30  # a tie
    logits[2, -1] = logits[2, 20] = 30  # and one between the first part and the last
    logits[3, -1] = 30
    positions = torch.randint(0, 1000, (6,))
    config = DecodeConfig(
        ranking=ranking, temperature=temperature, seed=2**60 + 11, early_stop=early_stop
    )
    token, max_prob, expected = statistics(logits, positions, mask, config)
    own = config.seed, config.tempers_confidence, RANKINGS[ranking]
    settings = torch.stack([positions, *(torch.full_like(positions, n) for n in own)], 1)
    settings[5, 3] = -1  # padding: left alone
    out = torch.full((3, 6), -7, dtype=torch.int32)
    confidence(logits, settings, torch.full((6,), temperature), mask, out, sampling=temperature > 0)
    assert out[:, 5].tolist() == [-7] * 3
    assert out[0, :5].tolist() == token[:5].tolist()
    torch.testing.assert_close(out[1, :5].view(torch.float32), max_prob[:5], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(out[2, :5].view(torch.float32), expected[:5], rtol=1e-5, atol=1e-6)


def test_rows_of_one_batch_have_settings_of_their_own() -> None:
    torch.manual_seed(5)
    logits, positions = 4 * torch.randn(9, 50), torch.arange(9) + 3
    configs = [
        DecodeConfig(temperature=t, seed=7, ranking=ranking, early_stop=early_stop)  # type: ignore[arg-type]
        for t, early_stop in ((0.0, True), (0.7, False), (1.3, True))
        for ranking in RANKINGS
    ]
    settings = torch.tensor(
        [
            [position, c.seed, c.tempers_confidence, RANKINGS[c.ranking]]
            for position, c in zip(positions.tolist(), configs, strict=True)
        ]
    )
    out = torch.zeros(3, 9, dtype=torch.int32)
    heat = torch.tensor([c.temperature for c in configs])
    confidence(logits, settings, heat, 17, out)
    for i, config in enumerate(configs):
        token, *others = statistics(logits[i : i + 1], positions[i : i + 1], 17, config)
        assert out[0, i] == token
        found = out[1:, i].view(torch.float32)
        torch.testing.assert_close(found, torch.cat(others), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranking", list(RANKINGS))
@pytest.mark.parametrize(("temperature", "vocab"), [(0.0, 2 * BLOCK + 90), (0.7, 50)])
def test_excluded_and_expected_tokens(ranking: Any, temperature: float, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = 4 * torch.randn(8, vocab)
    logits[0, 3] = logits[1, 3] = 40  # excluded, and by far the likeliest
    logits[2, vocab - 1] = 40
    positions = torch.randint(0, 1000, (8,))
    config = DecodeConfig(ranking=ranking, temperature=temperature, seed=5)
    never = [(3, vocab - 1)] * 4 + [()] * 4
    expected = torch.tensor([-1, 20, -1, vocab - 1, -1, 3, 17, 0])  # excluded ones may be asked for
    own = config.seed, config.tempers_confidence, RANKINGS[ranking]
    settings = torch.stack([positions, *(torch.full_like(positions, n) for n in own)], 1)
    out = torch.zeros(3, 8, dtype=torch.int32)
    heat = torch.full((8,), temperature)
    confidence(
        logits,
        settings,
        heat,
        17,
        out,
        sampling=temperature > 0,
        never=torch.tensor([[*tokens, -1, -1, -1, -1][:4] for tokens in never], dtype=torch.int32),
        expected=expected.int(),
    )
    for i, tokens in enumerate(never):
        here = slice(i, i + 1)
        token, *others = statistics(
            logits[here], positions[here], 17, config, tokens, expected[here]
        )
        assert out[0, i] == token
        found = out[1:, i].view(torch.float32)
        torch.testing.assert_close(found, torch.cat(others), rtol=1e-5, atol=1e-6)
