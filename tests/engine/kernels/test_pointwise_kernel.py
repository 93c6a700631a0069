"""Norms, activation and quantisation against the plain modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lopa.engine.kernels import pointwise
from lopa.engine.scaled import LARGEST, Scaled
from lopa.models.transformer import RMSNorm, Where

QUANTISED = [torch.int8, torch.float8_e4m3fn]


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


@pytest.mark.parametrize("kind", [None, *QUANTISED])
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


@pytest.mark.parametrize("kind", [None, *QUANTISED])
@pytest.mark.parametrize("size", [24, 5000])
def test_activate(kind: torch.dtype | None, size: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 2 * size)
    gate, up = gate_up.chunk(2, dim=1)
    close(pointwise.activate(gate_up, kind), F.silu(gate) * up, kind)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantise(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 100)
    close(pointwise.quantise(x, kind), x, kind)
    zeros = pointwise.quantise(torch.zeros(2, 16), kind)
    assert not zeros.values.float().any()
