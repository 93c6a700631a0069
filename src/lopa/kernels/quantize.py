"""Quantized linear layers: weights with one scale per output column, activations per token.

fp8 (e4m3) needs a GPU of compute capability 8.9 or newer; int8 W8A8 runs anywhere. The embedding,
the head and the norms keep their precision.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lopa.errors import DeviceError
from lopa.kernels.scaled import Scaled, quantize_rows
from lopa.models.config import ModelConfig
from lopa.models.transformer import Transformer

Quantize = Literal["fp8", "int8"]
KINDS: dict[Quantize, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# The linear layers of a layer.
PARTS = (
    ("attention", "qkv"),
    ("attention", "out"),
    ("feed_forward", "gate_up"),
    ("feed_forward", "down"),
)


class QuantizedLinear(nn.Module):
    """x · weightᵀ · scale + bias, for a plain activation or a quantized one."""

    def __init__(self, linear: nn.Linear, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        found = quantize_rows(linear.weight.data, kind)
        self.weight = nn.Parameter(found.values, requires_grad=False)  # [N, K]
        self.scale = nn.Parameter(found.scale, requires_grad=False)  # [N, 1]
        self.bias = linear.bias
        self.dtype = linear.weight.dtype

    def forward(self, x: Tensor | Scaled) -> Tensor:
        if isinstance(x, Tensor):
            x = quantize_rows(x, self.kind)
        on_device = x.values.device.type == "cuda"
        if on_device and self.kind is torch.float8_e4m3fn and _fills_device(x, self.weight):
            return torch._scaled_mm(
                x.values,
                self.weight.t(),
                scale_a=x.scale,
                scale_b=self.scale.t(),
                bias=self.bias,
                out_dtype=self.dtype,
                use_fast_accum=True,
            )
        if on_device:
            from lopa.kernels.triton.matmul import scaled_matmul

            return scaled_matmul(x.values, x.scale, self.weight, self.scale, self.bias, self.dtype)
        # Whole numbers: exact in fp32 as long as the sums stay below 2²⁴.
        out = x.values.float() @ self.weight.float().t() * x.scale * self.scale.t()
        out = out.to(self.dtype)
        return out if self.bias is None else out + self.bias


def _fills_device(x: Scaled, weight: Tensor) -> bool:
    """torch's fp8 product has tiles of 128 × 128 and does not split the inner axis."""
    rows, columns = len(x.values), len(weight)
    return rows > 64 and -(-rows // 128) * -(-columns // 128) > 64


def quantize(model: Transformer, kind: Quantize) -> None:
    """Replace the linear layers of every layer, one at a time."""
    for layer in model.layers:
        for part, name in PARTS:
            owner = getattr(layer, part)
            setattr(owner, name, QuantizedLinear(getattr(owner, name), KINDS[kind]))


def check_quantize(name: str, config: ModelConfig, device: torch.device) -> Quantize:
    """The name if the device supports it; else an error with the alternatives."""
    if config.mixture is not None:
        raise DeviceError("there is no quantization of experts: leave it out")
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    choices: list[Quantize] = ["fp8", "int8"] if able else ["int8"]
    for choice in choices:
        if name == choice:
            return choice
    reason = ""
    if name == "fp8":
        reason = "fp8 needs a GPU of compute capability 8.9 or newer: "
    elif name not in KINDS:
        reason = f"there is no quantization {name!r}: "
    raise DeviceError(f"{reason}on {device} choose {' or '.join(choices)}, or leave it out")
