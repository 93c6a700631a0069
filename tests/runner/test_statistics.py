from __future__ import annotations

import math

import numpy as np
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
    return statistics(logits, positions, MASK, config)


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


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise of splitmix64's finaliser, on Python's whole numbers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    row = mix(mix((position * 0x9E3779B1 + 1) % 2**64) ^ seed)
    bits = mix((row + token * 0x2545F4914F6CDD1D) % 2**64)
    return -math.log(-math.log(((bits >> 11) % 2**52 + 0.5) / 2**52))


def softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def from_scratch(row: np.ndarray, position: int, config: DecodeConfig) -> tuple[int, float, float]:
    """One position, by the definitions."""
    tempered = row / config.temperature
    kept, before = [], 0.0
    for token in np.argsort(-tempered, kind="stable").tolist():
        if before <= config.top_p and len(kept) < (config.top_k or len(row)):
            kept.append(token)
        before += softmax(tempered)[token]
    others = [token for token in range(len(row)) if token != MASK]
    keys = {t: tempered[t] + noise(config.seed, position, t) for t in kept if t != MASK}
    token = max(keys, key=keys.__getitem__) if keys else max(others, key=row.__getitem__)
    probs = softmax(row)
    if not config.early_stop:
        probs = np.zeros(len(row))
        probs[kept] = softmax(tempered[kept])
    margin = probs[token] - np.delete(probs, token).max()
    entropy = (probs * np.log(probs + 1e-10)).sum()
    ranking = {"max_prob": probs[token], "margin": margin, "neg_entropy": entropy}
    return token, probs[token], ranking[config.ranking]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("ranking", ["max_prob", "margin", "neg_entropy"])
@pytest.mark.parametrize(
    "shape",
    [
        {"temperature": 0.3},
        {"temperature": 1.0},
        {"temperature": 1.7},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.2, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 3},
    ],
    ids=str,
)
def test_sampling_against_the_definitions(
    shape: dict[str, float], ranking: str, early_stop: bool
) -> None:
    """Parity mode takes confidences from the distribution sampled from, others from the model's."""
    logits = 3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(4))
    logits[0, MASK] = 30.0  # nothing else passes top-p
    options = {"ranking": ranking, "early_stop": early_stop, "seed": 2**61 + 5, **shape}
    positions = torch.arange(40) * 3
    found = run(logits, positions, **options)
    config = DecodeConfig(**options)  # type: ignore[arg-type]
    expected = [
        from_scratch(row, position, config)
        for row, position in zip(logits.double().numpy(), positions.tolist(), strict=True)
    ]
    token, max_prob, rank = (np.array(x) for x in zip(*expected, strict=True))
    assert found[0].tolist() == token.tolist()
    np.testing.assert_allclose(found[1].numpy(), max_prob, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[2].numpy(), rank, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decoder", ["lopa", "fast-dllm"])
@pytest.mark.parametrize("ranking", ["max_prob", "margin", "neg_entropy"])
@pytest.mark.parametrize(
    "shape",
    [
        {"temperature": 1e-3},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_the_coldest_samples_are_greedy(
    shape: dict[str, float], ranking: str, decoder: str
) -> None:
    logits = 3 * torch.randn(300, 200, generator=torch.Generator().manual_seed(6))
    logits[:50, MASK] = 30.0
    if "top_k" in shape or "top_p" in shape:
        logits = logits.round()  # many ties, which go to the lower id
    else:
        best = logits.topk(3).values
        logits = logits[(best[:, 0] - best[:, 1] > 0.03) & (best[:, 1] - best[:, 2] > 0.03)]
        assert len(logits) > 200
    options = {"ranking": ranking, "decoder": decoder}
    greedy = run(logits, **options)
    for seed in range(3):
        sampled = run(logits, seed=seed, **options, **shape)
        assert all(torch.equal(a, b) for a, b in zip(sampled, greedy, strict=True))


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


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ({"temperature": 1.0}, 5),
        ({"temperature": 0.5}, 5),
        ({"temperature": 2.0}, 5),
        ({"temperature": 0.5, "top_k": 3}, 3),
        ({"temperature": 2.0, "top_p": 0.6}, 2),  # at this temperature 0.38, 0.29, …
    ],
    ids=str,
)
def test_samples_follow_the_tempered_distribution(
    shape: dict[str, float], kept: int, early_stop: bool
) -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.0, 0.05])  # in falling order, but for the mask
    expected = probs ** (1 / shape["temperature"])
    expected[kept:] = 0.0
    expected /= expected.sum()
    count = 40_000
    options = {**shape, "early_stop": early_stop}
    token, max_prob, _ = run(probs.log().expand(count, 5), seed=5, **options)
    share = torch.bincount(token, minlength=5) / count
    assert (share - expected).abs().max() < 0.012  # five standard deviations
    torch.testing.assert_close(max_prob, (probs if early_stop else expected)[token])
    # Neighbours are independent.
    pairs = torch.bincount(token[:-1] * 5 + token[1:], minlength=25) / (count - 1)
    assert (pairs - torch.outer(expected, expected).flatten()).abs().max() < 0.012


def test_samples_of_one_position_follow_the_distribution_over_seeds() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.0, 0.05])
    logits, place = probs.log()[None], torch.tensor([7])
    token = [run(logits, place, temperature=1.0, seed=seed)[0] for seed in range(4000)]
    share = torch.bincount(torch.cat(token), minlength=5) / len(token)
    assert (share - probs).abs().max() < 0.04  # five standard deviations


def test_a_position_keeps_its_sample_while_that_gets_likelier() -> None:
    """Its noise is the same in every round."""
    logits = 2 * torch.randn(300, 50, generator=torch.Generator().manual_seed(8))
    token, max_prob, _ = run(logits, temperature=1.2, seed=3)
    logits.scatter_add_(1, token[:, None], torch.ones(300, 1))
    again, more, _ = run(logits, temperature=1.2, seed=3)
    assert torch.equal(token, again)
    assert (more > max_prob).all()


def test_samples_depend_on_seed_and_position_alone() -> None:
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
    torch.testing.assert_close(max_prob[token == 0][0], torch.tensor(0.5))
    parity, max_prob, _ = run(logits, temperature=1.0, top_k=2, early_stop=False)
    assert torch.equal(parity, token)
    torch.testing.assert_close(max_prob[token == 0][0], torch.tensor(2 / 3))
    token, max_prob, _ = run(logits, temperature=1.0, top_p=0.6)
    assert set(token.tolist()) == {0, 1}
    token, max_prob, _ = run(logits, temperature=1.0, top_p=0.01, early_stop=False)
    assert set(token.tolist()) == {0}
    assert (max_prob == 1).all()
    token, _, _ = run(logits, temperature=1.0, top_k=2**63 - 1)
    assert set(token.tolist()) == {0, 1, 2, 4}
