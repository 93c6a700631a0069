"""The products of experts against the plain ones, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lopa.kernels.quantize import QuantizedExperts
from lopa.kernels.scaled import Blocked, quantize_rows
from lopa.kernels.triton.experts import Tiling, down, gate_up
from lopa.kernels.triton.routing import group
from lopa.models.config import MixtureConfig
from lopa.models.feed_forward import Where
from lopa.models.mixture import Experts

QUANTIZED = [torch.int8, torch.float8_e4m3fn]


def some_experts(
    count: int, inner: int, hidden: int, dtype: torch.dtype = torch.float32
) -> Experts:
    config = MixtureConfig(
        experts=count, per_token=1, inner=inner, scoring="softmax", renormalise=True
    )
    experts = Experts(config, hidden, Where(dtype=dtype)).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return experts


def ours(experts: Experts, x: Tensor, chosen: Tensor, size: int = 16, **tilings: Any) -> Tensor:
    """[T, choices, hidden]; what is not written is NaN."""
    tiles = group(chosen.int(), experts.count, size)
    stacks, scales = experts.stacks, getattr(experts, "scales", (None, None))
    given: Any = x
    if isinstance(experts, QuantizedExperts):
        given = quantize_rows(x, experts.kind)
    active = gate_up(
        given, stacks[0], scales[0], tiles, chosen.shape[1], tiling=tilings.get("gate_up")
    )
    out = torch.full((chosen.numel(), x.shape[1]), torch.nan, dtype=x.dtype)
    down(active, stacks[1], scales[1], tiles, out, tiling=tilings.get("down"))
    return out.view(*chosen.shape, -1)


def plain(experts: Experts, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.full((*chosen.shape, x.shape[1]), torch.nan, dtype=x.dtype)
    for token, row in enumerate(chosen.tolist()):
        for choice, expert in enumerate(row):
            if expert < experts.count:
                out[token, choice] = experts.run(expert, x[token : token + 1])[0]
    return out


def spread(tokens: int, choices: int, experts: int) -> Tensor:
    return torch.rand(tokens, experts).argsort(1)[:, :choices]


def close(a: Tensor, b: Tensor, limit: float) -> None:
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num().float(), b.nan_to_num().float()
    assert (a - b).norm() <= limit * b.norm()


# Experts, inner width, hidden size: of the fixtures, and of nothing in particular.
SHAPES = [(16, 16, 64), (24, 16, 48), (8, 32, 64), (5, 80, 208)]


@pytest.mark.parametrize(("count", "inner", "hidden"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 19])
def test_fp32(count: int, inner: int, hidden: int, tokens: int) -> None:
    torch.manual_seed(0)
    experts = some_experts(count, inner, hidden)
    x, chosen = torch.randn(tokens, hidden), spread(tokens, 4, count)
    close(ours(experts, x, chosen), plain(experts, x, chosen), 1e-6)


@pytest.mark.parametrize("size", [16, 32])
def test_tilings(size: int) -> None:
    torch.manual_seed(1)
    experts = some_experts(3, 48, 80)
    x, chosen = torch.randn(50, 80), spread(50, 2, 3)
    tilings = {"gate_up": Tiling(32, 32, 4, 2), "down": Tiling(64, 16, 4, 2)}
    close(ours(experts, x, chosen, size, **tilings), plain(experts, x, chosen), 1e-6)


def test_bf16() -> None:
    torch.manual_seed(0)
    experts = some_experts(8, 32, 64, torch.bfloat16)
    x, chosen = torch.randn(9, 64).bfloat16(), spread(9, 2, 8)
    close(ours(experts, x, chosen), plain(experts, x, chosen), 1e-2)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("inner", "hidden"), [(32, 64), (144, 208)])
def test_quantized(kind: torch.dtype, inner: int, hidden: int) -> None:
    """Close to the same values in plain torch. The interpreter's cast to fp8 is not exact."""
    torch.manual_seed(0)
    wide = some_experts(6, inner, hidden)
    experts = QuantizedExperts(wide, kind)
    x, chosen = torch.randn(9, hidden), spread(9, 2, 6)
    limit = 5e-3 if kind is torch.int8 else 6e-2
    close(ours(experts, x, chosen), plain(experts, x, chosen), limit)
    close(plain(experts, x, chosen), plain(wide, x, chosen), 3e-2 if kind is torch.int8 else 8e-2)


def test_experts_without_tokens_and_with_all() -> None:
    torch.manual_seed(0)
    experts = some_experts(7, 16, 64)
    x = torch.randn(40, 64)
    for expert in (0, 3, 6):
        chosen = torch.full((40, 1), expert)
        close(ours(experts, x, chosen), plain(experts, x, chosen), 1e-6)


def test_pairs_that_go_nowhere_are_left_alone() -> None:
    torch.manual_seed(0)
    experts = some_experts(5, 16, 64)
    x, chosen = torch.randn(12, 64), spread(12, 3, 5)
    chosen[7:] = 5
    chosen[:, 2] = 5
    found = ours(experts, x, chosen)
    assert found[7:].isnan().all()
    close(found, plain(experts, x, chosen), 1e-6)


@pytest.mark.parametrize("kind", [None, *QUANTIZED])
def test_a_token_does_not_depend_on_its_company(kind: torch.dtype | None) -> None:
    """Bit for bit, on whole numbers, whose sums are exact in any order."""
    torch.manual_seed(0)
    experts = some_experts(4, 32, 64)
    for parameter in experts.parameters():
        parameter.copy_(torch.randint(-2, 3, parameter.shape))
    if kind is not None:
        experts = QuantizedExperts(experts, kind)
    x, chosen = torch.randint(-2, 3, (40, 64)).float(), spread(40, 2, 4)
    together = ours(experts, x, chosen)
    assert torch.equal(ours(experts, x, chosen, 32), together)
    turned = torch.randperm(40)
    assert torch.equal(ours(experts, x[turned], chosen[turned]), together[turned])
    assert torch.equal(ours(experts, x[11:12], chosen[11:12]), together[11:12])


def test_scales_go_by_blocks() -> None:
    experts = QuantizedExperts(some_experts(2, 144, 64), torch.int8)
    tiles = group(torch.zeros(3, 1, dtype=torch.int32), 2, 16)
    x = quantize_rows(torch.randn(3, 64), torch.int8)
    active = gate_up(x, experts.stacks[0], experts.scales[0], tiles, 1)
    assert isinstance(active, Blocked)
    assert active.scale.shape == (3, 2)
    with pytest.raises(ValueError, match="go by 128, not by 64"):
        gate_up(x, experts.stacks[0], experts.scales[0], tiles, 1, tiling=Tiling(64, 64, 4, 2))
    with pytest.raises(ValueError, match="go by 128, not by 64"):
        down(
            active,
            experts.stacks[1],
            experts.scales[1],
            tiles,
            torch.empty(3, 64),
            tiling=Tiling(64, 64, 4, 2),
        )
