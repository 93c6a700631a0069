from __future__ import annotations

import math

import pytest
import torch

from lopa.config import DecodeConfig
from lopa.runner.statistics import statistics

MASK = 3


def run(
    logits: torch.Tensor, positions: torch.Tensor | None = None, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if positions is None:
        positions = torch.arange(len(logits))
    config = DecodeConfig(**options)  # type: ignore[arg-type]
    return statistics(logits, positions, torch.ones_like(positions), MASK, config)


@pytest.mark.parametrize("ranking", ["max_prob", "margin", "neg_entropy"])
def test_confidences_against_the_formulas(ranking: str) -> None:
    logits = 3 * torch.randn(50, 11, generator=torch.Generator().manual_seed(0))
    logits[:, MASK] = -4.0
    token, max_prob, rank = run(logits, ranking=ranking)
    for row, t, m, r in zip(logits.tolist(), token.tolist(), max_prob, rank, strict=True):
        total = sum(math.exp(x) for x in row)
        p = [math.exp(x) / total for x in row]
        best = sorted(p, reverse=True)
        assert t == p.index(best[0])
        assert m == pytest.approx(best[0], rel=1e-5)
        expected = {
            "max_prob": best[0],
            "margin": best[0] - best[1],
            "neg_entropy": sum(x * math.log(x + 1e-10) for x in p),
        }
        assert r == pytest.approx(expected[ranking], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ranking", ["max_prob", "margin", "neg_entropy"])
def test_the_mask_is_never_predicted_but_keeps_its_share(ranking: str, temperature: float) -> None:
    logits = torch.zeros(20, 5)
    logits[:, MASK] = 9.0
    logits[:, 1] = 2.0
    token, max_prob, rank = run(logits, ranking=ranking, temperature=temperature)
    assert (token != MASK).all()
    probs = torch.softmax(logits, dim=-1)
    torch.testing.assert_close(max_prob, probs.gather(1, token[:, None])[:, 0])
    if ranking == "margin":
        assert (rank < 0).all()


def test_a_filter_that_leaves_only_the_mask() -> None:
    logits = torch.zeros(4, 5)
    logits[:, MASK] = 50.0
    logits[:, 2] = 1.0
    token, max_prob, rank = run(logits, temperature=1.0, top_k=1)
    assert (token == 2).all()  # the best of the others
    assert torch.isfinite(rank).all()
    assert (max_prob < 1e-6).all()


def test_samples_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.0, 0.05])
    logits = probs.log().expand(40_000, 5)
    token, _, _ = run(logits, temperature=1.0, seed=5)
    share = torch.bincount(token, minlength=5) / len(token)
    assert (share - probs).abs().max() < 0.012  # five standard deviations


def test_samples_depend_on_seed_round_and_position_alone() -> None:
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(100, 164)
    token, _, _ = run(logits, positions, temperature=1.0, seed=1)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    again, _, _ = run(logits[order], positions[order], temperature=1.0, seed=1)
    assert (token[order] == again).all()
    alone = torch.cat(
        [
            run(logits[i : i + 1], positions[i : i + 1], temperature=1.0, seed=1)[0]
            for i in range(64)
        ]
    )
    assert (token == alone).all()
    other, _, _ = run(logits, positions, temperature=1.0, seed=2)
    assert (token != other).float().mean() > 0.5


def test_top_p_and_top_k() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log().repeat(500, 1)
    token, max_prob, _ = run(logits, temperature=1.0, top_k=2)
    assert set(token.tolist()) == {0, 1}
    torch.testing.assert_close(max_prob[token == 0][0], torch.tensor(2 / 3))
    token, max_prob, _ = run(logits, temperature=1.0, top_p=0.6)
    assert set(token.tolist()) == {0, 1}
    token, max_prob, _ = run(logits, temperature=1.0, top_p=0.01)
    assert set(token.tolist()) == {0}
    assert (max_prob == 1).all()
