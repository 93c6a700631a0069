"""The products of a model by the fastest kernel for the layer and the number of tokens.

Quantized layers have kernels of their own. In bf16: few tokens go by the compressed weights, many
by the SwiGLU GEMM, where these exist (Hopper), and the rest by the table of cuBLASLt algorithms,
which falls back to torch. Callers know none of this.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lopa.kernels.compressed_linear import CompressedLinear
from lopa.kernels.cublaslt import cublaslt_table
from lopa.kernels.hopper.swiglu_gemm import supports, swiglu_gemm
from lopa.kernels.quantize import QuantizedLinear
from lopa.kernels.scaled import Scaled
from lopa.kernels.triton import pointwise
from lopa.models.feed_forward import FeedForward
from lopa.models.transformer import Transformer


def linear(layer: nn.Module, x: Tensor | Scaled) -> Tensor:
    """x · weightᵀ + bias"""
    if isinstance(layer, QuantizedLinear):
        if isinstance(x, Tensor):
            x = pointwise.quantize_rows(x, layer.kind)
        out: Tensor = layer(x)
        return out
    assert isinstance(x, Tensor)
    if isinstance(layer, CompressedLinear) and layer.compressed.supports(x):
        return layer.compressed(x)
    return cublaslt_table(x.device)(x, layer.weight, layer.bias)  # type: ignore[arg-type]


def swiglu(layer: FeedForward, x: Tensor | Scaled) -> Tensor | Scaled:
    """silu(x · gateᵀ) · (x · upᵀ), as the input of `layer.down`."""
    gate_up, quantized = layer.gate_up, input_dtype(layer.down)
    if quantized is None and isinstance(x, Tensor):
        if isinstance(gate_up, CompressedLinear) and gate_up.compressed.supports(x):
            return gate_up.compressed(x)
        if supports(x, gate_up.weight, gated=True):
            return swiglu_gemm(x, gate_up.weight, gated=True)
    return pointwise.activate(linear(gate_up, x), quantized)


def logits(model: Transformer, hidden: Tensor) -> Tensor:
    """[N, hidden] → [N, vocab]"""
    weight = model.head_weight
    if supports(hidden, weight, gated=False):
        return swiglu_gemm(hidden, weight, gated=False)
    if model.config.tied_head:
        return cublaslt_table(hidden.device)(hidden, weight)
    return linear(model.head, hidden)


def input_dtype(layer: nn.Module | None) -> torch.dtype | None:
    """What the input of a layer is best quantized to by the kernel before it; None: nothing."""
    return layer.kind if isinstance(layer, QuantizedLinear) else None
