"""Linear layers whose weights are stored twice: in bf16, and compressed for few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lopa.kernels import compilation
from lopa.kernels.hopper.compressed_gemm import (
    CompressedWeight,
    compress,
    compressed_bytes,
    kernel_jobs,
    tiling_of,
)
from lopa.kernels.quantize import QuantizedLinear, linears
from lopa.models.feed_forward import Linear
from lopa.models.transformer import Transformer

_SHARE = 0.25  # of the memory, at most


class CompressedLinear(Linear):
    """`compressed` is for few tokens; that of gate and up includes the activation (SwiGLU)."""

    def __init__(self, linear: Linear, compressed: CompressedWeight) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        self.weight, self.bias = linear.weight, linear.bias
        self.compressed = compressed


def compress_linears(
    model: Transformer, memory: int, compiling: compilation.Progress | None = None
) -> None:
    """Replace the layers that are faster so, if a share of `memory` (bytes) holds all of them."""
    layers: Any = model.layers
    owners: list[tuple[nn.Module, str]] = [one for layer in layers for one in linears(layer)]
    if not model.config.tied_head:
        owners.append((model, "head"))
    chosen = [
        (owner, name, linear)
        for owner, name in owners
        if _is_compressible(linear := getattr(owner, name), name)
    ]
    size = sum(compressed_bytes(linear.weight) for *_, linear in chosen)
    if not chosen or size > _SHARE * memory:
        return
    of_each = (tiling_of(linear.weight, gated=_is_gated(name)) for _, name, linear in chosen)
    tilings = {tiling for tiling in of_each if tiling is not None}
    device = chosen[0][2].weight.device
    compilation.compile_all(kernel_jobs(device, tilings), device, compiling)
    for owner, name, linear in chosen:
        if (found := compress(linear.weight, gated=_is_gated(name))) is not None:
            setattr(owner, name, CompressedLinear(linear, found))
    torch.cuda.empty_cache()  # of temporary tensors: the KV cache is sized by what is free


def _is_compressible(linear: Any, name: str) -> bool:
    if isinstance(linear, QuantizedLinear) or linear.bias is not None:
        return False
    return tiling_of(linear.weight, gated=_is_gated(name)) is not None


def _is_gated(name: str) -> bool:
    return name == "gate_up"
