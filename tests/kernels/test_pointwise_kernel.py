"""Norms, RoPE, activation and quantization against the plain modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lopa.kernels.scaled import LARGEST, Scaled
from lopa.kernels.triton import pointwise
from lopa.kernels.triton.pointwise import Weighted
from lopa.models.transformer import RMSNorm, Where, _rotate

QUANTIZED = [torch.int8, torch.float8_e4m3fn]


def close(ours: object, plain: torch.Tensor, kind: torch.dtype | None) -> None:
    if kind is None:
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
        return
    assert isinstance(ours, Scaled)
    assert ours.values.dtype == kind
    largest = plain.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(ours.scale, largest / LARGEST[kind], rtol=1e-5, atol=0)
    if kind is torch.int8:
        expected = torch.round(plain / ours.scale)
        assert (ours.values - expected).abs().max() <= 1  # where rounding of fp32 tips it
        assert (ours.values != expected).float().mean() < 0.01
    else:
        # The interpreter's cast loses the carry of 1.99 → 2: the device is held to all of them.
        expected = (plain / ours.scale).to(kind).float()
        assert (ours.values.float() == expected).float().mean() > 0.8


@pytest.mark.parametrize("kind", [None, *QUANTIZED])
@pytest.mark.parametrize("add", [False, True])
def test_norm(kind: torch.dtype | None, add: bool) -> None:
    torch.manual_seed(0)
    plain = RMSNorm(100, 1e-6, Where())
    plain.weight.data.normal_()
    x, delta = torch.randn(5, 100), torch.randn(5, 100)
    total = x + delta if add else x.clone()
    ours = pointwise.norm(x, delta if add else None, plain.weight.data, 1e-6, kind)
    torch.testing.assert_close(x, total)  # the residual stream itself
    close(ours, plain(total).detach(), kind)


@pytest.mark.parametrize("kind", [None, *QUANTIZED])
def test_norm_of_what_experts_found(kind: torch.dtype | None) -> None:
    torch.manual_seed(0)
    plain = RMSNorm(100, 1e-6, Where()).requires_grad_(False)
    plain.weight.normal_()
    x, found, weights = torch.randn(5, 100), torch.randn(5, 3, 100), torch.randn(5, 3)
    total = x + (found * weights[:, :, None]).sum(1)
    given = x, Weighted(found, weights), plain.weight, 1e-6
    if kind is None:
        close(pointwise.norm(*given, None), plain(total), None)
    else:
        unscaled, scaled = pointwise.norm_both(*given, kind)
        close(unscaled, plain(total), None)
        close(scaled, plain(total), kind)
    torch.testing.assert_close(x, total)


@pytest.mark.parametrize("kind", [None, *QUANTIZED])
@pytest.mark.parametrize("size", [24, 5000])
def test_activate(kind: torch.dtype | None, size: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 2 * size)
    gate, up = gate_up.chunk(2, dim=1)
    close(pointwise.activate(gate_up, kind), F.silu(gate) * up, kind)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantize_rows(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 100)
    close(pointwise.quantize_rows(x, kind), x, kind)
    zeros = pointwise.quantize_rows(torch.zeros(2, 16), kind)
    assert not zeros.values.float().any()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [16, 8, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (8, 4), (12, 12)])
def test_rotate(heads: int, kv_heads: int, turned: int, normed: bool) -> None:
    torch.manual_seed(0)
    tokens, dim = 3, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(tokens, turned // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    norms = [RMSNorm(dim, 1e-6, Where()) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_()
    q, k, v = qkv.clone().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = (norm(x).detach() for norm, x in zip(norms, (q, k), strict=True))
    keys, values = torch.full((2, tokens, kv_heads, dim), torch.nan)
    weights = (norms[0].weight.data, norms[1].weight.data) if normed else None
    pointwise.rotate(qkv, cos, sin, weights, 1e-6, keys, values, heads)
    torch.testing.assert_close(
        qkv.view(tokens, -1, dim)[:, :heads], _rotate(q, cos[:, None], sin[:, None])
    )
    torch.testing.assert_close(keys, _rotate(k, cos[:, None], sin[:, None]))
    assert torch.equal(values, v)
