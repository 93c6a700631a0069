"""Heads that are normed and rotated, by their own kernel and by the attention, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lopa.engine.kernels.attention import TILE, Rows, attend
from lopa.engine.kernels.turn import Turn, rotate
from lopa.engine.pages import PAGE
from lopa.models.transformer import RMSNorm, Where, _rotate

LONGEST = 200


def drawn(dim: int, normed: bool) -> tuple[Turn, list[RMSNorm]]:
    torch.manual_seed(0)
    angles = torch.rand(LONGEST, dim // 2).repeat(1, 2)
    norms = [RMSNorm(dim, 1e-6, Where()) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_()
    weights = (norms[0].weight.data, norms[1].weight.data) if normed else None
    return Turn(angles.cos(), angles.sin(), weights, 1e-6), norms


def turned(x: Tensor, norm: RMSNorm, turn: Turn, positions: Tensor) -> Tensor:
    x = norm(x).detach() if turn.weights else x
    return _rotate(x, turn.cos[positions][:, None], turn.sin[positions][:, None])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (8, 4), (12, 12)])
def test_rotate(heads: int, kv_heads: int, normed: bool) -> None:
    tokens, dim = 3, 16
    turn, norms = drawn(dim, normed)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    q, k, v = qkv.clone().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.tensor([5, 190, 0], dtype=torch.int32)
    keys, values = torch.full((2, tokens, kv_heads, dim), torch.nan)
    rotate(qkv, positions, turn, keys, values, heads)
    ours = qkv.view(tokens, -1, dim)[:, :heads]
    torch.testing.assert_close(ours, turned(q, norms[0], turn, positions))
    torch.testing.assert_close(keys, turned(k, norms[1], turn, positions))
    assert torch.equal(values, v)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (4, 2)])
def test_attention_turns_what_it_reads(
    heads: int, kv_heads: int, splits: int, normed: bool
) -> None:
    """As with the kernel before it: the same answers, the same keys and values kept."""
    dim, group = 16, heads // kv_heads
    lengths, starts, cached = [5, PAGE + 9, 20], [70, 30, 0], [70, 30, 0]
    turn, norms = drawn(dim, normed)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    pools = torch.randn(2, 4 * PAGE, kv_heads, dim)
    tiles = [
        (row, at) for row, length in enumerate(lengths) for at in range(0, length * group, TILE)
    ]
    begins = [0, lengths[0], lengths[0] + lengths[1]]
    columns = [*zip(*tiles, strict=True), begins, lengths, starts, cached, [0, 1, 2]]
    table = torch.tensor([[3, 1], [0, 0], [2, 2]], dtype=torch.int32)
    blocks = torch.zeros(tokens, dtype=torch.int32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in columns]
    rows = Rows(*ints, blocks, table)

    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    turned_q, turned_k = turned(q, norms[0], turn, positions), turned(k, norms[1], turn, positions)
    plain = attend(turned_q, turned_k, v.contiguous(), *pools, rows, splits=splits)
    kept = torch.full((2, tokens, kv_heads, dim), torch.nan)
    before = qkv.clone()
    ours = attend(q, k, v, *pools, rows, turn=turn, keep=(kept[0], kept[1]), splits=splits)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept[0], turned_k)
    assert torch.equal(kept[1], v)
    assert torch.equal(qkv, before)


def test_what_is_turned_must_be_kept() -> None:
    turn, _ = drawn(16, False)
    x = torch.zeros(4, 2, 16)
    rows = Rows(*[torch.zeros(0, dtype=torch.int32)] * 9)
    with pytest.raises(ValueError, match="kept"):
        attend(x, x, x, x, x, rows, turn=turn)
