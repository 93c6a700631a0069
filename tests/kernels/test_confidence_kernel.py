"""The confidence kernel against lopa.runner.statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lopa import DecodeConfig
from lopa.kernels.triton.confidence import BLOCK, RANKINGS, VocabularyPart, confidence
from lopa.models.part import Part
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


@pytest.mark.parametrize(
    ("vocab", "count", "temperature", "ranking"),
    [
        (51, 3, 0.0, "margin"),
        # One part's last chunk is empty.
        (2 * BLOCK + 1, 2, 0.0, "max_prob"),
        (2 * BLOCK + 1, 2, 0.7, "neg_entropy"),
    ],
)
def test_parts_of_the_vocabulary(vocab: int, count: int, temperature: float, ranking: Any) -> None:
    torch.manual_seed(vocab)
    logits, mask = 4 * torch.randn(5, vocab), 17
    logits[0, mask] = 40
    logits[1, vocab - 1] = logits[1, 2] = 30  # a tie of two parts
    logits[2, vocab - 1] = 40  # excluded
    positions = torch.randint(0, 1000, (5,))
    config = DecodeConfig(ranking=ranking, temperature=temperature, seed=5)
    own = config.seed, config.tempers_confidence, RANKINGS[ranking]
    settings = torch.stack([positions, *(torch.full_like(positions, n) for n in own)], 1)
    never = torch.tensor([[-1], [-1], [vocab - 1], [-1], [-1]], dtype=torch.int32)
    expected = torch.tensor([-1, -1, -1, vocab - 2, 3], dtype=torch.int32)
    totals: list[torch.Tensor] = []  # what is summed over the ranks, in the order of the sums
    outs: list[torch.Tensor] = []

    def run(index: int) -> list[torch.Tensor]:
        """One rank, which is told the totals that are known, and what it gave to each sum."""
        given: list[torch.Tensor] = []

        def sum_parts(values: torch.Tensor) -> torch.Tensor:
            given.append(values.clone())
            return values.copy_(totals[len(given) - 1]) if len(given) <= len(totals) else values

        held = Part(index, count).held(vocab)
        part = VocabularyPart(held.start, index, count, -(-vocab // count), sum_parts)
        outs.append(torch.zeros(3, 5, dtype=torch.int32))
        confidence(
            logits[:, held.start : held.stop],
            settings,
            torch.full((5,), temperature),
            mask,
            outs[-1],
            sampling=temperature > 0,
            never=never,
            expected=expected,
            part=part,
        )
        return given

    for known in range(3):
        outs.clear()
        ranks = [run(index) for index in range(count)]
        if known < 2:
            totals.append(torch.stack([given[known] for given in ranks]).sum(0))
    for i in range(5):
        here = slice(i, i + 1)
        excluded = tuple(t for t in never[i].tolist() if t >= 0)
        token, *others = statistics(
            logits[here], positions[here], mask, config, excluded, expected[here].long()
        )
        for out in outs:
            assert out[0, i] == token
            found = out[1:, i].view(torch.float32)
            torch.testing.assert_close(found, torch.cat(others), rtol=1e-5, atol=1e-6)
