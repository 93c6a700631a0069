"""The whole feed-forward of a mixture in kernels against the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lopa.kernels.fast_mixture import experts_dtype, mixture
from lopa.kernels.quantize import Quantize, QuantizedExperts, SharedExpert, quantize_layer
from lopa.kernels.scaled import quantize_rows
from lopa.kernels.triton import routing
from lopa.models import llada2, sdar_moe
from lopa.models.config import ModelConfig
from lopa.models.feed_forward import Where
from lopa.models.mixture import Mixture
from lopa.models.transformer import Layer

LLADA2 = llada2.read_config(llada2.FAMILY.tiny)
SDAR = sdar_moe.read_config(sdar_moe.FAMILY.tiny)
assert LLADA2.mixture is not None
CONFIGS = {
    "two shared": LLADA2,
    "one shared": replace(LLADA2, mixture=replace(LLADA2.mixture, shared=16)),
    "none shared": SDAR,
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one by one."""
    monkeypatch.setattr(routing, "_ROWS", 16)
    monkeypatch.setattr(routing, "_PAIRS", 128)


def a_layer(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Layer:
    torch.manual_seed(0)
    index = next(i for i in range(config.layers) if config.mixture_of(i) is not None)
    layer = Layer(config, index, Where(dtype=dtype)).requires_grad_(False)
    for parameter in layer.feed_forward.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return layer


def summed(layer: Mixture, x: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """What the norm adds up, and the counts of experts."""
    kind = experts_dtype(layer)
    counts = torch.zeros(len(layer.experts.stacks[0]), dtype=torch.int32)
    found, weights = mixture(
        layer,
        x,
        None if kind is None else quantize_rows(x, kind),
        torch.tensor([used], dtype=torch.int32),
        counts,
    )
    return (found.float() * weights[:, :, None]).sum(1)[:used], counts


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_in_plain_torch(name: str, dtype: torch.dtype) -> None:
    layer = a_layer(CONFIGS[name], dtype).feed_forward
    assert isinstance(layer, Mixture)
    x = torch.randn(13, CONFIGS[name].hidden_size).to(dtype)
    ours, counts = summed(layer, x, 11)
    plain = layer(x[:11]).float()
    limit = 2e-6 if dtype is torch.float32 else 2e-2
    assert (ours - plain).norm() < limit * plain.norm()
    chosen = layer.router(x[:11])[0]
    assert (
        counts[: layer.experts.count].tolist()
        == chosen.flatten().bincount(minlength=layer.experts.count).tolist()
    )
    if name == "one shared":
        assert counts[-1] == 11


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized(name: str, kind: Quantize) -> None:
    layer = a_layer(CONFIGS[name])
    x = torch.randn(7, CONFIGS[name].hidden_size)
    exact = layer.feed_forward(x)
    quantize_layer(layer, kind)
    fused = layer.feed_forward
    assert isinstance(fused, Mixture)
    assert isinstance(fused.experts, QuantizedExperts)
    assert isinstance(fused.shared, SharedExpert) == (name == "one shared")
    plain = fused(x)
    assert (plain - exact).norm() < (4e-2 if kind == "int8" else 0.15) * exact.norm()
    # The interpreter's cast to fp8 is not exact.
    ours, _ = summed(fused, x, 7)
    assert (ours - plain).norm() < (1e-2 if kind == "int8" else 0.1) * plain.norm()


def test_a_quantized_layer_has_each_weight_once() -> None:
    layer = a_layer(CONFIGS["one shared"])
    before = sum(p.numel() for p in layer.feed_forward.parameters())
    quantize_layer(layer, "int8")
    weights = [p for p in layer.feed_forward.parameters() if p.dim() == 3 and p.shape[2] > 1]
    assert {p.dtype for p in weights} == {torch.int8}
    router = layer.feed_forward.router  # type: ignore[union-attr]
    assert sum(p.numel() for p in weights) + sum(p.numel() for p in router.parameters()) == before
