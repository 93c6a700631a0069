"""Which kernel computes a product. Fakes of them scale their results, to tell them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_support import COMPRESSED_FACTOR, FakeCompressed
from torch import Tensor

from lopa import LLM
from lopa.kernels import fast_linear
from lopa.kernels.compressed_linear import CompressedLinear
from lopa.kernels.quantize import QuantizedLinear, quantize
from lopa.kernels.scaled import Scaled, quantize_rows
from lopa.models.transformer import Transformer

GEMM_FACTOR = 3


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return LLM("dummy:dream-tiny", device="cpu", dtype="float32").model.requires_grad_(False)


@pytest.fixture
def gemm_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SwiGLU GEMM is for 100 tokens and more."""

    def gemm(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
        return GEMM_FACTOR * (swiglu(x, weight) if gated else F.linear(x, weight))

    monkeypatch.setattr(fast_linear, "supports", lambda x, weight, gated: len(x) >= 100)
    monkeypatch.setattr(fast_linear, "swiglu_gemm", gemm)


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=1)
    return F.silu(gate) * up


def compressed(layer: Any, *, gated: bool) -> CompressedLinear:
    weight: Any = FakeCompressed(layer.weight, gated)
    return CompressedLinear(layer, weight)


@pytest.mark.parametrize("tokens", [3, 64, 65, 100])
@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.usefixtures("gemm_for")
def test_feed_forward(model: Transformer, tokens: int, is_compressed: bool) -> None:
    layer: Any = model.layers[0].feed_forward
    if is_compressed:
        layer.gate_up = compressed(layer.gate_up, gated=True)
        layer.down = compressed(layer.down, gated=False)
    x = torch.randn(tokens, model.config.hidden_size)
    is_small = is_compressed and tokens <= 64
    factor = COMPRESSED_FACTOR if is_small else GEMM_FACTOR if tokens >= 100 else 1
    active = fast_linear.swiglu(layer, x)
    assert isinstance(active, Tensor)
    torch.testing.assert_close(active, factor * swiglu(x, layer.gate_up.weight))
    factor = COMPRESSED_FACTOR if is_small else 1
    expected = factor * F.linear(active, layer.down.weight)
    torch.testing.assert_close(fast_linear.linear(layer.down, active), expected)


@pytest.mark.usefixtures("gemm_for")
def test_quantized(model: Transformer) -> None:
    """Neither the GEMM nor its activation: the kernel of the activation quantizes."""
    quantize(model, "int8")
    layer: Any = model.layers[0]
    x = torch.randn(100, model.config.hidden_size)
    qkv = layer.attention.qkv
    assert isinstance(qkv, QuantizedLinear)
    assert qkv.bias is not None
    assert fast_linear.input_dtype(qkv) is torch.int8
    for given in (x, quantize_rows(x, torch.int8)):
        assert torch.equal(fast_linear.linear(qkv, given), qkv(x))
    active = fast_linear.swiglu(layer.feed_forward, x)
    assert isinstance(active, Scaled)
    gate, up = layer.feed_forward.gate_up(x).chunk(2, dim=1)
    expected = F.silu(gate) * up
    error = (active.values * active.scale - expected).norm() / expected.norm()
    assert error < 0.02


@pytest.mark.parametrize("tokens", [5, 100])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("gemm_for")
def test_logits(model: Transformer, tied: bool, tokens: int) -> None:
    model.head = compressed(model.head, gated=False)
    model.config = replace(model.config, tied_head=tied)
    rows = torch.randn(tokens, model.config.hidden_size)
    weight = model.embedding.weight if tied else model.head.weight
    factor = GEMM_FACTOR if tokens >= 100 else 1 if tied else COMPRESSED_FACTOR
    torch.testing.assert_close(fast_linear.logits(model, rows), factor * F.linear(rows, weight))
